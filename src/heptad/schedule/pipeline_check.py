"""Proof of a pipeline schedule, before anything runs: it is a correct step, or BrokenSchedule with a picture of the
place.

Proven: every stage runs F and B (or F, I, W) once on every micro-batch; one rank for each stage, or two that hold it
for half the micro-batches each, and forward and backward of a micro-batch on the same one; F after F of the stage
below, B and I after their own F and after the backward of the stage above, W after I; no rank waits for ever; no more
micro-batches alive than claimed. A pair is one block: it needs both inputs before it starts, so what is proven also
holds where its forward starts earlier. A schedule without a backward is an evaluation.

No rank waiting for ever is enough for blocking, unbuffered sends as well: with each receive placed where its send
happens (`pipeline_messages.py`, which proves that by running it), all ranks follow one order of all actions, and the
first action of that order that has not run can always run. Source: a run of the schedule in unit slots (F, I, W one, B
two, a pair three), about 1 µs an action. Read next: `pipeline_messages.py`, `axes/pipeline/generate.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from heptad.schedule.action import Kind
from heptad.schedule.pipeline import Pair, Schedule, StageAction, Step, peak_live, singles

SLOTS = {Kind.FORWARD: 1, Kind.BACKWARD: 2, Kind.INPUT_GRAD: 1, Kind.WEIGHT_GRAD: 1}
_RANKS_SHOWN, _SLOTS_SHOWN = 9, 13


class BrokenSchedule(AssertionError):
    """A schedule that must not run; the message is a grid, ranks by time, with the bad cells marked `>2F0<`."""

    def __init__(self, schedule: Schedule, cells: Sequence[tuple[int, int]], rule: str) -> None:
        """`cells`: (rank, position in its line); a position past the end marks what is missing there."""
        super().__init__(f"{rule}\n{grid(schedule, cells)}")
        self.cells, self.rule = tuple(cells), rule


def check_schedule(schedule: Schedule, live: Sequence[int] | None = None) -> None:
    """Raise BrokenSchedule unless `schedule` is correct. `live`: the most micro-batches each rank may keep alive."""
    _check_complete(schedule)
    run = Run(schedule)
    if run.waits:
        _refuse_waiting(schedule, run)
    for rank, (peak, bound) in enumerate(zip(peak_live(schedule), live or (), strict=False)):
        if peak > bound:
            at = _first_above(schedule, rank, bound)
            raise BrokenSchedule(
                schedule, [(rank, at)], f"rank {rank} keeps {peak} micro-batches alive, claimed {bound}"
            )


def _check_complete(schedule: Schedule) -> None:
    """Each action once, on the right rank."""
    stages, microbatches = schedule.num_stages, schedule.num_microbatches
    marks = {Kind.FORWARD: 1, Kind.INPUT_GRAD: 2, Kind.WEIGHT_GRAD: 4, Kind.BACKWARD: 6}
    seen, owner = bytearray(stages * microbatches), [-1] * (stages * microbatches)
    for rank, line in enumerate(schedule.lines):
        for position, step in enumerate(line):
            for action in (step.forward, step.backward) if isinstance(step, Pair) else (step,):
                if not (0 <= action.stage < stages and 0 <= action.microbatch < microbatches):
                    rule = f"{action} is not among {stages} stages and {microbatches} micro-batches"
                    raise BrokenSchedule(schedule, [(rank, position)], rule)
                key, mark = action.stage * microbatches + action.microbatch, marks[action.kind]
                if owner[key] not in (-1, rank):
                    rule = f"{action}: rank {owner[key]} runs stage {action.stage} on micro-batch {action.microbatch}"
                    raise BrokenSchedule(schedule, [(rank, position)], rule)
                if seen[key] & mark:
                    raise BrokenSchedule(schedule, [(rank, position)], f"{action} repeats what has run already")
                owner[key] = rank
                seen[key] |= mark
    whole = 7 if any(flags & 6 for flags in seen) else 1
    if seen.count(whole) < len(seen):
        key = next(key for key, flags in enumerate(seen) if flags != whole)
        _refuse_missing(schedule, key, whole & ~seen[key], owner)
    _check_placement(schedule, owner)


def _refuse_missing(schedule: Schedule, key: int, missing: int, owner: list[int]) -> None:
    stage, microbatch = divmod(key, schedule.num_microbatches)
    kind = Kind.FORWARD if missing & 1 else Kind.BACKWARD if missing == 6 else Kind.INPUT_GRAD if missing & 2 else None
    row = owner[stage * schedule.num_microbatches : (stage + 1) * schedule.num_microbatches]
    rank = owner[key] if owner[key] >= 0 else max(row)
    rule = f"{StageAction(stage, kind or Kind.WEIGHT_GRAD, microbatch)} is missing"
    cells = [] if rank < 0 else [(rank, len(schedule.lines[rank]))]
    raise BrokenSchedule(schedule, cells, f"{rule}: no rank runs stage {stage}" if rank < 0 else rule)


def _check_placement(schedule: Schedule, owner: list[int]) -> None:
    """One holder of a stage, or two, one for each half of the micro-batches."""
    count, half = schedule.num_microbatches, schedule.num_microbatches // 2
    parts = [(0, count)] if count % 2 else [(0, half), (half, count)]
    allowed = (
        "all, since their number is odd"
        if count % 2
        else f"micro-batches 0 to {half - 1}, and one for {half} to {count - 1}"
    )
    for stage in range(schedule.num_stages):
        for start, end in parts:
            held = owner[stage * count + start : stage * count + end]
            if held.count(held[0]) == len(held):
                continue
            odd = start + next(i for i, rank in enumerate(held) if rank != held[0])
            rank = owner[stage * count + odd]
            rule = f"stage {stage} moves to rank {rank} at micro-batch {odd}; one rank runs it for {allowed}"
            at = _position(schedule, rank, StageAction(stage, Kind.FORWARD, odd))
            raise BrokenSchedule(schedule, [(rank, at)], rule)


def _position(schedule: Schedule, rank: int, action: StageAction) -> int:
    return next(i for i, step in enumerate(schedule.lines[rank]) if action in singles((step,)))


def _first_above(schedule: Schedule, rank: int, bound: int) -> int:
    live = 0
    for position, step in enumerate(schedule.lines[rank]):
        for action in singles((step,)):
            live += {Kind.FORWARD: 1, Kind.INPUT_GRAD: 0}.get(action.kind, -1)
            if live > bound:
                return position
    raise AssertionError(bound)


class Run:
    """The schedule run in unit slots, each rank as soon as its next action may.

    starts[rank]: the slot at which each action that ran started. waits[rank]: for each rank that did not finish, the
    result that is missing (B stands for a backward of either form).
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule, self.count = schedule, schedule.num_microbatches
        size = schedule.num_stages * self.count
        self._forward, self._backward = [0] * size, [0] * size  # slot at which it ended; 0: not yet
        self.starts: list[list[int]] = [[] for _ in schedule.lines]
        # Key of a missing result -> the rank that waits for it; a second one can only be the rank that should make it.
        self._sleepers: dict[int, int] = {}
        self._needs = [-1] * schedule.num_ranks
        self._ready = list(range(schedule.num_ranks))[::-1]
        clocks = [0] * schedule.num_ranks
        while self._ready:
            rank = self._ready.pop()
            clocks[rank] = self._advance(rank, clocks[rank])
        self.end = max(clocks)
        self.waits = {rank: self._result(key) for rank, key in enumerate(self._needs) if key >= 0}

    def _advance(self, rank: int, clock: int) -> int:
        """Run the rank until it waits or has finished; its clock."""
        line, starts, count = self.schedule.lines[rank], self.starts[rank], self.count
        forward, backward, sleepers = self._forward, self._backward, self._sleepers
        size = len(forward)
        top, forward_kind, weight_kind, whole = size - count, Kind.FORWARD, Kind.WEIGHT_GRAD, Kind.BACKWARD
        for position in range(len(starts), len(line)):
            step = line[position]
            if isinstance(step, Pair):
                keys = self._pair(step, clock, rank)
                if not keys:
                    return clock
                clock = backward[keys[1]]
                for key in (keys[0], keys[1] + size):
                    if key in sleepers:
                        self._ready.append(sleepers.pop(key))
                continue
            key, kind = step.stage * count + step.microbatch, step.kind
            needed = -1
            if kind is forward_kind:
                if key >= count and (at := forward[key - count]) > clock:
                    clock = at
                elif key >= count and not at:
                    needed = key - count
            elif kind is weight_kind:
                if not backward[key]:
                    needed = key + size
            elif not forward[key]:
                needed = key
            elif key < top and (at := backward[key + count]) > clock:
                clock = at
            elif key < top and not at:
                needed = key + count + size
            if needed >= 0:
                sleepers[needed] = rank
                self._needs[rank] = needed
                return clock
            starts.append(clock)
            clock += 2 if kind is whole else 1
            if kind is forward_kind:
                forward[key] = clock
            elif kind is not weight_kind:
                backward[key] = clock
                key += size
            else:
                continue
            if key in sleepers:
                self._ready.append(sleepers.pop(key))
        self._needs[rank] = -1
        return clock

    def _pair(self, pair: Pair, clock: int, rank: int) -> tuple[int, int] | None:
        """Run a pair as one block: the keys of its two halves, or None if it has to wait."""
        count, forward, backward = self.count, self._forward, self._backward
        up, down = (half.stage * count + half.microbatch for half in (pair.forward, pair.backward))
        if up >= count and not forward[up - count]:
            needed = up - count
        elif not forward[down]:
            needed = down
        elif down + count < len(forward) and not backward[down + count]:
            needed = down + count + len(forward)
        else:
            start = max(clock, forward[up - count] if up >= count else 0)
            start = max(start, backward[down + count] if down + count < len(forward) else 0)
            self.starts[rank].append(start)
            forward[up] = backward[down] = start + slots_of(pair)
            return up, down
        self._sleepers[needed], self._needs[rank] = rank, needed
        return None

    def _result(self, key: int) -> StageAction:
        kind = Kind.FORWARD if key < len(self._forward) else Kind.BACKWARD
        stage, microbatch = divmod(key % len(self._forward), self.count)
        return StageAction(stage, kind, microbatch)


def _refuse_waiting(schedule: Schedule, run: Run) -> None:
    """Name an action that stands before what it needs on its own rank; else the ranks that wait for one another."""
    for rank, needed in run.waits.items():
        at = len(run.starts[rank])
        kinds = {Kind.BACKWARD, Kind.INPUT_GRAD} if needed.kind is Kind.BACKWARD else {Kind.FORWARD}
        for action in singles(schedule.lines[rank][at:]):
            if action.kind in kinds and (action.stage, action.microbatch) == (needed.stage, needed.microbatch):
                rule = f"{schedule.lines[rank][at]} needs {action}, which rank {rank} runs later, or in the same pair"
                raise BrokenSchedule(schedule, [(rank, at)], rule)
    circle = _circle(schedule, run)
    waits = [f"rank {rank} at {schedule.lines[rank][len(run.starts[rank])]} for {run.waits[rank]}" for rank in circle]
    shown = ", ".join(waits[:4]) + (f" and {len(waits) - 4} more" if len(waits) > 4 else "")
    raise BrokenSchedule(schedule, [(rank, len(run.starts[rank])) for rank in circle], f"deadlock: {shown}")


def _circle(schedule: Schedule, run: Run) -> list[int]:
    """The ranks that wait for one another, from the lowest on; ranks that only wait for those are not among them."""
    runs: dict[tuple[int, int, bool], int] = {}
    for rank in run.waits:
        for action in singles(schedule.lines[rank][len(run.starts[rank]) :]):
            if action.kind is not Kind.WEIGHT_GRAD:
                runs[action.stage, action.microbatch, action.kind is Kind.FORWARD] = rank
    waits_for = {
        rank: runs[needed.stage, needed.microbatch, needed.kind is Kind.FORWARD] for rank, needed in run.waits.items()
    }
    walked = [min(waits_for)]
    while (rank := waits_for[walked[-1]]) not in walked:
        walked.append(rank)
    circle = walked[walked.index(rank) :]
    lowest = circle.index(min(circle))
    return circle[lowest:] + circle[:lowest]


def slots_of(step: Step) -> int:
    """Unit slots: F, I and W one, B two, a pair both."""
    if isinstance(step, Pair):
        return SLOTS[step.forward.kind] + SLOTS[step.backward.kind]
    return SLOTS[step.kind]


def grid(schedule: Schedule, cells: Sequence[tuple[int, int]] = ()) -> str:
    """Ranks (rows) by unit slots (columns) around the first of `cells`, which are marked; everything without cells.

    An action stands in the slot where it starts and runs on as `-`; `.` is idle. What never runs follows behind.
    """
    every = [action for line in schedule.lines for action in singles(line)]
    stages, microbatches = (1 + max((getattr(a, of) for a in every), default=0) for of in ("stage", "microbatch"))
    run, marked = Run(Schedule(schedule.name, stages, microbatches, schedule.lines)), set(cells)
    rows: list[dict[int, str]] = []
    where: dict[tuple[int, int], int] = {}
    for rank, line in enumerate(schedule.lines):
        row: dict[int, str] = {}
        clock = 0
        for position, step in enumerate(line):
            ran = position < len(run.starts[rank])
            clock = (
                run.starts[rank][position] if ran else max(clock, run.end if position == len(run.starts[rank]) else 0)
            )
            where[rank, position] = clock
            row[clock] = f">{step}<" if (rank, position) in marked else str(step)
            for _ in range(slots_of(step) - 1):
                clock += 1
                row[clock] = "-"
            clock += 1
        where[rank, len(line)] = clock
        if (rank, len(line)) in marked:
            row[clock] = ">?<"
        rows.append(row)
    end = 1 + max((max(row) for row in rows if row), default=0)
    ranks, slots = range(len(rows)), range(end)
    if cells:
        rank, slot = cells[0][0], where[cells[0]]
        ranks = _window(rank, len(rows), _RANKS_SHOWN)
        slots = _window(slot, end, _SLOTS_SHOWN)
    width = 1 + max((len(rows[r].get(t, ".")) for r in ranks for t in slots), default=1)
    label = len(f"rank {ranks.stop - 1}") + 1
    lines = ["slot".ljust(label) + "".join(str(t).rjust(width) for t in slots)]
    lines += [f"rank {r}".ljust(label) + "".join(rows[r].get(t, ".").rjust(width) for t in slots) for r in ranks]
    return "\n".join(line.rstrip() for line in lines)


def _window(centre: int, size: int, shown: int) -> range:
    first = max(0, min(centre - shown // 2, size - shown))
    return range(first, min(size, first + shown))
