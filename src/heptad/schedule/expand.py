"""From a pipeline schedule to what one rank computes, unit by unit, and what it sends and receives when. Pure.

A stage is a run of units. F of a stage is F of its units; B is C and B of its units from the top (`backward_order`), I
and W likewise. An overlapped pair alternates between its two micro-batches, unit by unit: forward of one, backward of
the other. Where one of the two units waits inside itself for what it has sent (`Stages.giving`: experts on other
ranks), they run in turns as one step, the backward first if it sends, since it begins with a transfer and a forward
ends with one; what is recomputed for a backward belongs to its side. Where the neighbouring stage lies on another rank,
the stage's last F is followed by a send (S) of its output and its first is preceded by the wait (e) for its input, and
gradients go back the same way (T, h). A receive is posted (E, H) one stage action before it is needed. An output that
was sent is waited for (s) when its gradient has come back, which proves that it arrived; a gradient that was sent (t)
when the next one is. In an asynchronous schedule the stage's update (V) follows its B. Read next: `lower.py`,
`axes/pipeline/transport.py`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from heptad.schedule.action import Action, Kind, Program, Segments, UnitUse, backward_order
from heptad.schedule.pipeline import Pair, Schedule, StageAction, Step, direction_of, placement, singles

Slots = dict[int, list[Action]]


@dataclass(frozen=True, slots=True)
class Work:
    """Compute actions of one rank, in steps of one action or of an overlapped pair's, in the order of their turns.

    `before[i]`, `after[i]`: transport around step i; `tail`: after the last one. updates: (i, stage, micro-batch): the
    stage is updated from the micro-batch's gradient after step i.
    """

    steps: tuple[Program, ...]
    before: Slots = field(default_factory=dict)
    after: Slots = field(default_factory=dict)
    tail: Program = ()
    updates: tuple[tuple[int, int, int], ...] = ()

    @classmethod
    def of(cls, compute: Program) -> Work:
        """One action after the other, without a pipeline."""
        return cls(tuple((action,) for action in compute))

    @property
    def compute(self) -> Program:
        """All actions in order."""
        return tuple(action for step in self.steps for action in step)

    @property
    def pairs(self) -> frozenset[tuple[int, int]]:
        """(unit, micro-batch) that run here."""
        return frozenset((action.index, action.microbatch) for step in self.steps for action in step)


@dataclass(frozen=True, slots=True)
class Stages:
    """Who runs what: units of each stage, and for each (stage, micro-batch) the rank along the pipeline.

    giving: units that wait inside themselves for what they have sent, and give the other side of a pair the turn.
    """

    units: tuple[range, ...]
    schedule: Schedule
    where: tuple[tuple[int, ...], ...]
    giving: frozenset[int] = frozenset()

    @classmethod
    def of(cls, schedule: Schedule, units: tuple[range, ...], giving: Iterable[int] = ()) -> Stages:
        """Of a checked schedule."""
        assert len(units) == schedule.num_stages
        return cls(units, schedule, placement(schedule), frozenset(giving))

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
        self.steps: list[Program] = []
        self.before: Slots = defaultdict(list)
        self.after: Slots = defaultdict(list)
        self.starts: list[int] = []  # first position of each step so far
        self.sent: dict[int, Action] = {}  # stage -> the gradient sent last, not waited for yet
        self.trains = any(a.kind is not Kind.FORWARD for line in stages.schedule.lines for a in singles(line))
        self.tail: list[Action] = []
        self.updates: list[tuple[int, int, int]] = []

    def run(self, line: Sequence[Step]) -> Work:
        for step in line:
            self.starts.append(len(self.steps))
            if isinstance(step, Pair):
                self._emit(*self._sides(step))
            else:
                self._emit([(action,) for action in self._units(step)])
                if self.stages.schedule.asynchronous and step.kind is Kind.BACKWARD:
                    self.updates.append((len(self.steps) - 1, step.stage, step.microbatch))
        self.tail += [Action(Kind.WAIT_SEND_GRAD, a.index, a.microbatch) for _, a in sorted(self.sent.items())]
        return Work(tuple(self.steps), dict(self.before), dict(self.after), tuple(self.tail), tuple(self.updates))

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

    def _sides(self, pair: Pair) -> tuple[list[Program], list[Program]]:
        """What of a pair's forward and backward alternates: actions; where units give, backwards with their C."""
        forward, backward = self._units(pair.forward), self._units(pair.backward)
        up: list[Program] = [(action,) for action in forward]
        down: list[Program] = []
        gives = self._gives((*forward, *backward))
        for action in backward:
            if gives and down and down[-1][-1].kind is Kind.RECOMPUTE:
                down[-1] += (action,)
            else:
                down.append((action,))
        return up, down

    def _emit(self, *sides: list[Program]) -> None:
        """Append unit actions, of a pair in turn, with the transport of each side at its ends."""
        spans: list[list[int]] = [[] for _ in sides]  # steps of each
        for parts in zip_longest(*sides, fillvalue=()):
            if len(parts) == 2 and self._overlap(*parts):
                forward, backward = parts
                for span in spans:
                    span.append(len(self.steps))
                self.steps.append(backward + forward if self._gives(backward) else forward + backward)
                continue
            for span, part in zip(spans, parts, strict=True):
                span += range(len(self.steps), len(self.steps) + len(part))
                self.steps += [(action,) for action in part]
        for side, span in zip(sides, spans, strict=True):
            if side:
                self._transport(side[0][0], span[0], span[-1])

    def _gives(self, part: Program) -> bool:
        return any(action.index in self.stages.giving for action in part)

    def _overlap(self, forward: Program, backward: Program) -> bool:
        """There is something to hide, and no module is in both halves."""
        apart = not {action.index for action in forward} & {action.index for action in backward}
        return bool(forward and backward) and apart and (self._gives(forward) or self._gives(backward))

    def _transport(self, action: Action, first: int, last: int) -> None:
        """Of the side of steps `first` to `last` that begins with `action`."""
        microbatch = action.microbatch
        stage = self.stages.stage_of(action.index)
        units = self.stages.units[stage]
        below = stage > 0 and self.stages.sends_up(stage - 1, microbatch)
        above = self.stages.sends_up(stage, microbatch)
        if action.kind is Kind.FORWARD:
            if below:
                self._receive(Kind.RECEIVE, Kind.WAIT_RECEIVE, units[0], microbatch, first)
            if above:
                self.after[last].append(Action(Kind.SEND, units[-1], microbatch))
                if not (self.trains and self.uses[units[-1]].backward):
                    self.tail.append(Action(Kind.WAIT_SEND, units[-1], microbatch))
        elif action.kind is not Kind.WEIGHT_GRAD:
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
