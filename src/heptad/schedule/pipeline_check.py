"""Proof of a pipeline schedule, before anything runs: it is a correct step, or BrokenSchedule with a picture of the
place.

Proven: every stage runs F and B (or F, I, W) once on every micro-batch; one rank for each stage, or two that hold it
for half the micro-batches each, and forward and backward of a micro-batch on the same one; F after F of the stage
below, B and I after their own F and after the backward of the stage above, W after I; no rank waits for ever; no more
micro-batches alive than claimed. A pair is one block: it needs both inputs before it starts, so what is proven also
holds where its forward starts earlier. A schedule without a backward is an evaluation.

No rank waiting for ever is enough for blocking, unbuffered sends as well: with each receive placed where its send
happens, all ranks follow one order of all actions, and the first action of that order that has not run can always run
(tests run every generated schedule that way, `tests/schedule/messages.py`). Source: a run in unit slots (`slots.py`).
Read next: `slots.py`, `axes/pipeline/generate.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from heptad.schedule.action import Kind
from heptad.schedule.pipeline import Pair, Schedule, StageAction, peak_live, singles
from heptad.schedule.slots import Run, grid


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
