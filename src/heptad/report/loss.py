"""The loss picture of a run: training loss (each step faint, smoothed bold) and validation loss, over the steps.

Long runs are averaged into at most `MOST_POINTS` points; values that are not finite are left out, and the line breaks
there. Smoothing is a centred mean over a 25th of the points, so it does not lag. No torch. Read next: `svg.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from heptad.report.svg import Paint, document, line, text, text_width, tick_labels, ticks

WIDTH, HEIGHT = 840, 440
LEFT, RIGHT, TOP, BOTTOM = 68, 118, 58, 54
MOST_POINTS = 800
CURVES: Mapping[str, str | Paint] = {
    "line-train": Paint("#0969da", "#58a6ff"),
    "train": Paint("#0969da", "#58a6ff"),
    "line-val": Paint("#bc4c00", "#f0883e"),
    "val": Paint("#bc4c00", "#f0883e"),
    "faint": "opacity: 0.28;",
}

Point = tuple[float, float]
"""(step, loss)."""
Placed = Callable[[Point], Point]
"""(step, loss) to pixels."""


def loss_svg(train: Sequence[Point], validation: Sequence[Point], title: str) -> str:
    """SVG text. `train` and `validation`: (step, mean loss per target in nats), in order of the steps."""
    train, validation = _finite(train), _finite(validation)
    shown = _thinned(train)
    smooth = _smoothed(shown)
    every = [loss for _, loss in [*shown, *validation]] or [0.0, 1.0]
    low, high = _range(every)
    last_step = max([step for step, _ in [*train, *validation]] + [1.0])
    plot_width, plot_height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def at(point: Point) -> Point:
        return LEFT + plot_width * point[0] / last_step, TOP + plot_height * (high - point[1]) / (high - low)

    body = [text(LEFT, 28, title, extra=' font-weight="600" style="font-size: 15px"')]
    body += _axes(low, high, last_step, at)
    body += [_path([at(point) for point in part], "line-train faint", 1) for part in _unbroken(shown)]
    body += [_path([at(point) for point in part], "line-train", 2) for part in _unbroken(smooth)]
    body.append(_path([at(point) for point in validation], "line-val", 2))
    body += [f'<circle class="val" cx="{x:.2f}" cy="{y:.2f}" r="3"/>' for x, y in map(at, validation)]
    body += _ends(smooth, validation, at)
    body += _legend(bool(shown), bool(validation))
    return document(WIDTH, HEIGHT, title, [part for part in body if part], CURVES)


def _finite(points: Sequence[Point]) -> list[Point]:
    return [(step, loss) for step, loss in points if math.isfinite(loss)]


def _range(values: Sequence[float]) -> Point:
    low, high = min(values), max(values)
    margin = 0.06 * (high - low) or max(abs(high) * 0.1, 0.5)
    return max(0.0, low - margin) if low >= 0 else low - margin, high + margin


def _thinned(points: Sequence[Point]) -> list[Point]:
    size = -(-len(points) // MOST_POINTS) or 1
    parts = [points[at : at + size] for at in range(0, len(points), size)]
    return [(sum(p[0] for p in part) / len(part), sum(p[1] for p in part) / len(part)) for part in parts]


def _smoothed(points: Sequence[Point]) -> list[Point]:
    """Centred means; the reach shrinks towards both ends, so the curve ends where the points do."""
    smooth = []
    for at, (step, _) in enumerate(points):
        reach = min(len(points) // 50, at, len(points) - 1 - at)
        window = points[at - reach : at + reach + 1]
        smooth.append((step, sum(loss for _, loss in window) / len(window)))
    return smooth


def _unbroken(points: Sequence[Point]) -> list[list[Point]]:
    """Parts without a missing step: a gap of more than three times the usual one breaks the line."""
    if len(points) < 3:
        return [list(points)]
    usual = sorted(b[0] - a[0] for a, b in pairwise(points))[len(points) // 2 - 1]
    parts: list[list[Point]] = [[points[0]]]
    for before, point in pairwise(points):
        if point[0] - before[0] > 3 * usual:
            parts.append([])
        parts[-1].append(point)
    return parts


def _axes(low: float, high: float, last_step: float, at: Placed) -> list[str]:
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    body = []
    levels = ticks(low, high, 6)
    for value, label in zip(levels, tick_labels(levels), strict=True):
        _, y = at((0.0, value))
        body += [line(LEFT, y, right, y), text(LEFT - 10, y + 4, label, "soft", "end")]
    steps = [value for value in ticks(0, last_step, 8) if value == int(value)]
    for value, label in zip(steps, tick_labels(steps), strict=True):
        x, _ = at((value, low))
        body += [line(x, bottom, x, bottom + 5, "axis"), text(x, bottom + 20, label, "soft", "middle")]
    body.append(line(LEFT, bottom, right, bottom, "axis"))
    body.append(text((LEFT + right) / 2, HEIGHT - 12, "step", "soft", "middle"))
    middle = (TOP + bottom) / 2
    turned = f' transform="rotate(-90 18 {middle:.2f})"'
    return [*body, text(18, middle, "loss, nats per target token", "soft", "middle", turned)]


def _path(points: Sequence[Point], cls: str, width: float) -> str:
    if len(points) < 2:
        return ""
    steps = " L".join(f"{x:.2f} {y:.2f}" for x, y in points)
    return f'<path class="{cls}" d="M{steps}" fill="none" stroke-width="{width}" stroke-linejoin="round"/>'


def _ends(train: Sequence[Point], validation: Sequence[Point], at: Placed) -> list[str]:
    """The last value of each curve beside its end, moved apart where they would overlap."""
    found = [
        (at(points[-1])[1], points[-1][1], cls) for points, cls in ((train, "train"), (validation, "val")) if points
    ]
    found.sort()
    heights = [y for y, _, _ in found]
    if len(found) == 2 and heights[1] - heights[0] < 17:
        middle = sum(heights) / 2
        heights = [middle - 8.5, middle + 8.5]
    return [
        text(WIDTH - RIGHT + 10, y + 4, f"{cls} {loss:.3f}", cls, extra=' font-weight="600"')
        for y, (_, loss, cls) in zip(heights, found, strict=True)
    ]


def _legend(has_train: bool, has_validation: bool) -> list[str]:
    entries = [("train", "training, smoothed over faint steps")] if has_train else []
    entries += [("val", "validation")] if has_validation else []
    body, x = [], float(LEFT)
    for cls, label in entries:
        body.append(f'<rect class="{cls}" x="{x:.2f}" y="40" width="16" height="3" rx="1.5"/>')
        body.append(text(x + 22, 45.5, label, "soft"))
        x += 22 + text_width(label) + 18
    return body
