"""Rows on their way between ranks, in two halves: what stands between start and wait hides the transfer, in the
forward and in the backward.

`start` posts the transfer and `wait` returns the rows that came. In the backward the gradient meets `wait` first,
which starts the mirrored transfer, and then `start`, which waits for it: autograd runs what was recorded in between, in
between. Nothing is saved but the counts. One rank takes the same path: the rows are passed on. Right before the wait of
a trip that `gives`, another micro-batch may have its turn (`mesh/turns.py`): of the trips of one call only the slowest
two do, there and back, since each turn should have a computation in it.

Read next: `dispatch.py`, `mesh/collectives.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from heptad.mesh.collectives import Group, Work, all_gather_rows, all_to_all_rows, reduce_scatter_rows
from heptad.mesh.turns import give

Move = Callable[[Tensor], tuple[Tensor, Work]]
"""rows [M, …], contiguous -> memory for those that come [R, …], and the work that fills it."""


@dataclass(slots=True)
class Trip:
    """One transfer of rows and its mirror, that of their gradients. `under_way`: what either has posted."""

    there: Move
    back: Move
    gives: bool = False
    under_way: tuple[Tensor, Work] | None = None

    def begin(self, rows: Tensor, move: Move) -> Tensor:
        """Post one of both; memory for what comes."""
        assert self.under_way is None, "one transfer after the other"
        self.under_way = move(rows.contiguous())
        return self.under_way[0]

    def finish(self) -> Tensor:
        """Wait for what is under way."""
        assert self.under_way is not None, "nothing was started"
        if self.gives:
            give()
        (came, work), self.under_way = self.under_way, None
        work.complete()
        return came


def exchange(group: Group, send: Sequence[int], recv: Sequence[int], gives: bool = False) -> Trip:
    """The next send[i] rows go to rank i, recv[i] come from it, in rank order. gives: another micro-batch the turn."""
    return Trip(_exchange(group, send, recv), _exchange(group, recv, send), gives and group.size > 1)


def gather(group: Group, counts: Sequence[int]) -> Trip:
    """Every rank gets the rows of all, counts[i] of rank i; their gradients are summed where they came from."""
    return Trip(_gather(group, counts), _reduce(group, counts))


def reduce(group: Group, counts: Sequence[int]) -> Trip:
    """Rows of all, of which each rank has a part of the sum, become counts[i] whole ones on rank i."""
    return Trip(_reduce(group, counts), _gather(group, counts))


def _exchange(group: Group, send: Sequence[int], recv: Sequence[int]) -> Move:
    return _move(group, sum(recv), lambda out, rows: all_to_all_rows(out, rows, send, recv, group, group.ledger.phase))


def _gather(group: Group, counts: Sequence[int]) -> Move:
    return _move(group, sum(counts), lambda out, rows: all_gather_rows(out, rows, counts, group, group.ledger.phase))


def _reduce(group: Group, counts: Sequence[int]) -> Move:
    own = counts[group.index]
    return _move(group, own, lambda out, rows: reduce_scatter_rows(out, rows, counts, group, group.ledger.phase))


def _move(group: Group, come: int, post: Callable[[Tensor, Tensor], Work]) -> Move:
    """`come` rows arrive, by what `post` (memory for them, rows sent) starts; one rank keeps its own."""

    def move(rows: Tensor) -> tuple[Tensor, Work]:
        if group.size == 1:
            return rows.detach(), Work()
        out = rows.new_empty(come, *rows.shape[1:])
        return out, post(out, rows)

    return move


def start(rows: Tensor, trip: Trip) -> Tensor:
    """Post `trip` for rows [M, …]; what it returns is good for `wait` alone, and holds no memory."""
    out: Tensor = _Start.apply(rows, trip)
    return out


def wait(coming: Tensor, trip: Trip) -> Tensor:
    """The rows that came [R, …], for what `start` returned."""
    out: Tensor = _Wait.apply(coming, trip)
    return out


def travel(rows: Tensor, trip: Trip) -> Tensor:
    """Both halves at once: nothing is computed meanwhile, unless another micro-batch has its turn."""
    return wait(start(rows, trip), trip)


class _Start(torch.autograd.Function):
    """What ties both halves together has the shape of `rows`, since in the backward their gradient comes that way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, trip: Trip) -> Tensor:
        ctx.trip = trip
        trip.begin(rows, trip.there)
        return rows.new_empty(()).expand(rows.shape)

    @staticmethod
    def backward(ctx: Any, coming: Tensor) -> tuple[Tensor, None]:
        ctx.trip.finish()
        return coming, None


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, coming: Tensor, trip: Trip) -> Tensor:
        ctx.trip = trip
        return trip.finish()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return ctx.trip.begin(dy, ctx.trip.back), None
