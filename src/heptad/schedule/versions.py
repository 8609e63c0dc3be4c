"""Stale weights: where an asynchronous schedule updates a stage, which weights are kept for whom. Pure, no torch.

A stage is updated (V) right after the backward of each micro-batch, from that micro-batch's gradient, reduced over the
data ranks first. A backward uses the weights of its forward. So before an update that comes between the two, the
weights are kept for that micro-batch (K: one copy for all micro-batches that need the same ones); its backward, with
what it recomputes, runs between X (the kept weights are the stage's) and N (the newest are again); the update is of the
newest. Where no update comes between, as on the last stage, nothing is kept. Under stage 1 an update leaves each data
rank with the newest of its own shard only: a bucket is gathered once for each version that forwards use, dropped before
the next update. Source of the rule: PipeDream, arXiv 1806.03377, §3.3. Read next: `lower.py`, `check.py`,
`axes/data/versions.py` (the copies), `axes/pipeline/generators/pipedream.py` (which version is used when).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from heptad.schedule.action import Action, Kind, UnitUse
from heptad.schedule.expand import Slots, Work


@dataclass(frozen=True, slots=True)
class Uses:
    """Positions in the compute actions of one rank, by micro-batch.

    updated: the action after which the stage is updated from it. turns: these in order. forward, backward: the first
    and the last of each.
    """

    work: Work
    updated: dict[int, int]
    turns: tuple[int, ...]
    forward: dict[int, tuple[int, int]]
    backward: dict[int, tuple[int, int]]

    @classmethod
    def of(cls, work: Work) -> Uses:
        """Of an asynchronous step."""
        updated = {microbatch: position for position, _, microbatch in work.updates}
        forward: dict[int, tuple[int, int]] = {}
        backward: dict[int, tuple[int, int]] = {}
        for position, action in enumerate(work.compute):
            into = forward if action.kind is Kind.FORWARD else backward
            into[action.microbatch] = (into.get(action.microbatch, (position,))[0], position)
        return cls(work, updated, tuple(sorted(updated.values())), forward, backward)

    def version(self, position: int) -> int:
        """How many updates come before action `position`."""
        return bisect_left(self.turns, position)

    def stale(self, microbatch: int) -> bool:
        """Whether an update comes between forward and backward."""
        start, end = self.forward[microbatch][1], self.backward.get(microbatch, (0,))[0]
        return self.version(start) < self.version(end)


def place_versions(work: Work, before: Slots, turn: Slots) -> None:
    """K, X, N and V. `turn[i]`: what follows action i in the order given, after everything else."""
    uses = Uses.of(work)
    stale = [microbatch for microbatch in uses.forward if uses.stale(microbatch)]
    stage_of = {microbatch: stage for _, stage, microbatch in work.updates}
    for microbatch in stale:
        stage, (first, last) = stage_of[microbatch], uses.backward[microbatch]
        before[first].append(Action(Kind.EXCHANGE, stage, microbatch))
        turn[last].insert(0, Action(Kind.NEWEST, stage, microbatch))
    stale = stale[::-1]  # the first forward last
    for position, stage, microbatch in work.updates:
        while stale and uses.forward[stale[-1]][0] <= position:
            turn[position].append(Action(Kind.KEEP, stage, stale.pop()))
        turn[position].append(Action(Kind.UPDATE_STAGE, stage, microbatch))


def place_reductions(work: Work, units: Sequence[UnitUse], replicas: bool, after: Slots, turn: Slots) -> None:
    """R after a bucket's last write of a micro-batch, waited for before the update."""
    uses = Uses.of(work)
    for microbatch, position in sorted(uses.updated.items()):
        last: dict[int, int] = {}
        for at in range(*_stretch(uses.backward.get(microbatch))):
            for bucket in units[work.compute[at].index].written(work.compute[at].kind):
                last[bucket] = at
        for bucket, at in last.items():
            after[at].append(Action(Kind.REDUCE, bucket, microbatch))
        for waits in (Kind.WAIT_REDUCE, *((Kind.ALL_REDUCE, Kind.WAIT_ALL_REDUCE) if replicas else ())):
            turn[position] += [Action(waits, bucket, microbatch) for bucket in last]


def place_gathers(
    work: Work, units: Sequence[UnitUse], prefetch: int, before: Slots, after: Slots, turn: Slots
) -> None:
    """G after an update and at most `prefetch` compute actions before the new version's first use, waited for there; D
    before the next update. A frozen bucket has one version."""
    uses = Uses.of(work)
    swapped = {at for m in uses.backward if uses.stale(m) for at in range(*_stretch(uses.backward[m]))}
    trained = {bucket for use in units for bucket in use.writes}
    first_swap = {uses.version(at): at for at in sorted(swapped, reverse=True)}
    reads: dict[int, list[int]] = defaultdict(list)
    for position, action in enumerate(work.compute):
        for bucket in units[action.index].reads(action.kind):
            if bucket not in trained or position not in swapped:
                reads[bucket].append(position)
    for bucket, positions in sorted(reads.items()):
        stretches: dict[int, list[int]] = defaultdict(list)
        for position in positions:
            stretches[uses.version(position) if bucket in trained else 0].append(position)
        for version, inside in sorted(stretches.items()):
            first = min(inside[0], first_swap.get(version, inside[0]))
            microbatch = work.compute[inside[0]].microbatch
            start = max(uses.turns[version - 1] + 1 if version else 0, first - prefetch)
            before[start].append(Action(Kind.GATHER, bucket, microbatch))
            before[first].append(Action(Kind.WAIT_GATHER, bucket, microbatch))
            drop = Action(Kind.DROP, bucket, microbatch)
            if bucket in trained and version < len(uses.turns):
                actions = turn[uses.turns[version]]
                actions.insert([a.kind for a in actions].index(Kind.UPDATE_STAGE), drop)
            else:
                after[inside[-1]].append(drop)


def _stretch(span: tuple[int, int] | None) -> tuple[int, int]:
    return (0, 0) if span is None else (span[0], span[1] + 1)
