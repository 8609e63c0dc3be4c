"""Linears whose input features are cut over the tensor axis, and the token table; on one rank nothing communicates.

`RowLinear`: its input features cut, stored input first, so that every weight is cut along dim 0 (`cut.py`); its partial
sums are reduced over the ranks. `TokenTable`: rows of the vocabulary cut; ids of other ranks give zeros. With a tape:
backward of our own; without: plain ops before `Stream.leave`.

Legend: N tokens, D width, O outputs on this rank. Cost: a `RowLinear` keeps its input. Source: Megatron-LM, arXiv
1909.08053, §3. Read next: `columns.py` (linears whose outputs are cut), `mesh/regions.py`, `decoder.py`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from heptad.mesh.regions import SINGLE, Stream
from heptad.models.layers import Embedding, has_trainable, link_of, trainable
from heptad.models.taps import Dys, GradSink, Tape


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
        if has_trainable(self):
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
