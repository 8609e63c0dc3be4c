"""A pipeline schedule in unit slots: F, I and W take one, B two, a pair three. When does each action start, who waits?

`Run` lets every rank go on as soon as its next action may; about 1 µs an action. `grid` writes such a run as text,
ranks by slots, for the messages of a schedule that is refused. Real times are the simulator's (`simulate/pipeline.py`).
Read next: `pipeline_check.py` (what is proven with it).
"""

from __future__ import annotations

from collections.abc import Sequence

from heptad.schedule.action import Kind
from heptad.schedule.pipeline import Pair, Schedule, StageAction, Step, singles

SLOTS = {Kind.FORWARD: 1, Kind.BACKWARD: 2, Kind.INPUT_GRAD: 1, Kind.WEIGHT_GRAD: 1}
_RANKS_SHOWN, _SLOTS_SHOWN = 9, 13


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
