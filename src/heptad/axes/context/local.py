"""What one ring rank computes of its own queries and one rank's keys: the blocks that its rows and documents leave.

Forward adds to a `Partial`, backward to gradients in at least fp32; the ring and the gather differ only in when which
keys are there. Nothing here communicates. Memory beside arguments: one block's results.

Legend: B rows, H query and K kv heads here, n tokens of a ring rank, d head_dim; kv [2, B, K, n, d] is k and v.
Read next: `kernels.py`, `merge.py`, `pieces.py`, `ring.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from heptad.axes.context.blocks import Block
from heptad.axes.context.kernels import Kernels, Seen, edge_bias
from heptad.axes.context.merge import Partial
from heptad.axes.context.pieces import halves, pieces
from heptad.models.dropout import Dropout
from heptad.models.placement import Placement


@dataclass(frozen=True, slots=True)
class Drops:
    """Which probabilities drop: `numbers` [B, R·n] int64 are the tokens' global numbers, ring rank after ring rank."""

    dropout: Dropout
    numbers: Tensor
    step: int

    def of(self, block: Block, heads: int, q_first: int, k_first: int) -> Callable[[Tensor], Tensor]:
        """For a block of queries and keys whose ranks' tokens begin at these columns of `numbers`."""
        rows = self.numbers[slice(*block.rows)]
        queries = rows[:, q_first + block.q_start : q_first + block.q_stop]
        keys = rows[:, k_first + block.k_start : k_first + block.k_stop]
        tensors, drop = self.dropout.attention_map(heads, queries, keys, self.step)
        return lambda x: drop(x, *tensors)


@dataclass(frozen=True, slots=True)
class Local:
    """Ring rank `rank`'s share of a batch placed by `placement`. drops: None drops nothing."""

    kernels: Kernels
    placement: Placement
    rank: int
    window: int | None
    drops: Drops | None

    def blocks(self, source: int) -> tuple[Block, ...]:
        """Of own queries and ring rank `source`'s keys."""
        return pieces(self.placement, self.rank, source, self.window, self.kernels.tile)

    def own_halves(self) -> tuple[tuple[Block, ...], tuple[Block, ...]]:
        """The blocks of own queries and own keys, in two lists of about the same work."""
        return halves(self.placement, self.rank, self.window, self.kernels.tile)

    def forward(self, q: Tensor, kv: Tensor, source: int, total: Partial) -> None:
        """Adds own queries' attention to the keys of ring rank `source`."""
        k, v = kv
        for block in self.blocks(source):
            rows, queries, keys = _slices(block)
            one = q[rows, :, queries]
            seen = self._seen(block, one, source)
            total.add(rows, queries, *self.kernels.forward(one, k[rows, :, keys], v[rows, :, keys], seen))

    def backward(
        self, saved: Sequence[Tensor], kv: Tensor, source: int, blocks: Sequence[Block], dq: Tensor, dkv: Tensor
    ) -> None:
        """Adds what these blocks give to dq and to dkv, of ring rank `source`'s keys. saved: dout, q, out, lse."""
        (k, v), (dk, dv) = kv, dkv
        for block in blocks:
            rows, queries, keys = _slices(block)
            dout, q, out, lse = (x[rows, :, queries] for x in saved)
            seen = self._seen(block, q, source)
            parts = self.kernels.backward(dout, q, k[rows, :, keys], v[rows, :, keys], out, lse, seen)
            dq[rows, :, queries].add_(parts[0])
            dk[rows, :, keys].add_(parts[1])
            dv[rows, :, keys].add_(parts[2])

    def _seen(self, block: Block, q: Tensor, source: int) -> Seen:
        n = self.placement.tokens
        drop = None if self.drops is None else self.drops.of(block, q.shape[1], self.rank * n, source * n)
        bias = None
        if block.kind == "window":
            bias = edge_bias(block.q_stop - block.q_start, block.k_stop - block.k_start, block.offset, q)
        return Seen(block.kind == "causal", bias, drop)


def _slices(block: Block) -> tuple[slice, slice, slice]:
    """Rows, queries, keys."""
    return slice(*block.rows), slice(block.q_start, block.q_stop), slice(block.k_start, block.k_stop)
