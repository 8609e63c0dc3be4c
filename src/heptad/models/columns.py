"""Linears that read one input, their output features cut over the tensor axis (q, k, v; gate, up), and the norm before
them.

`columns`: one gather feeds them all and one reduction takes their input gradients. With a tape the input is gathered
again in the backward (`Stream.gathers_again`) while dX = Σ dYᵢ Wᵢ is computed, and dX is reduced while the weight
gradients are. `normed_columns`: the norm in the same autograd function, where the backward is whole: a call of a
function of ours costs 50 µs of Python, forward and backward. Without a tape: plain ops behind `Stream.enter`.

Legend: N tokens, D width, O outputs on this rank. Cost: the input is kept (the cut one, or the gathered one with
`Stream.keep`) once for all linears; the norm keeps its own and its statistics. Sources: Megatron-LM, arXiv 1909.08053,
§3; arXiv 2205.05198, §4.2.2 (the input gathered again). Read next: `parallel.py`, `mesh/regions.py`, `attention.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from heptad.mesh.regions import Stream
from heptad.models.layers import Linear, has_trainable, write_linear
from heptad.models.norms import Norm
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

    def outputs(self, full: Tensor) -> tuple[Tensor, ...]:
        """Each linear's, of the whole input."""
        return tuple(F.linear(full, linear.weight, linear.bias) for linear in self.linears)

    def backward(self, kept: Tensor | None, dys: Dys, wants_input: bool, sink: GradSink | None) -> Tensor | None:
        """The input's gradient where it is wanted, reduced while weight gradients are written to `sink`, if any."""
        again = reduced = None
        if sink is not None and kept is not None and self.stream.gathers_again:
            again = self.stream.gather(kept, self.num_tokens)
        if wants_input:
            reduced = self.stream.reduce(self.input_grad(dys))
        if sink is not None and kept is not None:
            self.write(kept if again is None else again.wait(), dys, sink)
        return None if reduced is None else reduced.wait()


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
    if any(map(has_trainable, linears)):
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
        return group.outputs(full)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        written = ctx.sink if ctx.num_links else None
        kept = None if written is None else ctx.saved_tensors[0]
        dx = ctx.group.backward(kept, dys, ctx.needs_input_grad[0], written)
        passed = (None,) * ctx.num_links if ctx.sink is not None else dys[: ctx.num_links]
        return dx, None, None, None, None, *passed


def normed_columns(
    norm: Norm, x: Tensor, linears: Sequence[Linear], stream: Stream, num_tokens: int
) -> tuple[Tensor, ...]:
    """`columns` of norm(x); where the backward is whole both are one autograd function, which costs Python once."""
    tape = linears[0].tape
    if tape is None or tape.sink is None:
        return columns(norm(x), linears, stream, num_tokens)
    group = Columns(linears, stream, num_tokens)
    y, *statistics = norm.parts(x)
    with torch.no_grad():
        full = stream.gather(y, num_tokens).wait()
    kept = y if stream.gathers_again or not stream.sequence else full
    trains = has_trainable(norm), any(map(has_trainable, linears))
    links = tape.links(group, (), x) if any(trains) else ()
    out: tuple[Tensor, ...] = _NormedColumns.apply(x, full, kept, statistics, norm, group, trains, tape.sink, *links)
    return out


class _NormedColumns(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, full: Tensor, kept: Tensor, statistics: list[Tensor], norm: Norm, group: Columns,
        trains: tuple[bool, bool], sink: GradSink, *links: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        ctx.norm, ctx.group, ctx.trains, ctx.sink, ctx.num_links = norm, group, trains, sink, len(links)
        ctx.save_for_backward(x, *statistics, *([kept] if trains[1] else []))
        return group.outputs(full)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        norm, (norm_trains, linears_train) = ctx.norm, ctx.trains
        saved, kept = (ctx.saved_tensors[:-1], ctx.saved_tensors[-1]) if linears_train else (ctx.saved_tensors, None)
        needed = ctx.needs_input_grad[0]
        dy = ctx.group.backward(kept, dys, needed or norm_trains, ctx.sink if linears_train else None)
        dx = None
        if dy is not None:
            dx = norm.input_grad(saved, dy) if needed else None
            if norm_trains:
                norm.write_weight_grads(saved, (dy,), ctx.sink)
        return dx, *(None,) * (7 + ctx.num_links)
