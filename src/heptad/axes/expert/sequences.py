"""Sequences whose tokens several ranks route: cut over context ranks, and each rank's tokens over tensor ranks.

What a router's losses and drops need of a whole sequence is small: how many of its tokens chose each expert, summed
over the C·T ranks (an all-reduce of B·E int32, with a balancing loss), and, with a capacity, every token's choices in
order of position (an all-gather of n·K int32 of each rank): B·L·K numbers, never rows. Both again where a block is
recomputed. Nothing is sent backward: counts and choices have no gradient.

Legend: as in `models/sequences.py`; C context ranks, T tensor ranks. Read next: `models/router.py`, `axes/apply.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from heptad.mesh.collectives import Group, all_gather, all_reduce
from heptad.mesh.regions import Stream
from heptad.models.batch import Batch
from heptad.models.build import Model
from heptad.models.router import routers
from heptad.models.sequences import Sequences


class CutSequences(Sequences):
    """`group`: the C·T ranks that hold parts of the same sequences, tensor ranks innermost."""

    def __init__(self, stream: Stream, group: Group) -> None:
        super().__init__(stream)
        self.group, self.ranks = group, group.size // stream.size

    def summed(self, counts: Tensor) -> Tensor:
        """See `Sequences`. Collective."""
        counts = counts.contiguous()
        work = all_reduce(counts, self.group, self.group.ledger.phase)
        work.complete()
        return counts

    def whole(self, values: Tensor, batch: Batch) -> Tensor:
        """See `Sequences`; L is then that of the padded row. Collective."""
        own = values.to(torch.int32).contiguous()
        full = own.new_empty(self.group.size * own.numel())
        work = all_gather(full, own.view(-1), self.group, self.group.ledger.phase)
        work.complete()
        (rows, length), choices = batch.ids.shape, values.shape[-1]
        tokens = full.view(self.ranks, -1, choices)[:, : rows * length]  # behind them what fills up the last rank
        placed = tokens.reshape(self.ranks, rows, length, choices).transpose(0, 1).flatten(1, 2).to(values.dtype)
        if batch.context is None:
            return placed
        return _picked(placed, torch.from_numpy(batch.context.inverse).to(values.device))

    def part(self, values: Tensor, batch: Batch) -> Tensor:
        """See `Sequences`."""
        if batch.context is not None:
            mine = batch.context.part(self.group.index // self.stream.size, self.ranks)
            values = _picked(values, torch.from_numpy(mine).to(values.device))
        return self.stream.part(values)


def _picked(values: Tensor, places: Tensor) -> Tensor:
    """values [B, L, K], places [B, n] -> [B, n, K]."""
    return values.gather(1, places.unsqueeze(-1).expand(-1, -1, values.shape[-1]))


def cut_sequences(model: Model, stream: Stream, group: Group) -> None:
    """Set the seam of every router of `model`; `group`: context and tensor ranks."""
    if group.size > 1:
        for router in routers(model.module).values():
            router.rows = CutSequences(stream, group)
