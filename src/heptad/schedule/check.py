"""Proof of one rank's program, before it runs: every rule the executor relies on, or a ScheduleError with the place.

Proven: each compute action once and after what it depends on (C after its segment's kept input and the C below it, a
recomputed unit's backward after its C, so each forward runs again exactly once); a bucket gathered (and waited for) at
each use and dropped once a gather; what a unit keeps is on the device when it is read, and moves only while it is kept;
each gradient reduced after its last write and exactly once; an overlapped pair is one forward and a backward of another
unit and micro-batch, of which neither needs the other, with nothing in between; every start has its wait; the update
last; and where a stage is updated inside the step, the versions of its weights (`version_check.py`), and that its
gradient is whole before. Ranks of one place of a pipeline run the same program, so the ranks of a group start its
collectives in one order (on gloo another order mixes values silently). Pure, no torch.
"""

from __future__ import annotations

from collections.abc import Sequence

from heptad.schedule.action import (
    COMPUTE,
    MOVES,
    TRANSPORT,
    VERSIONS,
    WAIT_OF,
    WAIT_OF_TRANSPORT,
    Action,
    Kind,
    Program,
    Segments,
    UnitUse,
    steps_of,
    with_backward,
)
from heptad.schedule.lower import DataRule
from heptad.schedule.version_check import Require, Versions


class ScheduleError(AssertionError):
    """A program that must not run; the message shows the neighbourhood with an arrow at the bad action."""

    def __init__(self, program: Program, position: int, rule: str) -> None:
        around = [
            ("-> " if p == position else "   ") + str(program[p])
            for p in range(max(0, position - 4), min(len(program), position + 5))
        ]
        super().__init__(f"action {position}: {rule}\n" + "\n".join(around))
        self.position = position


def check(
    program: Program,
    units: Sequence[UnitUse],
    rule: DataRule,
    recompute: Segments = (),
    work: frozenset[tuple[int, int]] | None = None,
) -> None:
    """Raise ScheduleError unless `program` is a correct step (or evaluation: no update) of `units` under `rule`.

    recompute: the segments whose forward keeps no graph. work: the (unit, micro-batch) that this rank of a pipeline
    runs; None: every unit on every micro-batch.
    """
    _check_pairs(program)
    state = _State(program, units, rule, recompute, work)
    for position, action in enumerate(program):
        state.take(position, action)
    state.finish()


def _check_pairs(program: Program) -> None:
    """What stands beside an & is computed, and may run in turns."""
    for at in steps_of(program):
        step = [program[position] for position in at]
        wrong = [n for n, action in enumerate(step) if (action.kind is Kind.PAIRED) != bool(n % 2)]
        if wrong or (len(step) > 1 and not {action.kind for action in step[::2]} <= COMPUTE):
            raise ScheduleError(program, at[wrong[0] if wrong else 0], "an & stands between compute actions")
        ahead = [n for n, action in enumerate(step) if action.kind is Kind.FORWARD]
        if len(step) == 1:
            continue
        if len(ahead) != 1 or ahead[0] not in (0, len(step) - 1):
            raise ScheduleError(program, at[0], "a pair has one forward, before or after its backward")
        forward, others = step[ahead[0]], [action for action in step[::2] if action.kind is not Kind.FORWARD]
        alone = {forward.microbatch}.isdisjoint(other.microbatch for other in others)
        apart = {forward.index}.isdisjoint(other.index for other in others)
        one = len({other.microbatch for other in others}) == 1
        if not (alone and apart and one):
            rule = f"{forward} runs in turns with a backward of one other micro-batch, of other units"
            raise ScheduleError(program, at[ahead[0]], rule)


class _State:
    """What is known after a prefix of the program."""

    def __init__(
        self,
        program: Program,
        units: Sequence[UnitUse],
        rule: DataRule,
        recompute: Segments,
        work: frozenset[tuple[int, int]] | None,
    ) -> None:
        self.work = work
        self.moving: set[tuple[Kind, int, int]] = set()  # transport started, not waited for
        self.program, self.units, self.rule = program, units, rule
        self.segment = {unit: segment for segment in with_backward(recompute, units) for unit in segment}
        self.trains = any(action.kind is Kind.UPDATE for action in program)
        self.done: set[Action] = set()
        self.full: set[int] = set()  # gathered and waited for
        self.pending: dict[tuple[Kind, int], int] = {}  # started collectives -> position
        self.written: dict[int, int] = {}  # bucket with a gradient not yet drained -> last write
        self.reduced: set[int] = set()  # buckets drained at least once
        self.all_reduced: set[int] = set()
        self.versions = Versions()
        self.trained = frozenset(bucket for use in units for bucket in use.writes)
        self.away: dict[tuple[int, int], Kind] = {}  # (unit, micro-batch) off the device -> last move

    def take(self, position: int, action: Action) -> None:
        """Check one action and go on."""

        def require(truth: bool, rule: str) -> None:
            if not truth:
                raise ScheduleError(self.program, position, rule)

        kind, index = action.kind, action.index
        if kind is Kind.PAIRED:
            return
        require(action not in self.done or kind not in COMPUTE, "this action has run already")
        self.done.add(action)
        if kind in COMPUTE:
            self._compute(action, position, require)
        elif kind in MOVES:
            self._move(action, require)
        elif kind in TRANSPORT:
            self._transport(action, require)
        elif kind in VERSIONS or kind is Kind.UPDATE_STAGE:
            self._version(action, require)
        elif kind in WAIT_OF:
            require((kind, index) not in self.pending, "started twice without a wait")
            self.pending[kind, index] = position
            if kind is Kind.GATHER:
                require(index not in self.full, "gathered although it is full")
            elif kind is Kind.REDUCE:
                require(index in self.written, "reduced without a gradient")
                del self.written[index]
                self.reduced.add(index)
            else:
                require(index in self.reduced and (Kind.REDUCE, index) not in self.pending, "not reduced yet")
                self.all_reduced.add(index)
        elif kind is Kind.DROP:
            require(index in self.full, "dropped although it is not full")
            self.full.discard(index)
        elif kind is Kind.UPDATE:
            require(position == len(self.program) - 1, "the update is not the last action")
            self._gradients(require)
            self.versions.finish(require)
            require(not self.pending, f"not waited for: {sorted(str(k) for k in self.pending)}")
            require(not self.away, f"units {sorted(unit for unit, _ in self.away)} are never fetched back")
            require(not self.moving, f"sent or received without a wait: {sorted((u, m) for _, u, m in self.moving)}")
        else:
            start = next(begin for begin, wait in WAIT_OF.items() if wait is kind)
            require((start, index) in self.pending, "a wait without its start")
            del self.pending[start, index]
            if kind is Kind.WAIT_GATHER:
                self.full.add(index)

    def _gradients(self, require: Require) -> None:
        """Before an update: every gradient is reduced, over the replicas too."""
        require(
            not self.written or self.rule.reduce == "never",
            f"buckets {sorted(self.written)} have gradients that were not reduced",
        )
        missing = self.reduced - self.all_reduced if self.rule.replicas else set()
        require(not missing, f"buckets {sorted(missing)} were not summed over their replicas")

    def _version(self, action: Action, require: Require) -> None:
        """K of weights that are whole; X and N with no gather under way; V as U, on weights that nobody holds whole."""
        kind, gathers = action.kind, {bucket for start, bucket in self.pending if start is Kind.GATHER}
        held = self.trained if self.rule.gather != "never" else frozenset()
        require(not gathers & self.trained, "the weights are being gathered")
        require(kind is not Kind.KEEP or held <= self.full, "the weights are not gathered")
        self.versions.take(action, require)
        if kind is Kind.UPDATE_STAGE:
            self._gradients(require)
            require(not any(start is not Kind.GATHER for start, _ in self.pending), "a reduction is not waited for")
            require(not held & self.full, "gathered weights are stale after an update: drop them first")
            self.reduced.clear()
            self.all_reduced.clear()

    def _transport(self, action: Action, require: Require) -> None:
        """S and T of what has been computed, once; E and H of what another rank computes; each with its wait."""
        kind, unit, microbatch = action.kind, action.index, action.microbatch
        start = next((begin for begin, wait in WAIT_OF_TRANSPORT.items() if wait is kind), None)
        if start is not None:
            require((start, unit, microbatch) in self.moving, "a wait without its start")
            self.moving.discard((start, unit, microbatch))
            return
        require((kind, unit, microbatch) not in self.moving, "started twice without a wait")
        neighbour = unit + (1 if kind in (Kind.SEND, Kind.RECEIVE_GRAD) else -1)
        require(not self._here(neighbour, microbatch), f"unit {neighbour} runs here: nothing to send or receive")
        if kind is Kind.SEND:
            require(Action(Kind.FORWARD, unit, microbatch) in self.done, "sent before it was computed")
        elif kind is Kind.SEND_GRAD:
            require(self._went_back(unit, microbatch), "a gradient sent before it was computed")
        self.moving.add((kind, unit, microbatch))

    def _here(self, unit: int, microbatch: int) -> bool:
        return self.work is None or (unit, microbatch) in self.work

    def _went_back(self, unit: int, microbatch: int) -> bool:
        return any(Action(kind, unit, microbatch) in self.done for kind in (Kind.BACKWARD, Kind.INPUT_GRAD))

    def _move(self, action: Action, require: Require) -> None:
        """O, o, P, p in this order, of what is there."""
        kind, unit, microbatch = action.kind, action.index, action.microbatch
        key = unit, microbatch
        before = {Kind.WAIT_OUT: Kind.OUT, Kind.FETCH: Kind.WAIT_OUT, Kind.WAIT_FETCH: Kind.FETCH}.get(kind)
        require(self.away.get(key) is before, "moves go out (O, o), then back (P, p)")
        if kind is not Kind.OUT:
            self.away[key] = kind
            if kind is Kind.WAIT_FETCH:
                del self.away[key]
            return
        segment = self.segment.get(unit)
        ran = {done for done in COMPUTE if Action(done, unit, microbatch) in self.done}
        keeps = Kind.RECOMPUTE in ran or (Kind.FORWARD in ran and (segment is None or segment[0] == unit))
        spent = ran & {Kind.BACKWARD, Kind.INPUT_GRAD} or not self.units[unit].backward
        require(keeps and not spent, f"unit {unit} keeps nothing for a backward now")
        self.away[key] = kind

    def _compute(self, action: Action, position: int, require: Require) -> None:
        kind, unit, microbatch = action.kind, action.index, action.microbatch
        require(
            kind is not Kind.RECOMPUTE or unit in self.segment, f"unit {unit} keeps its graph: nothing to recompute"
        )
        require((unit, microbatch) not in self.away, f"what unit {unit} keeps is not on the device")
        require(self._here(unit, microbatch), f"unit {unit} runs on another rank")
        self.versions.compute(action, self.units[unit].backward, require)
        for needed, index in self._needs(kind, unit, microbatch):
            require(Action(needed, index, microbatch) in self.done, f"{index}{needed.value}{microbatch} has not run")
        if kind in (Kind.BACKWARD, Kind.INPUT_GRAD) and unit + 1 < len(self.units):
            if self._here(unit + 1, microbatch):
                done = self._went_back(unit + 1, microbatch)
                require(done, f"unit {unit + 1} has not run backward on micro-batch {microbatch}")
            else:
                come = Action(Kind.WAIT_RECEIVE_GRAD, unit, microbatch) in self.done
                require(come, f"the gradient of unit {unit} on micro-batch {microbatch} has not come")
        if self.rule.gather != "never":
            kept = self.trained if self.versions.exchanged is not None else frozenset()
            for bucket in set(self.units[unit].reads(kind)) - kept:
                require(bucket in self.full, f"bucket {bucket} is not gathered")
        for bucket in self.units[unit].written(kind):
            require(
                (Kind.REDUCE, bucket) not in self.pending, f"writes the gradient of bucket {bucket} under reduction"
            )
            self.written[bucket] = position

    def _needs(self, kind: Kind, unit: int, microbatch: int) -> list[tuple[Kind, int]]:
        """What must have run before `kind` on `unit`, on the same micro-batch."""
        segment = self.segment.get(unit)
        match kind:
            case Kind.FORWARD:
                if unit > 0 and not self._here(unit - 1, microbatch):
                    return [(Kind.WAIT_RECEIVE, unit)]
                return [(Kind.FORWARD, unit - 1)] * (unit > 0)
            case Kind.RECOMPUTE:
                below = segment is not None and unit != segment[0]
                return [(Kind.FORWARD, unit)] + [(Kind.RECOMPUTE, unit - 1)] * below
            case Kind.WEIGHT_GRAD:
                return [(Kind.INPUT_GRAD, unit)]
        return [(Kind.FORWARD, unit)] + [(Kind.RECOMPUTE, unit)] * (segment is not None)

    def finish(self) -> None:
        """What must hold at the end: every unit ran on every micro-batch, in both directions when training."""
        ran: dict[tuple[int, int], set[Kind]] = {}
        for action in self.done:
            if action.kind in COMPUTE:
                ran.setdefault((action.index, action.microbatch), set()).add(action.kind)
        microbatches = {microbatch for _, microbatch in ran}
        every = {(unit, microbatch) for unit in range(len(self.units)) for microbatch in microbatches}
        for index, microbatch in sorted(every if self.work is None else self.work):
            wanted = [{Kind.FORWARD}]
            if self.trains and self.units[index].backward:
                wanted = [{Kind.FORWARD, Kind.BACKWARD}, {Kind.FORWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD}]
            if not any(need <= ran.get((index, microbatch), set()) for need in wanted):
                where = len(self.program) - 1
                raise ScheduleError(self.program, where, f"unit {index} is incomplete on {microbatch}")
        if self.moving:
            raise ScheduleError(self.program, len(self.program) - 1, "something was sent or received without a wait")
        if self.full:
            raise ScheduleError(self.program, len(self.program) - 1, f"buckets {sorted(self.full)} are never dropped")
        if self.pending:
            raise ScheduleError(self.program, max(self.pending.values()), "started and never waited for")
