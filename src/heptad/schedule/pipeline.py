"""A pipeline schedule as a value: for each rank the stage actions it runs, in order, with a text form. Pure, no torch.

Text, one line a rank, actions separated by blanks: stage, kind, micro-batch. `2F0` is stage 2's forward of
micro-batch 0, `5B0` its whole backward, `1I3` and `1W3` the two halves of one, `0F4&7B1` a pair that overlaps: one
micro-batch's communication runs under the other's computation. Which rank holds a stage follows from the lines
(`placement`); in DualPipe two ranks hold each, one for each direction, and the second direction's micro-batches count
from M/2. Units, buckets, sends and the data stages' gathers come later, by lowering. Read next: `pipeline_check.py`
(what is proven), `expand.py` (units, sends, receives), `axes/pipeline/generate.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from heptad.schedule.action import Kind

STAGE_KINDS = {kind.value: kind for kind in (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD)}


@dataclass(frozen=True, slots=True)
class StageAction:
    """`kind` of stage `stage` on `microbatch`."""

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"


@dataclass(frozen=True, slots=True)
class Pair:
    """A forward and a backward that overlap; the forward starts when its input is there."""

    forward: StageAction
    backward: StageAction

    def __str__(self) -> str:
        return f"{self.forward}&{self.backward}"


Step = StageAction | Pair
Line = tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Schedule:
    """`lines[rank]`: what the rank runs. `num_stages` and `num_microbatches` are those of the whole step.

    asynchronous: a stage updates its weights right after each backward, from that micro-batch's gradient, and keeps for
    each micro-batch under way those that its forward used. One stage a rank.
    """

    name: str
    num_stages: int
    num_microbatches: int
    lines: tuple[Line, ...]
    asynchronous: bool = False

    @property
    def num_ranks(self) -> int:
        """P."""
        return len(self.lines)


def singles(line: Iterable[Step]) -> Iterator[StageAction]:
    """The actions of a line, a pair's forward before its backward."""
    for step in line:
        yield from (step.forward, step.backward) if isinstance(step, Pair) else (step,)


def row(stage: int, kind: Kind, microbatches: Iterable[int]) -> list[StageAction]:
    """One action for each micro-batch."""
    return [StageAction(stage, kind, microbatch) for microbatch in microbatches]


Placement = tuple[tuple[int, ...], ...]
"""`placement[direction][stage]`: the rank that runs the stage. One direction, or two that hold each stage twice."""


def placement(schedule: Schedule) -> Placement:
    """Who holds what in a checked schedule: micro-batch m runs on `placement[direction_of(...)][stage]`."""
    first, last = ([-1] * schedule.num_stages for _ in range(2))
    for rank, line in enumerate(schedule.lines):
        for action in singles(line):
            if action.microbatch == 0:
                first[action.stage] = rank
            if action.microbatch == schedule.num_microbatches - 1:
                last[action.stage] = rank
    return (tuple(first),) if first == last else (tuple(first), tuple(last))


def direction_of(schedule: Schedule, where: Placement, microbatch: int) -> int:
    """0, or 1 for the second half of the micro-batches of a schedule with two directions."""
    return int(len(where) == 2 and 2 * microbatch >= schedule.num_microbatches)


def peak_live(schedule: Schedule) -> tuple[int, ...]:
    """Per rank, the most (stage, micro-batch) whose forward has run and whose backward, its W included, has not.

    A pair's forward counts before its backward frees.
    """
    peaks = []
    for line in schedule.lines:
        live = peak = 0
        for step in line:
            if isinstance(step, Pair):
                peak = max(peak, live + 1)
                live += step.backward.kind is Kind.INPUT_GRAD
            elif step.kind is Kind.FORWARD:
                live += 1
                peak = max(peak, live)
            elif step.kind is not Kind.INPUT_GRAD:
                live -= 1
        peaks.append(peak)
    return tuple(peaks)


def format_schedule(schedule: Schedule) -> str:
    """One line a rank."""
    return "\n".join(" ".join(map(str, line)) for line in schedule.lines)


def parse_step(text: str) -> Step:
    """Inverse of `str`; ValueError names the text that is no stage action."""
    parts = [_single(part, text) for part in text.split("&")]
    if len(parts) == 1:
        return parts[0]
    if len(parts) == 2 and parts[0].kind is Kind.FORWARD and parts[1].kind in (Kind.BACKWARD, Kind.INPUT_GRAD):
        return Pair(parts[0], parts[1])
    raise ValueError(f"{text!r} is no pair; expected a forward and a backward, e.g. 0F4&7B1")


def _single(part: str, text: str) -> StageAction:
    found = re.fullmatch(r"(\d+)([A-Z])(\d+)", part)
    if found is None or found[2] not in STAGE_KINDS:
        raise ValueError(f"{text!r} is no stage action; expected e.g. 2F0, 1I3, 1W3, 5B0 or 0F4&7B1")
    return StageAction(int(found[1]), STAGE_KINDS[found[2]], int(found[3]))


def parse_schedule(text: str, name: str = "file") -> Schedule:
    """Inverse of `format_schedule`; blank lines and lines that start with # are skipped."""
    rows = [row for row in (line.strip() for line in text.splitlines()) if row and not row.startswith("#")]
    lines = tuple(tuple(parse_step(word) for word in row.split()) for row in rows)
    every = [action for line in lines for action in singles(line)]
    if not every:
        raise ValueError("a schedule has at least one action")
    stages, microbatches = (1 + max(getattr(item, field) for item in every) for field in ("stage", "microbatch"))
    return Schedule(name, stages, microbatches, lines)
