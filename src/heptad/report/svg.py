"""What every picture shares: colours for light and dark, ticks at round numbers, text that needs no font file.

A picture is one self-contained SVG string. Colours come from classes, so a viewer's `prefers-color-scheme` picks the
set; a renderer without it shows the light one. Text is measured by an upper bound on a sans-serif's width, and boxes
are sized by it. No torch. Read next: `loss.py`, `timeline.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from xml.sax.saxutils import escape

FONT = "ui-sans-serif, system-ui, -apple-system, 'Segoe UI', 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif"


@dataclass(frozen=True, slots=True)
class Paint:
    """One colour of a picture, as it is on a light and on a dark page."""

    light: str
    dark: str


BASE = {
    "page": Paint("#ffffff", "#0d1117"),
    "band": Paint("#f3f5f8", "#161b22"),
    "ink": Paint("#1f2328", "#e6edf3"),
    "soft": Paint("#59636e", "#9198a1"),
    "rule": Paint("#d9dee4", "#30363d"),
    "axis": Paint("#8c959f", "#6e7681"),
}
STROKES = ("rule", "axis")
"""Classes of BASE that are lines, not areas."""


def document(width: float, height: float, label: str, body: Iterable[str], paints: Mapping[str, str | Paint]) -> str:
    """The SVG text. `label` is its accessible name; `paints` adds classes: a Paint fills, text is CSS as it is."""
    rules = [f"text {{ font-family: {FONT}; font-size: 12px; font-variant-numeric: tabular-nums; }}"]
    dark = []
    for name, paint in {**BASE, **paints}.items():
        if isinstance(paint, Paint):
            prop = "stroke" if name in STROKES or name.startswith("line-") else "fill"
            rules.append(f".{name} {{ {prop}: {paint.light}; }}")
            dark.append(f".{name} {{ {prop}: {paint.dark}; }}")
        else:
            rules.append(f".{name} {{ {paint} }}")
    style = "\n".join(rules) + "\n@media (prefers-color-scheme: dark) {\n" + "\n".join(dark) + "\n}"
    size = f'width="{width:g}" height="{height:g}" viewBox="0 0 {width:g} {height:g}"'
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{escape(label, {chr(34): "&quot;"})}">'
    )
    page = f'<rect class="page" width="{width:g}" height="{height:g}"/>'
    return "\n".join([head, f"<style>{style}</style>", page, *body, "</svg>"]) + "\n"


def text(x: float, y: float, content: str, cls: str = "ink", anchor: str = "start", extra: str = "") -> str:
    """A line of text whose baseline starts, is centred or ends (`anchor`) at (x, y)."""
    return f'<text class="{cls}" x="{x:.2f}" y="{y:.2f}" text-anchor="{anchor}"{extra}>{escape(content)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, cls: str = "rule") -> str:
    """A straight line, one pixel wide."""
    return f'<line class="{cls}" x1="{x1:.2f}" y1="{y1:.2f}" x2="{x2:.2f}" y2="{y2:.2f}" stroke-width="1"/>'


def text_width(content: str, size_px: float = 12) -> float:
    """Upper bound of the width of `content` in pixels in a common sans-serif."""
    return len(content) * size_px * 0.58


def ticks(low: float, high: float, most: int) -> list[float]:
    """At most `most` + 1 multiples of 1, 2 or 5 times a power of ten that lie in [low, high], at least one apart."""
    assert high >= low and most >= 1, (low, high, most)
    if high == low:
        return [low]
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def tick_labels(values: list[float]) -> list[str]:
    """The values with as many decimals as tell neighbours apart, thousands separated."""
    step = min((b - a for a, b in pairwise(values)), default=abs(values[0]) or 1.0)
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    return [f"{value:,.{decimals}f}" for value in values]
