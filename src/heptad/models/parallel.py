"""Linears and the token table as the tensor axis cuts them; on one rank the same code communicates nothing.

`columns`: linears that read one input, their output features cut (q, k, v; gate, up). One gather feeds them all and one
reduction takes their input gradients. `RowLinear`: its input features cut, stored input first, so that every weight is
cut along dim 0 (`cut.py`). `TokenTable`: rows of the vocabulary cut; ids of other ranks give zeros.

Backward with a tape, in this order: the input is gathered again (`Stream.gathers_again`) while dX = Σ dYᵢ Wᵢ is
computed; dX is reduced while the weight gradients are. Without a tape: plain ops between `Stream.enter` and `leave`.

Legend: N tokens, D width, O outputs on this rank. Cost: `columns` keeps its input (the cut one, or the gathered one
with `Stream.keep`) once for all its linears; a `RowLinear` its input. Sources: Megatron-LM, arXiv 1909.08053, §3;
arXiv 2205.05198, §4.2.2 (the input gathered again). Read next: `mesh/regions.py`, `attention.py`, `decoder.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from heptad.mesh.regions import SINGLE, Stream
from heptad.models.activation import activation, slope
from heptad.models.layers import Embedding, Linear, link_of, trainable, write_linear
from heptad.models.taps import Dys, GradSink, Tape


class Columns:
    """Linears that read one input x (the stream), `num_tokens` of it in all; what is tapped is all of them at once."""

    tape: Tape | None = None

    def __init__(self, linears: Sequence[Linear], stream: Stream, num_tokens: int) -> None:
        self.linears, self.stream, self.num_tokens = linears, stream, num_tokens

    def write_weight_grads(self, saved: tuple[Tensor, ...], dys: Dys, sink: GradSink) -> None:
        """Each linear's own, from what was kept of the input."""
        full = saved[0]
        if self.stream.gathers_again:
            full = self.stream.gather(full, self.num_tokens).wait()
        self.write(full, dys, sink)

    def write(self, full: Tensor, dys: Dys, sink: GradSink) -> None:
        """From the whole input [..., D] and the gradients of the outputs."""
        for linear, dy in zip(self.linears, dys, strict=True):
            if dy is not None:
                write_linear(linear, full, dy, sink)

    def input_grad(self, dys: Dys) -> Tensor:
        """Σ dYᵢ Wᵢ: [..., D], a new tensor. Each product is rounded and the last comes first, as autograd adds them."""
        total: Tensor | None = None
        for linear, dy in zip(reversed(self.linears), reversed(dys), strict=True):
            assert dy is not None
            product = dy.reshape(-1, dy.shape[-1]) @ linear.weight
            total = product if total is None else total.add_(product)
        assert total is not None and dys[0] is not None
        return total.view(*dys[0].shape[:-1], -1)


def columns(x: Tensor, linears: Sequence[Linear], stream: Stream, num_tokens: int) -> tuple[Tensor, ...]:
    """x (the stream) -> each linear's output, all tokens: [N, O] where the stream is cut, else [B, L, O]."""
    tape = linears[0].tape
    if tape is None:
        full = stream.enter(x, num_tokens)
        return tuple(F.linear(full, linear.weight, linear.bias) for linear in linears)
    group = Columns(linears, stream, num_tokens)
    with torch.no_grad():
        full = stream.gather(x.detach(), num_tokens).wait()
    kept = x if stream.gathers_again or not stream.sequence else full
    links: tuple[Tensor, ...] = ()
    if any(trainable(linear.weight) or trainable(linear.bias) for linear in linears):
        shapes = [torch.Size((*full.shape[:-1], linear.weight.shape[0])) for linear in linears]
        links = tape.links(group, (kept,), x, *shapes)
    out: tuple[Tensor, ...] = _Columns.apply(x, full, kept, group, tape.sink, *links)
    return out


class _Columns(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, full: Tensor, kept: Tensor, group: Columns, sink: GradSink | None, *links: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.group, ctx.sink, ctx.num_links = group, sink, len(links)
        if sink is not None and links:
            ctx.save_for_backward(kept)
        return tuple(F.linear(full, linear.weight, linear.bias) for linear in group.linears)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        group: Columns = ctx.group
        stream, writes = group.stream, ctx.sink is not None and ctx.num_links > 0
        again = reduced = None
        if writes:
            (kept,) = ctx.saved_tensors
            again = stream.gather(kept, group.num_tokens) if stream.gathers_again else None
        if ctx.needs_input_grad[0]:
            reduced = stream.reduce(group.input_grad(dys))
        if writes:
            group.write(kept if again is None else again.wait(), dys, ctx.sink)
        dx = None if reduced is None else reduced.wait()
        passed = (None,) * ctx.num_links if ctx.sink is not None else dys[: ctx.num_links]
        return dx, None, None, None, None, *passed


class RowLinear(nn.Module):
    """Stream <- x [..., I] weight[I, O] (+ bias[O]): input features cut, partial sums reduced over the ranks.

    One rank adds the bias to its partial sum (`adds_bias`), so the sum holds it once; its gradient, of all tokens, is
    whole on every rank.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    tape: Tape | None = None
    stream: Stream = SINGLE
    adds_bias: bool = True

    def __init__(self, role: str, fan_in: int, fan_out: int, bias: bool) -> None:
        super().__init__()
        self.role = role
        self.weight = nn.Parameter(torch.empty(fan_in, fan_out))
        self.bias = nn.Parameter(torch.empty(fan_out)) if bias else None

    def partial(self, x: Tensor) -> Tensor:
        """This rank's sum, before the reduction: a new tensor [..., O]."""
        rows = x.reshape(-1, x.shape[-1])
        if self.bias is None or not self.adds_bias:
            return (rows @ self.weight).view(*x.shape[:-1], -1)
        return torch.addmm(self.bias, rows, self.weight).view(*x.shape[:-1], -1)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, L, I] or [N, I], all tokens -> the stream."""
        if self.tape is None:
            return self.stream.leave(self.partial(x))
        link = None
        if trainable(self.weight) or trainable(self.bias):
            shape = torch.Size((*x.shape[:-1], self.weight.shape[1]))
            link = link_of(self.tape, self, (x,), x, shape)
        out: Tensor = _RowLinear.apply(x, link, self, self.tape.sink)
        return out

    def write_weight_grads(self, saved: tuple[Tensor, ...], dys: Dys, sink: GradSink) -> None:
        """weight += xᵀ dy, bias += Σ dy over the leading dims; dy is that of all tokens."""
        (x,), (dy,) = saved, dys
        assert dy is not None
        rows = dy.reshape(-1, dy.shape[-1])
        if trainable(self.weight):
            sink.add_matmul(self.weight, x.reshape(-1, x.shape[-1]).t(), rows)
        if self.bias is not None and self.bias.requires_grad:
            sink.add(self.bias, rows.sum(0))


class _RowLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, link: Tensor | None, module: RowLinear, sink: GradSink | None) -> Tensor:
        ctx.module, ctx.sink, ctx.leading = module, sink, x.shape[:-1]
        if sink is not None and link is not None:
            ctx.save_for_backward(x)
        return module.stream.reduce(module.partial(x)).wait()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        module: RowLinear = ctx.module
        dy = module.stream.gather(dy, ctx.leading.numel()).wait().reshape(*ctx.leading, -1)
        dx = dy @ module.weight.t() if ctx.needs_input_grad[0] else None
        wanted = ctx.needs_input_grad[1]
        if wanted and ctx.sink is not None:
            module.write_weight_grads(ctx.saved_tensors, (dy,), ctx.sink)
        return dx, dy if wanted and ctx.sink is None else None, None, None


class Activated:
    """A `RowLinear` behind `formed`, which keeps what `formed` reads instead of its own input."""

    tape: Tape | None = None

    def __init__(self, linear: RowLinear, formed: Callable[..., Tensor]) -> None:
        self.linear, self.formed = linear, formed

    def write_weight_grads(self, saved: tuple[Tensor, ...], dys: Dys, sink: GradSink) -> None:
        """The linear's own; its input is made again."""
        self.linear.write_weight_grads((self.formed(*saved),), dys, sink)

    def link(self, tape: Tape, saved: Sequence[Tensor]) -> Tensor | None:
        """What ties it into the graph, where the linear has anything to train."""
        weight = self.linear.weight
        if not trainable(weight) and not trainable(self.linear.bias):
            return None
        return link_of(tape, self, tuple(saved), saved[0], torch.Size((*saved[0].shape[:-1], weight.shape[1])))


def activated(linear: RowLinear, activate: Callable[..., Tensor], parts: Sequence[Tensor]) -> Tensor:
    """linear(activate(*parts)) -> the stream, keeping `parts` [..., I] alone.

    The activation runs again in the backward: once for both gradients where that is whole, else once in I, once in W.
    """
    tape = linear.tape
    if tape is None:
        out: Tensor = linear(activate(*parts))
        return out
    module = Activated(linear, activate)
    out = _Activated.apply(module.link(tape, parts), module, tape.sink, *parts)
    return out


class _Activated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, link: Tensor | None, module: Activated, sink: GradSink | None, *parts: Tensor) -> Tensor:
        ctx.module, ctx.sink, ctx.leading = module, sink, parts[0].shape[:-1]
        ctx.save_for_backward(*parts)
        return module.linear.stream.reduce(module.linear.partial(module.formed(*parts))).wait()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        module, linear = ctx.module, ctx.module.linear
        dy = linear.stream.gather(dy, ctx.leading.numel()).wait().reshape(*ctx.leading, -1)
        wanted, needed = ctx.needs_input_grad[0], ctx.needs_input_grad[3:]
        leaves = [part.detach().requires_grad_(need) for part, need in zip(ctx.saved_tensors, needed, strict=True)]
        with torch.enable_grad():
            inner = module.formed(*leaves)
        wants = [leaf for leaf in leaves if leaf.requires_grad]
        found = iter(torch.autograd.grad(inner, wants, dy @ linear.weight.t()) if wants else ())
        if wanted and ctx.sink is not None:
            linear.write_weight_grads((inner.detach(),), (dy,), ctx.sink)
        passed = dy if wanted and ctx.sink is None else None
        return passed, None, None, *(next(found) if need else None for need in needed)


def gated(linear: RowLinear, name: str, gate: Tensor, up: Tensor) -> Tensor:
    """linear(act(gate) · up) -> the stream, of [..., I] keeping gate, up and act(gate).

    The product is made again in the backward: one multiplication an element, where plain autograd would keep it too.
    Only where the backward is whole: W alone would hold act(gate) and up instead of their product.
    """
    assert linear.tape is not None and linear.tape.sink is not None
    act, module = activation(name, gate.detach()), Activated(linear, torch.mul)
    link = module.link(linear.tape, (act, up))
    out: Tensor = _GatedDown.apply(gate, up, act, link, module, name, linear.tape.sink)
    return out


class _GatedDown(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, gate: Tensor, up: Tensor, act: Tensor, link: Tensor | None, module: Activated, name: str,
        sink: GradSink,
    ) -> Tensor:  # fmt: skip
        ctx.module, ctx.name, ctx.sink, ctx.leading = module, name, sink, gate.shape[:-1]
        ctx.save_for_backward(gate, up, act)
        return module.linear.stream.reduce(module.linear.partial(act * up)).wait()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        gate, up, act = ctx.saved_tensors
        linear: RowLinear = ctx.module.linear
        dy = linear.stream.gather(dy, ctx.leading.numel()).wait().reshape(*ctx.leading, -1)
        dgate = dup = None
        if any(ctx.needs_input_grad[:2]):
            inner = dy @ linear.weight.t()
            dgate, dup = slope(ctx.name, gate, inner * up), inner.mul_(act)
        if ctx.needs_input_grad[3]:
            ctx.module.write_weight_grads((act, up), (dy,), ctx.sink)
        return dgate, dup, None, None, None, None, None


class TokenTable(Embedding):
    """Stream <- rows of a table [V, D] by token ids [B, L], the vocabulary cut: this rank has ids from `first` on."""

    stream: Stream = SINGLE
    first: int = 0

    def forward(self, ids: Tensor) -> Tensor:
        """ids [B, L] int64 -> the stream."""
        if self.tape is None:
            return self.stream.leave(self.partial(ids))
        link = None
        if trainable(self.weight):
            shape = torch.Size((*ids.shape, self.weight.shape[1]))
            link = link_of(self.tape, self, (ids,), self.weight, shape)
        out: Tensor = _TokenTable.apply(ids, link, self, self.tape.sink)
        return out

    def partial(self, ids: Tensor) -> Tensor:
        """[B, L, D]: the rows of this rank's ids, zeros for all others'."""
        if self.stream.size == 1:
            return F.embedding(ids, self.weight)
        here, rows = self._rows(ids)
        return F.embedding(rows, self.weight).mul_(here.unsqueeze(-1))

    def _rows(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Which ids are this rank's, and their rows (0 for all others')."""
        rows = ids - self.first
        here = (rows >= 0) & (rows < self.weight.shape[0])
        return here, rows.masked_fill_(~here, 0)

    def write_weight_grads(self, saved: tuple[Tensor, ...], dys: Dys, sink: GradSink) -> None:
        """weight[row] += dy for this rank's ids."""
        (ids,), (dy,) = saved, dys
        assert dy is not None
        flat, values = ids.reshape(-1), dy.reshape(-1, dy.shape[-1])
        if self.stream.size > 1:
            here, rows = self._rows(flat)
            flat, values = rows, values * here.unsqueeze(-1)
        sink.add_rows(self.weight, flat, values)


class _TokenTable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, link: Tensor | None, module: TokenTable, sink: GradSink | None) -> Tensor:
        ctx.module, ctx.sink, ctx.shape = module, sink, ids.shape
        if sink is not None and link is not None:
            ctx.save_for_backward(ids)
        return module.stream.reduce(module.partial(ids)).wait()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        dy = ctx.module.stream.gather(dy, ctx.shape.numel()).wait().reshape(*ctx.shape, -1)
        if ctx.sink is None:
            return None, dy, None, None
        ctx.module.write_weight_grads(ctx.saved_tensors, (dy,), ctx.sink)
        return None, None, None, None
