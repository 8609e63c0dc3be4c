"""Lowering for the data axis: from compute actions to a program with gathers, drops, reductions and the update. Pure.

Where a bucket is used is known from the program itself, so one rule covers every stage, any accumulation and any
schedule: consecutive uses of a bucket share one gather when no other unit computes between them (the turn from forward
to backward); a gather starts `prefetch` compute actions before its first use and is waited for right there; a reduction
starts right after the last gradient it drains and is waited for `prefetch` compute actions later, so at most that many
full gradients wait for the network beside the one being written. An overlapped pair is one compute action in all this.
Source of the stages: ZeRO, Rajbhandari et al. 2020, §5; FSDP, Zhao et al. 2023, §3.

With `offload`, what a unit keeps for its backward moves to the host: out right after the action that made it (waited
for after the next compute action, when the device's copy goes), back `prefetch` compute actions before the one that
reads it. What would not be away for at least one compute action stays. A stage that is updated inside a step has rules
of its own: `versions.py`. Read next: `check.py`, `axes/data/stages.py`
(the rules of the stages), `recompute/offload.py`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from heptad.schedule.action import COMPUTE, TRANSPORT, Action, Kind, Program, Segments, UnitUse, with_backward
from heptad.schedule.expand import Work
from heptad.schedule.versions import place_gathers, place_reductions, place_versions


@dataclass(frozen=True, slots=True)
class DataRule:
    """What a stage does with buckets.

    gather: never (stage 0), once a step (1, 2) or at each use (3). reduce: after each micro-batch or once a step.
    scatter: a reduction is a reduce-scatter, waited for soon since that frees memory; else an all-reduce, waited for at
    the end. replicas: an all-reduce over the replicas of a shard follows a bucket's last reduction (HSDP).
    prefetch: compute actions between the start of a gather and its first use, and between a reduction and its wait.
    """

    gather: Literal["never", "step", "use"]
    reduce: Literal["never", "step", "microbatch"]
    scatter: bool = True
    replicas: bool = False
    prefetch: int = 1


_Slots = dict[int, list[Action]]
Steps = tuple[Program, ...]
_UP = {Kind.SEND, Kind.WAIT_SEND, Kind.RECEIVE, Kind.WAIT_RECEIVE}
_REDUCTIONS = {Kind.REDUCE, Kind.WAIT_REDUCE, Kind.ALL_REDUCE, Kind.WAIT_ALL_REDUCE}
_ORDER_BEFORE = [
    *(Kind.RECEIVE, Kind.RECEIVE_GRAD, Kind.GATHER, Kind.FETCH),
    *(Kind.WAIT_GATHER, Kind.WAIT_FETCH, Kind.WAIT_RECEIVE, Kind.WAIT_RECEIVE_GRAD, Kind.WAIT_SEND),
    Kind.EXCHANGE,
]
"""Start everything, then wait."""
_ORDER_AFTER = [
    *(Kind.SEND, Kind.WAIT_SEND_GRAD, Kind.SEND_GRAD),
    *(Kind.WAIT_OUT, Kind.DROP, Kind.WAIT_REDUCE, Kind.ALL_REDUCE, Kind.REDUCE, Kind.OUT),
]
"""Another rank waits for what is sent; then free memory, then start what needs some."""


def lower(
    work: Program | Work,
    units: Sequence[UnitUse],
    rule: DataRule,
    update: bool = True,
    recompute: Segments = (),
    offload: bool = False,
) -> Program:
    """The full program of one rank; `update` False for an evaluation (no reductions and no moves either).

    work: its compute actions, with the transport around them where there is a pipeline. recompute: the segments that
    it recomputes; read only to tell what there is to move.
    """
    work = work if isinstance(work, Work) else Work.of(work)
    steps = work.steps
    before: _Slots = defaultdict(list, {at: list(actions) for at, actions in work.before.items()})
    after: _Slots = defaultdict(list, {at: list(actions) for at, actions in work.after.items()})
    turn: _Slots = defaultdict(list)  # after all else, in this order
    tail: list[Action] = []
    if work.updates:
        _place_updates(work, units, rule, before, after, turn)
    else:
        _place_gathers(steps, units, rule, before, after)
    if update and not work.updates:
        _place_reductions(steps, units, rule, after, tail)
    if update and offload:
        _place_moves(steps, with_backward(recompute, units), rule.prefetch, before, after)
    program: list[Action] = []
    for position, step in enumerate(steps):
        program += sorted(before[position], key=lambda a: _ORDER_BEFORE.index(a.kind))
        program += _joined(step)
        program += sorted(after[position], key=lambda a: _ORDER_AFTER.index(a.kind))
        program += turn[position]
    program += [*work.tail, *tail]
    return (*program, Action(Kind.UPDATE)) if update else tuple(program)


def _joined(step: Program) -> Iterator[Action]:
    """An overlapped pair with & between its actions."""
    for number, action in enumerate(step):
        if number:
            yield Action(Kind.PAIRED)
        yield action


def _place_updates(
    work: Work, units: Sequence[UnitUse], rule: DataRule, before: _Slots, after: _Slots, turn: _Slots
) -> None:
    """Of an asynchronous step, whose parameters are whole on each rank (stages 0 and 1)."""
    assert rule.gather != "use" and rule.reduce == "step", "configuration refuses the other stages"
    place_reductions(work, units, rule.replicas, after, turn)
    place_versions(work, before, turn)
    if rule.gather != "never":
        place_gathers(work, units, rule.prefetch, before, after, turn)


def _numbered(steps: Steps) -> Iterator[tuple[int, Action]]:
    """Each action with the position of its step."""
    for position, step in enumerate(steps):
        for action in step:
            yield position, action


def _spans(positions: Sequence[int], whole: bool) -> list[tuple[int, int]]:
    """Stretches [first, last] of uses served by one gather: neighbours merge, or all of them (`whole`)."""
    if whole:
        return [(positions[0], positions[-1])]
    spans = [(positions[0], positions[0])]
    for position in positions[1:]:
        if position <= spans[-1][1] + 1:
            spans[-1] = (spans[-1][0], position)
        else:
            spans.append((position, position))
    return spans


def _place_gathers(steps: Steps, units: Sequence[UnitUse], rule: DataRule, before: _Slots, after: _Slots) -> None:
    if rule.gather == "never":
        return
    uses: dict[int, list[int]] = defaultdict(list)
    reader: dict[tuple[int, int], int] = {}  # bucket, position -> micro-batch
    for position, action in _numbered(steps):
        for bucket in units[action.index].reads(action.kind):
            uses[bucket].append(position)
            reader.setdefault((bucket, position), action.microbatch)
    spans = sorted(
        (*span, bucket) for bucket, positions in uses.items() for span in _spans(positions, rule.gather == "step")
    )
    free_from: dict[int, int] = defaultdict(int)  # bucket -> first position after its last drop
    for first, last, bucket in spans:
        start = max(free_from[bucket], first - rule.prefetch)
        microbatch = reader[bucket, first]
        before[start].append(Action(Kind.GATHER, bucket, microbatch))
        before[first].append(Action(Kind.WAIT_GATHER, bucket, microbatch))
        after[last].append(Action(Kind.DROP, bucket, microbatch))
        free_from[bucket] = last + 1


def _place_reductions(
    steps: Steps, units: Sequence[UnitUse], rule: DataRule, after: _Slots, tail: list[Action]
) -> None:
    writes: dict[int, dict[int, int]] = defaultdict(dict)  # bucket -> position -> micro-batch
    for position, action in _numbered(steps):
        for bucket in units[action.index].written(action.kind):
            writes[bucket][position] = action.microbatch
    drains = sorted((position, bucket) for bucket, found in writes.items() for position in _drains(found, rule))
    end = len(steps) - 1
    last_waits: list[Action] = []
    for position, bucket in drains:
        microbatch = writes[bucket][position]
        next_write = min((p for p in writes[bucket] if p > position), default=end + 1)
        late = min(position + max(1, rule.prefetch), next_write - 1) if rule.scatter else end
        waits = [Action(Kind.WAIT_REDUCE, bucket, microbatch)]
        if rule.replicas and position == max(writes[bucket]):
            waits.append(Action(Kind.ALL_REDUCE, bucket, microbatch))
            last_waits.append(Action(Kind.WAIT_ALL_REDUCE, bucket, microbatch))
        after[position].append(Action(Kind.REDUCE, bucket, microbatch))
        assert late > position or late == end, f"bucket {bucket} is written again at once after {steps[position]}"
        if late < end:
            after[late] += waits
        else:
            tail += waits
    tail += last_waits


def _drains(writes: Mapping[int, int], rule: DataRule) -> list[int]:
    """Positions of `writes` after which the bucket is reduced: the last of each micro-batch, or of the step.

    Not where the next action already writes to it again, for another micro-batch: one reduction drains both.
    """
    if rule.reduce == "never":
        return []
    if rule.reduce == "step":
        return [max(writes)]
    last = {microbatch: position for position, microbatch in writes.items()}
    return sorted(position for position in last.values() if position + 1 not in writes)


def _place_moves(steps: Steps, recompute: Segments, prefetch: int, before: _Slots, after: _Slots) -> None:
    for made, read, (unit, microbatch) in _kept(steps, recompute):
        fetch = read - prefetch
        if fetch < made + 3:  # gone after made + 1, back before fetch: no compute action in between
            continue
        after[made].append(Action(Kind.OUT, unit, microbatch))
        after[made + 1].append(Action(Kind.WAIT_OUT, unit, microbatch))
        before[fetch].append(Action(Kind.FETCH, unit, microbatch))
        before[read].append(Action(Kind.WAIT_FETCH, unit, microbatch))


def _kept(steps: Steps, recompute: Segments) -> Iterator[tuple[int, int, tuple[int, int]]]:
    """(position that makes it, position that reads it, unit and micro-batch) of everything a unit keeps: a graph, or a
    segment's input."""
    first, again = {segment[0] for segment in recompute}, {unit for segment in recompute for unit in segment}
    made: dict[tuple[int, int], int] = {}
    for position, action in _numbered(steps):
        key, kind = (action.index, action.microbatch), action.kind
        if key in made and kind in (Kind.RECOMPUTE, Kind.BACKWARD, Kind.INPUT_GRAD):
            yield made.pop(key), position, key
        if kind is Kind.RECOMPUTE or (kind is Kind.FORWARD and (key[0] in first or key[0] not in again)):
            made[key] = position


def phases(program: Program) -> tuple[str, ...]:
    """The phase each action's traffic counts in: that of the use a gather serves, "backward" for reductions."""
    serves: dict[int, str] = {}  # bucket -> phase of the first use after its next wait
    step: dict[int, str] = {}  # micro-batch -> phase, of the compute actions that come next
    following, joined, found = "update", False, list[str]()
    for action in reversed(program):
        if action.kind in COMPUTE:
            following = "forward" if action.kind is Kind.FORWARD else "backward"
            step = {**(step if joined else {}), action.microbatch: following}
        elif action.kind is Kind.WAIT_GATHER:
            serves[action.index] = step.get(action.microbatch, following)
        joined = action.kind is Kind.PAIRED
        if action.kind in (Kind.GATHER, Kind.WAIT_GATHER):
            found.append(serves[action.index])
        elif action.kind is Kind.UPDATE_STAGE:
            found.append("update")
        elif action.kind in TRANSPORT:
            found.append("forward" if action.kind in _UP else "backward")
        else:
            found.append("backward" if action.kind in _REDUCTIONS else following)
    return tuple(reversed(found))
