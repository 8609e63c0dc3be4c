"""A measured step of a pipeline beside the simulated one: two panels of one picture, on one time axis.

The executor records unit actions; those of a stage action become one box (from its first unit's beginning to its last
one's end; a pair's two sides are one box, of which each side's computing seconds are its stretches). The simulator runs
the same schedule with each stage's measured mean seconds of F, I, W and B, a message taking as long as the measured
ones whose receiver was already waiting. What then differs is what means do not say: micro-batches that took longer than
others, and what the runtime does between actions. Times in ms. No torch. Read next: `pipeline.py` (the picture),
`train/tracing.py`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median

from heptad.report.panel import Panel
from heptad.report.pipeline import pipeline_svg
from heptad.schedule.action import COMPUTE, Action, Kind
from heptad.schedule.expand import Stages
from heptad.schedule.pipeline import Pair, Step, singles
from heptad.simulate.pipeline import PairMode, simulate
from heptad.simulate.times import Links, Times
from heptad.trace import Event

MS = 1e3
SENT_BY = {Kind.WAIT_RECEIVE: (Kind.SEND, -1), Kind.WAIT_RECEIVE_GRAD: (Kind.SEND_GRAD, 1)}
"""What a wait waits for: the sender's action, and its unit as seen from the waiting one."""
Key = tuple[int, Kind, int]
"""Stage, what its schedule calls the action, micro-batch."""


@dataclass(slots=True)
class _Part:
    """A stage action as it ran: its span, and the seconds in which its units computed."""

    start_s: float
    end_s: float
    busy_s: float = field(default=0.0)


def measured_and_simulated(events: Sequence[Event], stages: Stages, ranks: Sequence[int], title: str) -> str:
    """SVG of both. `ranks[place]`: the rank at each place of the pipeline that is drawn; other ranks are left out."""
    place = {rank: at for at, rank in enumerate(ranks)}
    rows: dict[int, list[Event]] = {at: [] for at in range(len(ranks))}
    for event in events:
        if event.rank in place:
            rows[place[event.rank]].append(event)
    lines = stages.schedule.lines
    parts = {at: _parts(row, stages, lines[at]) for at, row in rows.items()}
    first = min(part.start_s for row in parts.values() for part in row.values())
    boxes = [box for at, row in parts.items() for box in _boxes(at, row, lines[at], first)]
    span = max(part.end_s for row in parts.values() for part in row.values()) - first
    busy = [sum(part.busy_s for part in row.values()) for row in parts.values()]
    idle = tuple(1 - seconds / span for seconds in busy)
    message_s = _message_s(rows)
    mode = PairMode.BLOCK if stages.giving else PairMode.EARLY
    links = Links.uniform(len(stages.units), 0.0, message_s)
    run = simulate(stages.schedule, _times(parts, len(stages.units)), links, mode)
    chunks = max(1, len(stages.units) // len(ranks))
    above = Panel(
        f"Measured: {stages.schedule.name}, {len(ranks)} ranks, {stages.schedule.num_microbatches} micro-batches",
        f"idle {fmean(idle):.1%} of {_shown(span)}: no unit computes",
        boxes,
        len(ranks),
        chunks,
        idle_shares=idle,
    )
    note = f"idle {run.idle_fraction:.1%} of {_shown(run.makespan)}, messages of {_shown(message_s)}"
    below = Panel.simulated(run, "Simulated with the measured mean times of each stage", note)
    below = replace(below, events=[_in_ms(event) for event in below.events], end_s=below.end_s * MS)
    return pipeline_svg([above, below], title, unit="ms since the first stage action")


def _shown(seconds: float) -> str:
    return f"{seconds * MS:,.0f} ms" if seconds >= 0.1 else f"{seconds * MS:.3g} ms"


def _in_ms(event: Event, first_s: float = 0.0) -> Event:
    return replace(event, start_s=(event.start_s - first_s) * MS, end_s=(event.end_s - first_s) * MS)


def _parts(events: Sequence[Event], stages: Stages, line: Sequence[Step]) -> dict[Key, _Part]:
    """Of one rank: each stage action of its line."""
    whole = {(a.stage, a.microbatch) for a in singles(line) if a.kind is Kind.BACKWARD}
    found: dict[Key, _Part] = {}
    for event in events:
        action = _action(event)
        if action is None or action.kind not in COMPUTE:
            continue
        stage, kind = stages.stage_of(action.index), action.kind
        if kind is Kind.RECOMPUTE:
            kind = Kind.BACKWARD if (stage, action.microbatch) in whole else Kind.INPUT_GRAD
        part = found.setdefault((stage, kind, action.microbatch), _Part(event.start_s, event.end_s))
        part.end_s = event.end_s
        part.busy_s += event.end_s - event.start_s
    return found


def _action(event: Event) -> Action | None:
    return Action.parse(event.name) if re.fullmatch(r"\d+[A-Za-z]\d+", event.name) else None


def _boxes(place: int, parts: dict[Key, _Part], line: Sequence[Step], first_s: float) -> Iterator[Event]:
    """In the text form of the schedule. A stage without a backward (all frozen) leaves no part."""
    for step in line:
        sides = (step.forward, step.backward) if isinstance(step, Pair) else (step,)
        ran = [part for side in sides if (part := parts.get((side.stage, side.kind, side.microbatch))) is not None]
        if ran:
            start, end = min(part.start_s for part in ran), max(part.end_s for part in ran)
            name = str(step) if len(ran) == len(sides) else str(sides[0])
            yield _in_ms(Event(place, "compute", name, start, end), first_s)


def _times(parts: dict[int, dict[Key, _Part]], num_stages: int) -> Times:
    """Mean computing seconds of each stage's actions, over its micro-batches and the ranks that hold it."""
    seconds: dict[tuple[int, Kind], list[float]] = defaultdict(list)
    for row in parts.values():
        for (stage, kind, _), part in row.items():
            seconds[stage, kind].append(part.busy_s)

    def mean(kind: Kind) -> list[float]:
        return [fmean(seconds.get((stage, kind), [0.0])) for stage in range(num_stages)]

    forward, inputs, weights = mean(Kind.FORWARD), mean(Kind.INPUT_GRAD), mean(Kind.WEIGHT_GRAD)
    return Times.stages(forward, inputs, weights, mean(Kind.BACKWARD))


def _message_s(rows: dict[int, list[Event]]) -> float:
    """Median seconds from the end of a send's posting to the receiver's going on, where it waited before; else 0."""
    sent: dict[Action, float] = {}
    waited: dict[Action, Event] = {}
    for row in rows.values():
        for event in row:
            action = _action(event)
            if action is not None and action.kind in (Kind.SEND, Kind.SEND_GRAD):
                sent[action] = event.end_s
            elif action is not None and action.kind in SENT_BY:
                waited[action] = event
    found = []
    for action, event in waited.items():
        kind, step = SENT_BY[action.kind]
        posted = sent.get(Action(kind, action.index + step, action.microbatch))
        if posted is not None and event.start_s < posted:
            found.append(max(0.0, event.end_s - posted))
    return median(found) if found else 0.0
