"""The picture of a schedule: every action in its place, idle time behind, text that fits, light and dark."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest

from heptad.axes.pipeline.generate import GENERATORS, generate
from heptad.report.panel import MOST_ROWS, Panel
from heptad.report.pipeline import DIGIT, pipeline_svg
from heptad.report.svg import text_width
from heptad.schedule.pipeline import parse_schedule, peak_live
from heptad.simulate.pipeline import PairMode, simulate
from heptad.simulate.times import Links, Times
from heptad.trace import Event

SVG = "{http://www.w3.org/2000/svg}"


def panel(
    name: str, num_ranks: int, num_microbatches: int, mode: PairMode = PairMode.BLOCK, comm: float = 0.0
) -> Panel:
    schedule = generate(name, num_ranks, None, num_microbatches)
    links = Links.uniform(schedule.num_stages, comm)
    run = simulate(schedule, Times.uniform(schedule.num_stages), links, mode)
    return Panel.simulated(run, name, f"idle {run.idle_fraction:.1%}")


def numbers(root: ET.Element) -> list[tuple[ET.Element, ET.Element]]:
    """Each (box, micro-batch number in it)."""
    found = []
    for group in root.iter(f"{SVG}g"):
        boxes, texts = group.findall(f"{SVG}rect"), group.findall(f"{SVG}text")
        found += list(zip(boxes, texts, strict=True)) if texts else []
    return found


def assert_tidy(svg: str) -> ET.Element:
    """Text is on the page, no two labels overlap, and every number lies in its box."""
    root = ET.fromstring(svg)
    width, height = float(root.get("width", "0")), float(root.get("height", "0"))
    spans = []
    for node in root.findall(f"{SVG}text"):
        size = float((re.findall(r"font-size: (\d+)px", node.get("style") or "") or [12])[0])
        x, y, wide = float(node.get("x", "0")), float(node.get("y", "0")), text_width(node.text or "", size)
        left = {"start": x, "middle": x - wide / 2, "end": x - wide}[node.get("text-anchor", "start")]
        assert left >= 0 and left + wide <= width and 10 <= y <= height - 2, node.text
        spans.append((left, left + wide, y, node.text))
    for at, (left, right, y, content) in enumerate(spans):
        for other in spans[at + 1 :]:
            assert right <= other[0] or other[1] <= left or abs(y - other[2]) >= 11, (content, other[3])
    for box, node in numbers(root):
        size = float(re.findall(r"font-size: (\d+)px", node.get("style") or "")[0])
        x, y, wide, high = (float(box.get(key, "0")) for key in ("x", "y", "width", "height"))
        assert DIGIT * size * len(node.text or "") <= wide and size <= high
        assert abs(float(node.get("x", "0")) - x - wide / 2) < 0.02 and y < float(node.get("y", "0")) <= y + high
    assert "@media (prefers-color-scheme: dark)" in svg
    return root


def words(root: ET.Element) -> list[str]:
    return [node.text or "" for node in root.findall(f"{SVG}text")]


@pytest.mark.parametrize("name", sorted(GENERATORS))
@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(2, 4), (8, 20)])
def test_every_action_is_drawn_once_with_its_micro_batch(name: str, num_ranks: int, num_microbatches: int) -> None:
    one = panel(name, num_ranks, num_microbatches)
    root = assert_tidy(pipeline_svg([one], "A picture"))
    drawn = [node.text or "" for node in root.iter(f"{SVG}title")]
    assert len(drawn) == len(one.events) == len(set(drawn))
    if name != "naive":
        assert len(numbers(root)) == sum(len(box.sides) for boxes in one.rows.values() for box in boxes)
    kinds = {
        "F": "forward",
        "B": "backward",
        "I": "input gradient",
        "W": "weight gradient",
        "&": "a pair that overlaps",
    }
    for letter, label in kinds.items():
        assert (label in words(root)) == any(letter in event.name for event in one.events)
    assert f"rank {num_ranks - 1}" in words(root) and "idle" in words(root)
    assert ("faint: the rank's other stage" in words(root)) == (name in ("interleaved", "zbv", "dualpipe", "dualpipev"))


def test_idle_time_is_hatched_behind_the_boxes() -> None:
    one = panel("1f1b", 4, 8)
    root = assert_tidy(pipeline_svg([one], "1F1B"))
    hatched = [node for node in root.findall(f"{SVG}rect") if node.get("fill") == "url(#idle)" and not node.get("rx")]
    boxes = [box for group in root.iter(f"{SVG}g") for box in group.findall(f"{SVG}rect")]
    assert len(hatched) == 4
    area = sum(float(node.get("width", "0")) for node in hatched)
    assert sum(float(node.get("width", "0")) for node in boxes) / area == pytest.approx(1 - 3 / 11, abs=1e-3)
    assert words(root).count("idle 27.3%") == 5  # the note, and each rank's


@pytest.mark.parametrize("name", sorted(GENERATORS))
@pytest.mark.parametrize("mode", PairMode)
def test_live_activations_of_the_picture_are_those_of_the_schedule(name: str, mode: PairMode) -> None:
    schedule, one = generate(name, 4, None, 8), panel(name, 4, 8, mode, comm=0.25)
    assert tuple(max(level for _, level in one.live(rank)) for rank in range(4)) == peak_live(schedule)
    assert all(one.live(rank)[-1][1] == 0 for rank in range(4))


def test_a_pair_is_one_box_of_two_halves_unless_its_backward_waits() -> None:
    schedule = parse_schedule("0F0 0F1&0B0 0B1\n1F0 1B0 1F1 1B1")
    for mode, boxes in ((PairMode.BLOCK, 3), (PairMode.EARLY, 4)):
        run = simulate(schedule, Times.uniform(2), pairs=mode)
        assert len(Panel.simulated(run, "t", "n").rows[0]) == boxes
        assert_tidy(pipeline_svg([Panel.simulated(run, "t", "n")], "A pair"))


def test_stacked_schedules_share_one_time_axis() -> None:
    names = ("gpipe", "1f1b", "interleaved", "zbv", "dualpipe")
    root = assert_tidy(pipeline_svg([panel(name, 8, 20) for name in names], "Five"))
    assert [word for word in words(root) if word in names] == list(names)
    assert words(root).count("time") == 1 and words(root).count("forward") == 1


@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(24, 24), (40, 8), (MOST_ROWS + 1, 160)])
def test_many_ranks_stay_legible_and_the_file_small(num_ranks: int, num_microbatches: int) -> None:
    svg = pipeline_svg([panel("1f1b", num_ranks, num_microbatches)], "Many")
    root = assert_tidy(svg)
    assert len(svg) < 4_000_000
    if num_ranks > MOST_ROWS:
        assert "rank 1" not in words(root) and any("one rank in 2 is drawn" in word for word in words(root))


def test_measured_events_are_drawn_like_simulated_ones() -> None:
    """Messages, and the update at the end, are no boxes."""
    one = panel("1f1b", 2, 4)
    measured = [*one.events, Event(0, "compute", "U", 15, 16), Event(1, "send", "send 1B3", 14, 15)]
    assert Panel(one.title, one.note, measured, 2).rows == one.rows
