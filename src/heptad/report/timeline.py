"""Events as a picture: one row for each rank and lane, time to the right, a colour for each kind of action.

The same picture for simulated and for measured time. A box carries its text where it fits, and always as a tooltip; the
share of the span that a lane is busy stands at its right end. Colours follow the action's kind: `3F0` is an F.
Neighbours of one kind too narrow to be seen apart are one box, so a long trace stays a small file.
No torch. Read next: `svg.py`, `chrome.py` (for more than a screen of events).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from xml.sax.saxutils import escape

from heptad.report.svg import Paint, document, line, text, text_width, tick_labels, ticks
from heptad.trace import Event

WIDTH, LEFT, RIGHT, TOP = 1200, 132, 76, 74
ROW, GAP, RANK_GAP = 22, 4, 12

KINDS: dict[str, tuple[str, Paint]] = {
    "F": ("forward", Paint("#4c8ed9", "#4187d6")),
    "C": ("recompute", Paint("#9fc4ee", "#2b5c94")),
    "B": ("backward", Paint("#3f9d60", "#3c9a5f")),
    "I": ("input gradient", Paint("#1f9aa6", "#1b8793")),
    "W": ("weight gradient", Paint("#8a9a1f", "#7c8a1e")),
    "pair": ("pair, overlapped", Paint("#4778a8", "#3f6f9f")),
    "U": ("update", Paint("#8a5fc7", "#9a72d6")),
    "G": ("gather", Paint("#e0913a", "#d98a35")),
    "R": ("reduce", Paint("#cf5f52", "#d2665a")),
    "A": ("all-reduce over replicas", Paint("#b8477d", "#c4548a")),
    "S": ("send, receive", Paint("#e3c04b", "#b8962b")),
    "O": ("to the host's memory", Paint("#5fb0ae", "#3f8f8d")),
    "P": ("back from the host", Paint("#8fcfc4", "#2f7f74")),
    "D": ("drop", Paint("#a9b1ba", "#6e7681")),
    "other": ("other", Paint("#8c959f", "#7d8590")),
}
ALIASES = {"send": "S", "recv": "S"}
UNITS = ((1.0, "s", 1.0), (1e-3, "ms", 1e3), (0.0, "µs", 1e6))


def timeline_svg(events: Sequence[Event], title: str) -> str:
    """SVG text of `events` (any order; times in seconds, shifted so that the first starts at 0)."""
    assert events, "there is nothing to draw"
    first, last = min(event.start_s for event in events), max(event.end_s for event in events)
    span = max(last - first, 1e-9)
    scale = (WIDTH - LEFT - RIGHT) / span
    rows = sorted({(event.rank, event.lane) for event in events}, key=lambda row: (row[0], row[1] != "compute", row[1]))
    tops, bottom = _rows(rows)
    axis = bottom + 8
    body = [text(LEFT, 28, title, extra=' font-weight="600" style="font-size: 15px"')]
    body += _legend([kind for kind in KINDS if any(kind_of(event.name) == kind for event in events)])
    body += _labels(rows, tops)
    body += _axis(span, scale, TOP - 4, axis)
    for row in rows:
        own = sorted((event for event in events if (event.rank, event.lane) == row), key=lambda event: event.start_s)
        for event in _joined(own, scale):
            x, width = LEFT + (event.start_s - first) * scale, (event.end_s - event.start_s) * scale
            body.append(_box(event, x, width, tops[row]))
        busy = sum(event.end_s - event.start_s for event in own) / span
        body.append(text(WIDTH - RIGHT + 10, tops[row] + 15, f"{min(busy, 1.0):.0%} busy", "soft"))
    paints: dict[str, str | Paint] = {f"k-{kind}": paint for kind, (_, paint) in KINDS.items()}
    paints["in"] = "fill: #ffffff; font-size: 10px; pointer-events: none;"
    return document(WIDTH, axis + 46, title, body, paints)


def kind_of(name: str) -> str:
    """Key of KINDS for an action's text form; a wait (`2g1`) has the colour of what it waits for."""
    if "&" in name:
        return "pair"
    found = re.fullmatch(r"\d*([A-Za-z])\d*(?: …)?", name)
    kind = found[1].upper() if found else ALIASES.get(re.split(r"[^a-z]", name, maxsplit=1)[0], "other")
    return kind if kind in KINDS else "other"


def _rows(rows: Sequence[tuple[int, str]]) -> tuple[dict[tuple[int, str], float], float]:
    tops, y = {}, float(TOP)
    for number, row in enumerate(rows):
        if number:
            y += ROW + (GAP if rows[number - 1][0] == row[0] else RANK_GAP)
        tops[row] = y
    return tops, y + ROW


def _labels(rows: Sequence[tuple[int, str]], tops: dict[tuple[int, str], float]) -> list[str]:
    body = []
    for number, (rank, lane) in enumerate(rows):
        y = tops[rank, lane]
        body.append(f'<rect class="band" x="{LEFT}" y="{y:.2f}" width="{WIDTH - LEFT - RIGHT}" height="{ROW}"/>')
        body.append(text(LEFT - 12, y + 15, lane, "soft", "end"))
        if number == 0 or rows[number - 1][0] != rank:
            body.append(text(12, y + 15, f"rank {rank}", extra=' font-weight="600"'))
    return body


def _axis(span: float, scale: float, top: float, bottom: float) -> list[str]:
    _, unit, factor = next(entry for entry in UNITS if span >= entry[0])
    marks = ticks(0.0, span * factor, 12)
    body = [line(LEFT, bottom, WIDTH - RIGHT, bottom, "axis")]
    for value, label in zip(marks, tick_labels(marks), strict=True):
        x = LEFT + value / factor * scale
        body += [line(x, top, x, bottom), line(x, bottom, x, bottom + 5, "axis")]
        body.append(text(x, bottom + 20, label, "soft", "middle"))
    body.append(text((LEFT + WIDTH - RIGHT) / 2, bottom + 38, f"time since the first action, {unit}", "soft", "middle"))
    return body


def _joined(events: Sequence[Event], scale: float) -> list[Event]:
    """Neighbours of one kind that are each under a pixel wide, and no further apart, become one box."""
    joined: list[Event] = []
    for event in events:
        last = joined[-1] if joined else None
        narrow = last is not None and max(event.end_s - event.start_s, event.start_s - last.end_s) * scale < 1.0
        if last is not None and narrow and kind_of(last.name) == kind_of(event.name):
            joined[-1] = replace(last, end_s=max(last.end_s, event.end_s), name=f"{last.name.split(' ')[0]} …")
        else:
            joined.append(event)
    return joined


def _box(event: Event, x: float, width: float, y: float) -> str:
    duration = event.end_s - event.start_s
    _, unit, factor = next(entry for entry in UNITS if duration >= entry[0])
    tip = f"{event.name} on rank {event.rank}, {event.lane}: {duration * factor:.3g} {unit}"
    shape = f'x="{x:.2f}" y="{y:.2f}" width="{max(width, 0.4):.2f}" height="{ROW}"'
    rounded = f'class="k-{kind_of(event.name)}" rx="{1.5 if width > 6 else 0}"'
    box = f"<rect {rounded} {shape}><title>{escape(tip)}</title></rect>"
    if text_width(event.name, 10) + 4 <= width:
        box += text(x + width / 2, y + 14.5, event.name, "in", "middle")
    return box


def _legend(kinds: Sequence[str]) -> list[str]:
    body, x = [], float(LEFT)
    for kind in kinds:
        name, _ = KINDS[kind]
        label = name if len(kind) > 1 else f"{kind} {name}"
        body.append(f'<rect class="k-{kind}" x="{x:.2f}" y="41" width="12" height="12" rx="2"/>')
        body.append(text(x + 18, 51.5, label, "soft"))
        x += 18 + text_width(label) + 14
    return body
