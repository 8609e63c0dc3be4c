"""Tokens to the ranks that hold their experts, and their outputs back: one level.

    tokens ─ sort by expert ─ rows to "ep" ─ rows to "etp" ─ sort by expert ─ experts ─┐
       sums ─ weights ─ rows back over "ep" ─ parts summed over "etp" ─ order back ────┘

Experts lie in runs of as many, so sorting by expert sorts by rank. What comes is in the order of (etp rank, source,
expert, token) and is sorted by expert once more; within one it keeps that order. How many rows go where is one small
exchange and one transfer to the host (`mesh/host.py`), before any row moves.

Kept for the backward beside what one device keeps: the order in which rows that came are sorted, 8·R bytes. Precision:
rows travel in the stream's dtype, unweighted; with ETP > 1 each part of a sum over rows of an expert is rounded to it
once, and they are added in at least fp32.

Legend: N own tokens, K experts a token, M rows of them, R rows that the ranks of one "etp" group get together, El
experts of a rank. Read next: `two_level.py`, `models/moe.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from heptad.axes.expert.transfer import Trip, exchange, gather, reduce, start, travel, wait
from heptad.mesh.collectives import Group, Work, all_gather, all_to_all
from heptad.mesh.host import host_counts
from heptad.models.experts import Experts
from heptad.models.moe import Meanwhile, combine, even_counts, sorted_choices, spread
from heptad.models.router import Routing


@dataclass(frozen=True, slots=True)
class OneLevel:
    """A `models.moe.Dispatch` over ranks with other experts (`ep`) and with other rows of the same ones (`etp`).

    gives: another micro-batch has its turn while rows are on the way over `ep`.
    """

    ep: Group
    etp: Group
    gives: bool = True

    def __call__(
        self, tokens: Tensor, routing: Routing, experts: Experts, meanwhile: Meanwhile
    ) -> tuple[Tensor, Tensor | None]:
        """tokens [N, D] of this rank, `routing` to all EP·El experts, `experts`: the El here -> sums [N, D]."""
        choices = routing.experts.shape[1]
        ways = self._ways(routing, experts.number)
        coming = start(spread(tokens, ways.slots, choices), ways.out)
        beside = meanwhile()
        rows = travel(wait(coming, ways.out), ways.whole)  # [R, D], by etp rank, source and expert
        results = experts(ways.sort(rows), ways.counts)  # by expert
        results = travel(ways.unsort(results), ways.parts)  # as the rows came
        return combine(travel(results, ways.home), routing.weights, ways.slots), beside

    def _ways(self, routing: Routing, number: int) -> Ways:
        """The routes of this rank's rows and of those that come; number: experts here."""
        order, totals = sorted_choices(routing, self.ep.size * number)
        came = exchanged(totals, self.ep)  # [EP sources, El]
        every = _gathered(came, self.etp)  # [ETP, EP, El]
        even = even_counts(order.numel(), totals.numel())
        numbers = host_counts(torch.cat((totals, every)), even + even[-number:] * (self.ep.size * self.etp.size))
        return Ways.of(self, order, every, numbers, number)


@dataclass(frozen=True, slots=True)
class Ways:
    """Of one call. slots [M]: numbers n·K + k of own choices, by expert; counts: rows of each expert here.

    out, home: rows over "ep" and back. whole, parts: over "etp" and back. order [R]: None where rows come sorted.
    """

    slots: Tensor
    counts: tuple[int, ...]
    out: Trip
    whole: Trip
    parts: Trip
    home: Trip
    order: Tensor | None

    @classmethod
    def of(cls, groups: OneLevel, order: Tensor, every: Tensor, numbers: Sequence[int], number: int) -> Ways:
        """order [N·K]: own choices by expert. every [ETP·EP·El]: rows that come, by etp rank, source and expert.
        numbers: own rows by expert [EP·El], then `every`."""
        ep, etp = groups.ep.size, groups.etp.size
        own = _sums(numbers[: ep * number], number)
        by_source = _sums(numbers[ep * number :], number)  # [ETP·EP]
        mine = by_source[groups.etp.index * ep :][:ep]
        by_peer = _sums(by_source, ep)  # [ETP]
        counts = tuple(sum(numbers[ep * number + expert :: number]) for expert in range(number))
        sources = ep * etp
        come = None
        if sources > 1:
            expert = torch.arange(number, device=every.device).repeat(sources)
            come = expert.repeat_interleave(every, output_size=sum(by_peer)).argsort(stable=True)
        return cls(
            order[: sum(own)],
            counts,
            exchange(groups.ep, own, mine, groups.gives),
            gather(groups.etp, by_peer),
            reduce(groups.etp, by_peer),
            exchange(groups.ep, mine, own, groups.gives),
            come,
        )

    def sort(self, rows: Tensor) -> Tensor:
        """Rows as they came [R, D] -> by expert."""
        out: Tensor = rows if self.order is None else _Sort.apply(rows, self.order)
        return out

    def unsort(self, rows: Tensor) -> Tensor:
        """The inverse of `sort`."""
        out: Tensor = rows if self.order is None else _Unsort.apply(rows, self.order)
        return out


def _sums(numbers: Sequence[int], run: int) -> list[int]:
    """Of each run of `run` numbers."""
    return [sum(numbers[at : at + run]) for at in range(0, len(numbers), run)]


def exchanged(counts: Tensor, group: Group) -> Tensor:
    """counts [G·m], m of them for each rank of `group` -> those of each rank for this one, by source [G·m]."""
    if group.size == 1:
        return counts
    out = torch.empty_like(counts)
    return _done(out, all_to_all(out, counts.contiguous(), group, group.ledger.phase))


def _gathered(counts: Tensor, group: Group) -> Tensor:
    """counts [n] of each rank -> [ETP·n]."""
    if group.size == 1:
        return counts
    out = counts.new_empty(group.size * counts.numel())
    return _done(out, all_gather(out, counts, group, group.ledger.phase))


def _done(out: Tensor, work: Work) -> Tensor:
    work.complete()
    return out


class _Sort(torch.autograd.Function):
    """rows [R, D] -> rows[order]; no two are the same, so the gradient is written, not added."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return rows[order]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return _placed(dy, ctx.saved_tensors[0]), None


class _Unsort(torch.autograd.Function):
    """out[order] = rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return _placed(rows, order)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy[ctx.saved_tensors[0]], None


def _placed(rows: Tensor, order: Tensor) -> Tensor:
    out = torch.empty_like(rows, memory_format=torch.contiguous_format)
    out[order] = rows
    return out
