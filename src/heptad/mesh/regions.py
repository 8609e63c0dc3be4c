"""Where the residual stream enters and leaves a tensor-parallel region, and how tensor ranks hold it in between.

Between two regions the stream is *whole* on every rank [B, L, D], or, with sequence parallelism, *cut* over the tokens:
row b·L + l of the flattened stream lies on rank (b·L + l) // n with n = ⌈B·L / T⌉, zeros fill the last rows. Inside a
region all tokens are there and features or heads are cut.

| pair | forward | backward | sent per rank, each |
|---|---|---|---|
| enter, whole (Megatron's f) | identity | all-reduce | 2(T-1)/T · B·L·D |
| leave, whole (g) | all-reduce | identity | 2(T-1)/T · B·L·D |
| enter, cut | all-gather | reduce-scatter | (T-1)/T · B·L·D |
| leave, cut | reduce-scatter | all-gather | (T-1)/T · B·L·D |
| slice, whole | this rank's tokens | all-gather | (T-1)/T · B·L·D, backward alone |
| join, whole | all-gather | this rank's tokens | (T-1)/T · B·L·D, forward alone |
| slice and join, cut | identity | identity | nothing |

`gather` and `reduce` are the two halves, asynchronous, for layers with a backward of their own; `enter` and `leave` are
the pairs for ordinary autograd. `slice` and `join` bound what works token by token on tokens each of which one rank has
(experts): rank i takes those that a cut stream would have there. One rank takes the same path and communicates nothing.
Sources: Megatron-LM, Shoeybi et al., arXiv 1909.08053, §3; sequence parallelism, Korthikanti et al., arXiv 2205.05198,
§4.2.2. Read next: `models/layers.py` (the layers that use both halves), `axes/tensor/`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from heptad.mesh.collectives import Group, Work, all_gather, all_reduce, reduce_scatter


@dataclass(slots=True)
class Pending:
    """A tensor that communication is making; `wait` returns its first `rows` rows (all, for None)."""

    work: Work | None
    tensor: Tensor
    rows: int | None = None

    def wait(self) -> Tensor:
        """Block until it is valid on this rank and what this rank sent may change."""
        if self.work is not None:
            self.work.complete()
            self.work = None
        return self.tensor if self.rows is None else self.tensor[: self.rows]


@dataclass(frozen=True, slots=True)
class Stream:
    """How the ranks of `group` (None: one rank) hold the residual stream; `sequence`: cut over its tokens.

    keep: what a region gathered is kept for the backward instead of being gathered again there.
    """

    group: Group | None = None
    sequence: bool = False
    keep: bool = False

    @property
    def size(self) -> int:
        """T."""
        return 1 if self.group is None else self.group.size

    @property
    def index(self) -> int:
        """This rank's place among the T."""
        return 0 if self.group is None else self.group.index

    @property
    def gathers_again(self) -> bool:
        """Whether a region's input is gathered a second time in its backward."""
        return self.sequence and not self.keep

    def own(self, num_tokens: int) -> tuple[int, int]:
        """The tokens [start, stop) of the flattened stream that lie on this rank."""
        if not self.sequence:
            return 0, num_tokens
        rows = -(-num_tokens // self.size)
        return min(self.index * rows, num_tokens), min((self.index + 1) * rows, num_tokens)

    def local(self, t: Tensor) -> Tensor:
        """Rows of a per-token tensor t [B, L, …] that belong to this rank's stream: [n, …], zeros at the end, or t."""
        return self.part(t) if self.sequence else t

    def part(self, t: Tensor) -> Tensor:
        """Of a per-token tensor t [B, L, …] the tokens that are this rank's alone, cut or whole: [n, …], zeros at the
        end."""
        flat = t.flatten(0, 1)
        if self.size == 1:
            return flat
        rows = -(-flat.shape[0] // self.size)
        return _padded(flat[self.index * rows : (self.index + 1) * rows], rows)

    def slice(self, x: Tensor) -> Tensor:
        """The stream -> the tokens that are this rank's alone [n, D], zeros at the end; a whole one's gradients are
        gathered."""
        if self.size == 1 or self.sequence:
            return x.flatten(0, -2)
        out: Tensor = _Slice.apply(x, self)
        return out

    def join(self, own: Tensor, shape: torch.Size) -> Tensor:
        """Back: every rank's own tokens [n, D] -> the stream, of this `shape`."""
        if self.size == 1 or self.sequence:
            return own.view(shape)
        out: Tensor = _Join.apply(own, self, shape)
        return out

    def gather_rows(self, own: Tensor, shape: torch.Size) -> Tensor:
        """Every rank's own tokens [n, D] of a whole stream -> [..., D] of this `shape`."""
        assert self.group is not None
        full = own.new_empty(self.size * own.shape[0], own.shape[1])
        work = all_gather(full.view(-1), own.contiguous().view(-1), self.group, self.group.ledger.phase)
        return Pending(work, full, shape[:-1].numel()).wait().view(shape)

    def gather(self, x: Tensor, num_tokens: int) -> Pending:
        """Stream -> all tokens. Cut: x [n, D] -> [num_tokens, D] by an all-gather; whole: x itself."""
        if not self.sequence:
            return Pending(None, x)
        assert self.group is not None
        full = x.new_empty(self.size * x.shape[0], *x.shape[1:])
        work = all_gather(full.view(-1), x.contiguous().view(-1), self.group, self.group.ledger.phase)
        return Pending(work, full, num_tokens)

    def reduce(self, partial: Tensor) -> Pending:
        """Every rank's partial sums of all tokens -> stream. `partial` [..., D] is this call's to overwrite.

        Cut: [n, D] by a reduce-scatter of the flattened tokens; whole: the same tensor, by an all-reduce in place.
        """
        if self.group is None or self.size == 1:
            return Pending(None, partial)
        phase = self.group.ledger.phase
        if not self.sequence:
            partial = partial.contiguous()
            return Pending(all_reduce(partial, self.group, phase), partial)
        flat = partial.flatten(0, -2)
        rows = -(-flat.shape[0] // self.size)
        full = _padded(flat, rows * self.size)
        shard = full.new_empty(rows, full.shape[-1])
        return Pending(reduce_scatter(shard.view(-1), full.contiguous().view(-1), self.group, phase), shard)

    def enter(self, x: Tensor, num_tokens: int) -> Tensor:
        """`gather`, whose gradient is reduced."""
        if self.size == 1:
            return x
        out: Tensor = _Enter.apply(x, self, num_tokens)
        return out

    def leave(self, partial: Tensor) -> Tensor:
        """`reduce`, whose gradient is gathered."""
        if self.size == 1:
            return partial
        out: Tensor = _Leave.apply(partial, self)
        return out


SINGLE = Stream()
"""One rank: what a model is built with."""


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, stream: Stream, num_tokens: int) -> Tensor:
        ctx.stream = stream
        return stream.gather(x, num_tokens).wait() if stream.sequence else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return ctx.stream.reduce(dy.clone()).wait(), None, None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, stream: Stream) -> Tensor:
        ctx.stream, ctx.shape = stream, partial.shape
        return stream.reduce(partial.clone()).wait()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return ctx.stream.gather(dy, ctx.shape[:-1].numel()).wait().view(ctx.shape), None


class _Slice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, stream: Stream) -> Tensor:
        ctx.stream, ctx.shape = stream, x.shape
        return stream.part(x.reshape(1, -1, x.shape[-1])).clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return ctx.stream.gather_rows(dy, ctx.shape), None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, stream: Stream, shape: torch.Size) -> Tensor:
        ctx.stream = stream
        return stream.gather_rows(own, shape)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return ctx.stream.part(dy.reshape(1, -1, dy.shape[-1])), None, None


def _padded(rows: Tensor, number: int) -> Tensor:
    """`rows` [m, …] with zeros behind them, `number` in all."""
    missing = number - rows.shape[0]
    return F.pad(rows, (0, 0) * (rows.dim() - 1) + (0, missing)) if missing else rows
