"""What the picture of a pipeline schedule shows, without how: a panel's rows of boxes, its idle time, its activations.

Events come from the simulator or from a recorded run, as long as their names are stage actions (`2F0`, `0F4&7B1`).
No torch. Read next: `pipeline.py`, which draws it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from heptad.schedule.pipeline import Pair, StageAction, parse_step
from heptad.simulate.pipeline import Simulation
from heptad.trace import Event

MOST_ROWS = 64
"""Of more ranks, every n-th has a row."""
OTHER_NAMES = frozenset({"U"})
"""What a measured run computes besides stage actions."""
LIVE_STEPS = {"F": 1, "B": -1, "I": 0, "W": -1}
"""What a kind of action adds to the activations that a rank holds."""


@dataclass(frozen=True, slots=True)
class Box:
    """One step of a rank: one action, or a pair's two."""

    sides: tuple[StageAction, ...]
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Panel:
    """One schedule. `events`: stage actions, those of lanes other than "compute" and updates are left out; `chunks`: V,
    one live activation being 1/V of a rank's; `idle_shares`: by rank, where boxes are not busy all through."""

    title: str
    note: str
    events: Sequence[Event]
    num_ranks: int
    chunks: int = 1
    end_s: float = 0.0
    """The step's end, where the events may not hold its last action."""
    idle_shares: tuple[float, ...] = ()

    @property
    def drawn(self) -> range:
        """The ranks that have a row: all, or every n-th."""
        return _drawn(self.num_ranks)

    @classmethod
    def simulated(cls, run: Simulation, title: str, note: str) -> Panel:
        """Of the simulator's result."""
        ranks = run.schedule.num_ranks
        events = list(run.events(_drawn(ranks)))
        return cls(title, note, events, ranks, max(1, run.schedule.num_stages // ranks), run.makespan)

    @cached_property
    def rows(self) -> dict[int, list[Box]]:
        """Each rank that is drawn -> its boxes by start."""
        rows: dict[int, list[Box]] = {rank: [] for rank in self.drawn}
        for event in self.events:
            if event.lane == "compute" and event.name not in OTHER_NAMES and event.rank in rows:
                step = parse_step(event.name)
                sides = (step.forward, step.backward) if isinstance(step, Pair) else (step,)
                rows[event.rank].append(Box(sides, event.start_s, event.end_s))
        for boxes in rows.values():
            boxes.sort(key=lambda box: box.start_s)
        return rows

    @cached_property
    def span_s(self) -> float:
        """The end of the last action."""
        return max(self.end_s, max(box.end_s for boxes in self.rows.values() for box in boxes))

    @cached_property
    def shortest_s(self) -> float:
        """Of the actions that take time."""
        lengths = [box.end_s - box.start_s for boxes in self.rows.values() for box in boxes]
        return min((length for length in lengths if length > 0), default=self.span_s)

    @cached_property
    def last_microbatch(self) -> int:
        """M - 1."""
        return max(side.microbatch for boxes in self.rows.values() for box in boxes for side in box.sides)

    def idle(self, rank: int) -> float:
        """Share of the span that `rank` does not compute."""
        if self.idle_shares:
            return self.idle_shares[rank]
        return 1 - sum(box.end_s - box.start_s for box in self.rows[rank]) / self.span_s

    def first_stage(self, rank: int) -> int:
        """The stage that is drawn in the full shade: in DualPipe the one whose micro-batches count from 0."""
        return self._first_stages[rank]

    @cached_property
    def _first_stages(self) -> dict[int, int]:
        sides = {rank: [side for box in boxes for side in box.sides] for rank, boxes in self.rows.items()}
        return {
            rank: min(((side.microbatch, side.stage) for side in row), default=(0, 0))[1] for rank, row in sides.items()
        }

    def live(self, rank: int) -> list[tuple[float, int]]:
        """(time, activations held from then on): from a forward's start to the end of its B or W."""
        return self._live[rank]

    def peak(self, rank: int) -> int:
        """Most activations that `rank` holds."""
        return max((level for _, level in self._live[rank]), default=0)

    @cached_property
    def _live(self) -> dict[int, list[tuple[float, int]]]:
        return {rank: _levels(boxes) for rank, boxes in self.rows.items()}


def _levels(boxes: Sequence[Box]) -> list[tuple[float, int]]:
    changes: list[tuple[float, int]] = []
    for box in boxes:
        for side in box.sides:
            if step := LIVE_STEPS[side.kind.value]:
                changes.append((box.start_s if step > 0 else box.end_s, step))
    level, levels = 0, list[tuple[float, int]]()
    for time, step in sorted(changes):
        level += step
        if levels and levels[-1][0] == time:
            levels.pop()
        levels.append((time, level))
    return levels


def _drawn(num_ranks: int) -> range:
    return range(0, num_ranks, -(-num_ranks // MOST_ROWS))
