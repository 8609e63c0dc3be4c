"""Pictures are well-formed, complete, and nothing in them overlaps or leaves the page."""

from __future__ import annotations

import json
import math
import re
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heptad.report.chrome import chrome_trace
from heptad.report.loss import HEIGHT, WIDTH, loss_svg
from heptad.report.svg import text_width, tick_labels, ticks
from heptad.report.timeline import KINDS, kind_of, timeline_svg
from heptad.trace import Event

SVG = "{http://www.w3.org/2000/svg}"
EVENTS = [
    Event(rank, lane, name, start + 0.001 * rank, start + 0.001 * rank + 0.02)
    for rank in range(2)
    for lane, name, start in (
        ("comm", "0G0", 5.0),
        ("comm", "0g0", 5.02),
        ("compute", "0F0", 5.04),
        ("compute", "0I0", 5.06),
        ("compute", "0W0", 5.08),
        ("comm", "0R0", 5.1),
        ("compute", "U", 5.12),
    )
]


def texts(root: ET.Element) -> list[tuple[float, float, float, str]]:
    """(left, right, baseline, content) of every text that is not turned, right being an upper bound."""
    found = []
    for node in root.iter(f"{SVG}text"):
        if node.get("transform"):
            continue
        content, x = node.text or "", float(node.get("x", "0"))
        size = 15 if "15px" in (node.get("style") or "") else 10 if node.get("class") == "in" else 12
        width = text_width(content, size)
        left = {"start": x, "middle": x - width / 2, "end": x - width}[node.get("text-anchor", "start")]
        found.append((left, left + width, float(node.get("y", "0")), content))
    return found


def assert_tidy(svg: str) -> ET.Element:
    root = ET.fromstring(svg)
    width, height = float(root.get("width", "0")), float(root.get("height", "0"))
    found = texts(root)
    for left, right, y, content in found:
        assert left >= 0 and right <= width and 10 <= y <= height - 2, content
    for at, (left, right, y, content) in enumerate(found):
        for other in found[at + 1 :]:
            apart = right <= other[0] or other[1] <= left or abs(y - other[2]) >= 11
            assert apart, (content, other[3])
    assert "@media (prefers-color-scheme: dark)" in svg
    return root


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 200, 5000])
def test_loss_picture(steps: int) -> None:
    train = [(step, 2 + 6 * math.exp(-step / 50)) for step in range(1, steps + 1)]
    validation = [(step, 2.1 + 6 * math.exp(-step / 50)) for step in range(0, steps + 1, 50)]
    root = assert_tidy(loss_svg(train, validation, "Loss of run <a & b>"))
    words = [content for _, _, _, content in texts(root)]
    assert "step" in words and "validation" in words and "Loss of run <a & b>" in words
    assert any("nats" in (node.text or "") for node in root.iter(f"{SVG}text"))
    assert len(list(root.iter(f"{SVG}circle"))) == len(validation)
    numbers = [float(word) for path in root.iter(f"{SVG}path") for word in re.findall(r"[\d.]+", path.get("d", ""))]
    assert all(0 <= number <= max(WIDTH, HEIGHT) for number in numbers)


def test_loss_picture_leaves_out_what_is_not_finite() -> None:
    train = [(step, math.nan if step in (5, 6, 7, 8) else 3.0 - step / 10) for step in range(1, 20)]
    svg = loss_svg(train, [(0, math.inf)], "t")
    assert "nan" not in svg and "inf" not in svg and svg.count('class="line-train"') == 2
    assert_tidy(svg)


def test_timeline_has_a_row_for_each_lane_and_a_legend_for_each_kind() -> None:
    root = assert_tidy(timeline_svg(EVENTS, "A step"))
    words = [content for _, _, _, content in texts(root)]
    assert words.count("compute") == words.count("comm") == 2
    assert {"rank 0", "rank 1", "F forward", "G gather", "R reduce", "U update"} <= set(words)
    assert "time since the first action, ms" in words
    assert len([node for node in root.iter(f"{SVG}rect") if node.find(f"{SVG}title") is not None]) == len(EVENTS)
    assert "44% busy" not in words and "57% busy" in words


def test_a_long_timeline_stays_a_small_file() -> None:
    many = [Event(0, "compute", f"{at % 30}F{at}", at * 1e-6, (at + 1) * 1e-6) for at in range(100_000)]
    svg = timeline_svg(many, "Long")
    assert len(svg) < 1_000_000
    assert_tidy(svg)


def test_kinds() -> None:
    assert [kind_of(name) for name in ("3F0", "2g1", "U", "0W12", "send 3", "what")] == [
        "F",
        "G",
        "U",
        "W",
        "S",
        "other",
    ]
    assert all(kind_of(f"0{kind}0") == kind for kind in KINDS if len(kind) == 1 and kind != "S")


def test_chrome_trace() -> None:
    trace = json.loads(chrome_trace(EVENTS))
    spans = [record for record in trace["traceEvents"] if record["ph"] == "X"]
    assert len(spans) == len(EVENTS)
    first = spans[0]
    assert (first["name"], first["pid"], first["cat"], first["ts"], first["dur"]) == ("0G0", 0, "comm", 5e6, 20000.0)
    names = {
        (record["pid"], record["args"]["name"]) for record in trace["traceEvents"] if record["name"] == "thread_name"
    }
    assert names == {(0, "compute"), (0, "comm"), (1, "compute"), (1, "comm")}


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6), st.integers(1, 12))
def test_ticks(low: float, span: float, most: int) -> None:
    found = ticks(low, low + span, most)
    assert len(found) <= most + 1
    assert all(low - 1e-6 * span <= value <= low + span * (1 + 1e-6) for value in found)
    labels = tick_labels(found) if found else []
    assert len(set(labels)) == len(labels)
