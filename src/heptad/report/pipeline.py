"""The picture of a pipeline schedule, as in the papers: a row for each rank, a box for each action, idle time hatched.

A box carries its micro-batch; the colour is the kind of action, the fainter shade the rank's second stage (another
chunk, or DualPipe's other direction). The two sides of an overlapped pair lie one above the other. Below the rows: how
many activations each rank holds over time. Several panels share one time axis. No torch.
Read next: `panel.py` (what is shown), `svg.py`, `timeline.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from heptad.report.panel import Panel
from heptad.report.svg import Paint, document, line, text, text_width, tick_labels, ticks
from heptad.report.timeline import KINDS

LEFT, RIGHT, TOP = 72, 92, 58
NARROWEST, WIDEST = 760, 2200
BOX_PX = 17
"""Width wished for the shortest action: two digits fit."""
NUMBERED_BOXES = 20_000
COLUMN_PX = 3
"""Width of what stands for several boxes where there are more than these."""
SIZES_PX = (10, 9)
"""Sizes of the numbers in boxes, the larger first."""
DIGIT = 0.64
"""Width of a digit ÷ the text's size, in a wide sans-serif."""

FAINT: dict[str, Paint] = {
    "F": Paint("#b9d6f5", "#22476f"),
    "B": Paint("#b4ddc1", "#1f5235"),
    "I": Paint("#aadfe4", "#16525a"),
    "W": Paint("#dbe3a1", "#4b5317"),
}
STYLES: dict[str, str | Paint] = {
    **{f"k-{kind}": KINDS[kind][1] for kind in FAINT},
    **{f"k-{kind}2": paint for kind, paint in FAINT.items()},
    "number": "fill: #ffffff; pointer-events: none;",
    "number2": Paint("#1f2328", "#e6edf3"),
    "live": Paint("#aab4c0", "#56606c"),
    "line-edge": Paint("#ffffff", "#0d1117"),
    "line-hatch": Paint("#b6c0cb", "#424b56"),
}
HATCH = (
    '<defs><pattern id="idle" width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect class="band" width="5" height="5"/><line class="line-hatch" x1="0" y1="0" x2="0" y2="5" stroke-width="1.8"/>'
    "</pattern></defs>"
)
KIND_ORDER = [f"{kind}{second}" for kind in FAINT for second in ("", "2")]


@dataclass(frozen=True, slots=True)
class _Scale:
    """Pixels per unit of time and of a live activation; heights of rows."""

    time: float
    row: int
    live_row: int
    live: float
    right: float


def pipeline_svg(panels: Sequence[Panel], title: str, unit: str = "time") -> str:
    """SVG text; `unit` stands under the time axis."""
    assert panels and all(panel.events for panel in panels), "there is nothing to draw"
    span = max(panel.span_s for panel in panels)
    width = min(WIDEST, max(NARROWEST, BOX_PX * max(span / panel.shortest_s for panel in panels)))
    most_rows = max(len(panel.drawn) for panel in panels)
    row = 24 if most_rows <= 16 else 15 if most_rows <= 32 else 11
    most_live = max(panel.peak(rank) / panel.chunks for panel in panels for rank in panel.drawn)
    live_row = (20 if len(panels) == 1 else 16) if most_rows <= 16 else 12 if most_rows <= 32 else 8
    scale = _Scale(width / span, row, live_row, (live_row - 2) / max(most_live, 1), LEFT + width)
    body = [HATCH, text(LEFT, 28, title, extra=' font-weight="600" style="font-size: 15px"')]
    legend, y = _legend(panels, scale.right + RIGHT)
    body += legend
    top, drawn = y, list[str]()
    for panel in panels:
        part, y = _panel(panel, y, scale)
        drawn += part
    return document(scale.right + RIGHT, y + 44, title, [*body, *_axis(span, scale, top, y, unit), *drawn], STYLES)


def _panel(panel: Panel, y: float, scale: _Scale) -> tuple[list[str], float]:
    """The panel's rows below `y`, and where they end."""
    ranks = panel.drawn
    note = panel.note if ranks.step == 1 else f"{panel.note}; one rank in {ranks.step} is drawn"
    body = [text(LEFT, y + 24, panel.title, extra=' font-weight="600" style="font-size: 13px"')]
    body.append(text(LEFT, y + 42, note, "soft"))
    y += 52
    numbered = sum(map(len, panel.rows.values())) <= NUMBERED_BOXES
    every = 1 if scale.row >= 12 else 2
    for number, rank in enumerate(ranks):
        width = panel.span_s * scale.time
        body.append(f'<rect fill="url(#idle)" x="{LEFT}" y="{y:.2f}" width="{width:.2f}" height="{scale.row}"/>')
        body += _boxes(panel, rank, y, scale) if numbered else _columns(panel, rank, y, scale)
        if number % every == 0:
            middle = y + scale.row / 2 + 4
            body.append(text(LEFT - 10, middle, f"rank {rank}", "soft", "end"))
            body.append(text(scale.right + 10, middle, f"idle {panel.idle(rank):.1%}", "soft"))
        y += scale.row + 2
    body.append(f'<rect class="page" x="{LEFT - 1}" y="{y:.2f}" width="{scale.right - LEFT + 2:.2f}" height="25"/>')
    body.append(text(LEFT, y + 18, _live_heading(panel), "soft"))
    y += 26
    every = -(-12 // (scale.live_row + 2))
    for number, rank in enumerate(ranks):
        body += _live(panel, rank, y, scale, labelled=number % every == 0)
        y += scale.live_row + 2
    return body, y + 10


def _live_heading(panel: Panel) -> str:
    part = "" if panel.chunks == 1 else f", each 1/{panel.chunks} of a rank's layers"
    return f"Live activations: micro-batches from their forward to the end of their backward{part}"


def _boxes(panel: Panel, rank: int, y: float, scale: _Scale) -> Iterator[str]:
    first, last = panel.first_stage(rank), str(panel.last_microbatch)
    for box in panel.rows[rank]:
        x, width = LEFT + box.start_s * scale.time, (box.end_s - box.start_s) * scale.time
        name = "&".join(map(str, box.sides))
        yield f"<g><title>{name.replace('&', ' &amp; ')} on rank {rank}: {box.start_s:.6g} to {box.end_s:.6g}</title>"
        height = scale.row / len(box.sides)
        for at, side in enumerate(box.sides):
            second = "" if side.stage == first else "2"
            shape = f'x="{x:.2f}" y="{y + at * height:.2f}" width="{width:.2f}" height="{height:g}"'
            yield f'<rect class="k-{side.kind.value}{second} line-edge" stroke-width="0.8" {shape}/>'
            number = str(side.microbatch)
            # All boxes of a width have numbers or none, so the longest number decides.
            fits = [size for size in SIZES_PX if DIGIT * size * len(last) + 2 <= width and size <= height]
            if fits:
                style = f' style="font-size: {fits[0]}px"'
                baseline = y + (at + 0.5) * height + 0.36 * fits[0]
                yield text(x + width / 2, baseline, number, f"number{second}", "middle", style)
        yield "</g>"


def _columns(panel: Panel, rank: int, y: float, scale: _Scale) -> Iterator[str]:
    """A row of too many boxes: each column of a few pixels is divided as its time is, what is left over being idle."""
    first, per_px = panel.first_stage(rank), scale.time / COLUMN_PX
    columns = [dict[str, float]() for _ in range(int(panel.span_s * per_px) + 2)]
    for box in panel.rows[rank]:
        kinds = [f"{side.kind.value}{'' if side.stage == first else '2'}" for side in box.sides]
        start, end = box.start_s * per_px, box.end_s * per_px
        for at in range(int(start), int(end) + 1):
            for kind in kinds:
                part = (min(end, at + 1) - max(start, at)) / len(kinds)
                columns[at][kind] = columns[at].get(kind, 0.0) + part
    looks = [tuple((kind, round(held[kind] * scale.row)) for kind in KIND_ORDER if kind in held) for held in columns]
    paths, begin = dict[str, str](), 0
    for at in range(1, len(looks)):
        if looks[at] != looks[begin]:
            down, wide = y, (at - begin) * COLUMN_PX
            for kind, height in looks[begin]:
                path = f"M{LEFT + begin * COLUMN_PX} {down:g}h{wide}v{height}h-{wide}z"
                paths[kind] = paths.get(kind, "") + path
                down += height
            begin = at
    yield from (f'<path class="k-{kind}" d="{path}"/>' for kind, path in paths.items())


def _live(panel: Panel, rank: int, y: float, scale: _Scale, labelled: bool) -> list[str]:
    bottom = y + scale.live_row
    path, last = f"M{LEFT} {bottom:.2f}", 0.0
    for time, level in panel.live(rank):
        x = LEFT + time * scale.time
        if x - last >= 0.2:  # a change that cannot be seen is not written
            path += f"H{x:.2f}V{bottom - level * scale.live / panel.chunks:.2f}"
            last = x
    path += f"H{LEFT + panel.span_s * scale.time:.2f}V{bottom:.2f}Z"
    body = [f'<path class="live" d="{path}"/>', line(LEFT, bottom, scale.right, bottom)]
    if labelled:
        peak = str(panel.peak(rank)) + (f"/{panel.chunks}" if panel.chunks > 1 else "")
        body.append(text(LEFT - 10, bottom - 1, f"rank {rank}", "soft", "end"))
        body.append(text(scale.right + 10, bottom - 1, f"peak {peak}", "soft"))
    return body


def _axis(span: float, scale: _Scale, top: float, bottom: float, unit: str) -> list[str]:
    marks = ticks(0.0, span, 16)
    body = [line(LEFT, bottom, scale.right, bottom, "axis")]
    for value, label in zip(marks, tick_labels(marks), strict=True):
        x = LEFT + value * scale.time
        body += [line(x, top + 52, x, bottom), line(x, bottom, x, bottom + 5, "axis")]
        body.append(text(x, bottom + 19, label, "soft", "middle"))
    return [*body, text((LEFT + scale.right) / 2, bottom + 37, unit, "soft", "middle")]


def _legend(panels: Sequence[Panel], right: float) -> tuple[list[str], float]:
    """One line, or two where they do not fit; and where it ends."""
    boxes = [(box, panel.first_stage(rank)) for panel in panels for rank in panel.drawn for box in panel.rows[rank]]
    kinds = {side.kind.value for box, _ in boxes for side in box.sides}
    entries = [(f'class="k-{kind}"', KINDS[kind][0]) for kind in FAINT if kind in kinds]
    if any(len(box.sides) == 2 for box, _ in boxes):
        entries.append(("pair", "a pair that overlaps"))
    if any(side.stage != first for box, first in boxes for side in box.sides):
        entries.append(('class="k-F2"', "faint: the rank's other stage"))
    entries.append(('fill="url(#idle)"', "idle"))
    body, x, y = [], float(LEFT), 41.0
    for look, label in entries:
        wide = 18 + text_width(label) + 14
        if x + wide > right and x > LEFT:
            x, y = float(LEFT), y + 18
        if look == "pair":
            body += [f'<rect class="k-F" x="{x:.2f}" y="{y}" width="12" height="6"/>',
                     f'<rect class="k-B" x="{x:.2f}" y="{y + 6}" width="12" height="6"/>']  # fmt: skip
        else:
            body.append(f'<rect {look} x="{x:.2f}" y="{y}" width="12" height="12" rx="2"/>')
        body.append(text(x + 18, y + 10.5, label, "soft"))
        x += wide
    return body, y + TOP - 41
