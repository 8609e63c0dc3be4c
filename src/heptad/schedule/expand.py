"""From a pipeline schedule to what one rank computes, unit by unit, and what it sends and receives when. Pure.

A stage is a run of units. F of a stage is F of its units; B is C and B of its units from the top (`backward_order`), I
and W likewise. An overlapped pair alternates between its two micro-batches, unit by unit: forward of one, backward of
the other, so each one's communication runs under the other's computation. Where the neighbouring stage lies on another
rank, the stage's last F is followed by a send (S) of its output and its first is preceded by the wait (e) for its
input, and gradients go back the same way (T, h). A receive is posted (E, H) one stage action before it is needed. An
output that was sent is waited for (s) when its gradient has come back, which proves that it arrived; a gradient that
was sent (t) when the next one is. In an asynchronous schedule the stage's update (V) follows its B. Read next:
`lower.py`, `axes/pipeline/transport.py`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from heptad.schedule.action import Action, Kind, Program, Segments, UnitUse, backward_order
from heptad.schedule.pipeline import Pair, Schedule, StageAction, Step, direction_of, placement, singles

Slots = dict[int, list[Action]]


@dataclass(frozen=True, slots=True)
class Work:
    """Compute actions of one rank; `before[i]`, `after[i]`: transport around action i; `tail`: after the last one.

    updates: (i, stage, micro-batch): the stage is updated from the micro-batch's gradient after action i.
    """

    compute: Program
    before: Slots = field(default_factory=dict)
    after: Slots = field(default_factory=dict)
    tail: Program = ()
    updates: tuple[tuple[int, int, int], ...] = ()

    @property
    def pairs(self) -> frozenset[tuple[int, int]]:
        """(unit, micro-batch) that run here."""
        return frozenset((action.index, action.microbatch) for action in self.compute)


@dataclass(frozen=True, slots=True)
class Stages:
    """Who runs what: units of each stage, and for each (stage, micro-batch) the rank along the pipeline."""

    units: tuple[range, ...]
    schedule: Schedule
    where: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, schedule: Schedule, units: tuple[range, ...]) -> Stages:
        """Of a checked schedule."""
        assert len(units) == schedule.num_stages
        return cls(units, schedule, placement(schedule))

    def rank_of(self, stage: int, microbatch: int) -> int:
        """Place along the pipeline of the rank that runs `stage` on `microbatch`."""
        return self.where[direction_of(self.schedule, self.where, microbatch)][stage]

    def stage_of(self, unit: int) -> int:
        """The stage that holds `unit`."""
        return next(stage for stage, units in enumerate(self.units) if unit in units)

    def held(self, rank: int) -> tuple[int, ...]:
        """Units on `rank`, lowest first."""
        stages = sorted({stage for ranks in self.where for stage, owner in enumerate(ranks) if owner == rank})
        return tuple(unit for stage in stages for unit in self.units[stage])

    def held_by_all(self) -> tuple[tuple[int, ...], ...]:
        """`held` of every rank along the pipeline."""
        return tuple(self.held(rank) for rank in range(self.schedule.num_ranks))

    def sends_up(self, stage: int, microbatch: int) -> bool:
        """Whether the output of `stage` goes to another rank."""
        last = stage == len(self.units) - 1
        return not last and self.rank_of(stage, microbatch) != self.rank_of(stage + 1, microbatch)


def expand(stages: Stages, rank: int, uses: Sequence[UnitUse], recompute: Segments = ()) -> Work:
    """What the rank at `rank` along the pipeline does in the schedule's step."""
    return _Expansion(stages, uses, recompute).run(stages.schedule.lines[rank])


def forward_line(stages: Stages, rank: int, microbatches: int) -> tuple[Step, ...]:
    """An evaluation: forwards only, in waves, so that every order between two ranks is the same. One direction."""
    mine = [stage for stage, owner in enumerate(stages.where[0]) if owner == rank]
    work = sorted((stage + microbatch, stage, microbatch) for stage in mine for microbatch in range(microbatches))
    return tuple(StageAction(stage, Kind.FORWARD, microbatch) for _, stage, microbatch in work)


def evaluation(stages: Stages, rank: int, uses: Sequence[UnitUse], microbatches: int) -> Work:
    """Forward of `microbatches` micro-batches, all of them in the first direction."""
    lines = tuple(forward_line(stages, at, microbatches) for at in range(stages.schedule.num_ranks))
    schedule = Schedule("evaluation", stages.schedule.num_stages, microbatches, lines)
    return _Expansion(Stages.of(schedule, stages.units), uses, ()).run(lines[rank])


class _Expansion:
    """One rank's line, turned into actions step by step."""

    def __init__(self, stages: Stages, uses: Sequence[UnitUse], recompute: Segments) -> None:
        self.stages, self.uses, self.recompute = stages, uses, recompute
        self.compute: list[Action] = []
        self.before: Slots = defaultdict(list)
        self.after: Slots = defaultdict(list)
        self.starts: list[int] = []  # first position of each step so far
        self.sent: dict[int, Action] = {}  # stage -> the gradient sent last, not waited for yet
        self.trains = any(a.kind is not Kind.FORWARD for line in stages.schedule.lines for a in singles(line))
        self.tail: list[Action] = []
        self.updates: list[tuple[int, int, int]] = []

    def run(self, line: Sequence[Step]) -> Work:
        for step in line:
            self.starts.append(len(self.compute))
            if isinstance(step, Pair):
                self._emit([self._units(step.forward), self._units(step.backward)])
            else:
                self._emit([self._units(step)])
                if self.stages.schedule.asynchronous and step.kind is Kind.BACKWARD:
                    self.updates.append((len(self.compute) - 1, step.stage, step.microbatch))
        self.tail += [Action(Kind.WAIT_SEND_GRAD, a.index, a.microbatch) for _, a in sorted(self.sent.items())]
        return Work(tuple(self.compute), dict(self.before), dict(self.after), tuple(self.tail), tuple(self.updates))

    def _units(self, action: StageAction) -> list[Action]:
        """The unit actions of a stage action."""
        units, microbatch = self.stages.units[action.stage], action.microbatch
        if action.kind is Kind.FORWARD:
            return [Action(Kind.FORWARD, unit, microbatch) for unit in units]
        found = []
        for again, down in backward_order(self.uses, self.recompute, units):
            if action.kind is not Kind.WEIGHT_GRAD:
                found += [Action(Kind.RECOMPUTE, unit, microbatch) for unit in again]
            found += [Action(action.kind, unit, microbatch) for unit in down]
        return found

    def _emit(self, lists: list[list[Action]]) -> None:
        """Append unit actions, of a pair in turn, with the transport of each list at its ends."""
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        for together in zip_longest(*lists):
            for which, action in enumerate(together):
                if action is not None:
                    first.setdefault(which, len(self.compute))
                    last[which] = len(self.compute)
                    self.compute.append(action)
        for which, actions in enumerate(lists):
            if actions:
                self._transport(actions, first[which], last[which])

    def _transport(self, actions: list[Action], first: int, last: int) -> None:
        microbatch = actions[0].microbatch
        stage = self.stages.stage_of(actions[0].index)
        units = self.stages.units[stage]
        below = stage > 0 and self.stages.sends_up(stage - 1, microbatch)
        above = self.stages.sends_up(stage, microbatch)
        if actions[0].kind is Kind.FORWARD:
            if below:
                self._receive(Kind.RECEIVE, Kind.WAIT_RECEIVE, units[0], microbatch, first)
            if above:
                self.after[last].append(Action(Kind.SEND, units[-1], microbatch))
                if not (self.trains and self.uses[units[-1]].backward):
                    self.tail.append(Action(Kind.WAIT_SEND, units[-1], microbatch))
        elif actions[0].kind is not Kind.WEIGHT_GRAD:
            if above and self.uses[units[-1]].backward:
                self._receive(Kind.RECEIVE_GRAD, Kind.WAIT_RECEIVE_GRAD, units[-1], microbatch, first)
                self.before[first].append(Action(Kind.WAIT_SEND, units[-1], microbatch))
            if below and self.uses[units[0] - 1].backward:
                if stage in self.sent:
                    earlier = self.sent[stage]
                    self.after[last].append(Action(Kind.WAIT_SEND_GRAD, earlier.index, earlier.microbatch))
                self.sent[stage] = Action(Kind.SEND_GRAD, units[0], microbatch)
                self.after[last].append(self.sent[stage])

    def _receive(self, start: Kind, wait: Kind, unit: int, microbatch: int, first: int) -> None:
        """Posted where the stage action before this one begins."""
        posted = self.starts[-2] if len(self.starts) > 1 else 0
        self.before[posted].append(Action(start, unit, microbatch))
        self.before[first].append(Action(wait, unit, microbatch))
