"""Pipeline schedules as values: text form, proof with the place of a fault, sends and receives. Faults are planted."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.schedule.messages import Entry, Receive, Send, check_messages, messages, with_messages

from heptad.schedule.action import Kind
from heptad.schedule.pipeline import (
    Pair,
    Schedule,
    StageAction,
    direction_of,
    format_schedule,
    parse_schedule,
    parse_step,
    peak_live,
    placement,
    singles,
)
from heptad.schedule.pipeline_check import BrokenSchedule, check_schedule
from heptad.schedule.slots import grid

GOOD = "0F0 0F1 0B0 0F2 0B1 0B2\n1F0 1B0 1F1 1B1 1F2 1B2"
SPLIT = "0F0 0F1 0I0 0F2 0W0 0I1 0W1 0I2 0W2\n1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2"
BOTH_WAYS = "0F0 1F1 1B1 0B0\n0F1 1F0 1B0 0B1"
BROKEN = {
    "missing": GOOD.replace(" 1B2", ""),
    "missing weight gradient": SPLIT.replace(" 0W1", ""),
    "missing stage": "0F0 0B0\n2F0 2B0",
    "twice": GOOD.replace("0B1", "0B1 0B1"),
    "half after whole": GOOD.replace("1B1", "1B1 1W1"),
    "other rank": GOOD.replace("0B1 0B2", "0B2").replace("1B2", "1B2 0B1"),
    "backward before its forward": GOOD.replace("1F0 1B0 1F1 1B1", "1F0 1B0 1B1 1F1"),
    "weights before inputs": SPLIT.replace("0I1 0W1", "0W1 0I1"),
    "moves": "0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3 1F1 1B1\n1F0 1B0 1F2 1F3 1B2 1B3",
    "moves, odd": "0F0 0F1 0F2 0B0 0B1 0B2 1F2 1B2\n1F0 1B0 1F1 1B1",
    "deadlock": "0F0 0B0 0F1 0B1 0F2 0B2\n1F0 1F1 1B0 1B1 1F2 1B2",
    "deadlock of three": "0F0 0B0 0F1 0B1\n1F0 1F1 1B1 1B0\n2F0 2F1 2B0 2B1",
    "pair of one micro-batch": "0F0&0B0 0F1 0B1",
    "pair without its forward's input": "0F0 0B0 0F1 0B1\n1F0 1F1&1B0 1B1",
    "pair in a circle": "0F0 0F1&0B0 0B1\n1F0 1F1 1B0 1B1",
}


def test_the_text_form_round_trips() -> None:
    for text in (GOOD, SPLIT, BOTH_WAYS, "0F0 0F4&7B1 3I2 12W10"):
        assert format_schedule(parse_schedule(f"# a comment\n\n  {text}\n")) == text
    pair = parse_step("0F4&7I1")
    assert pair == Pair(StageAction(0, Kind.FORWARD, 4), StageAction(7, Kind.INPUT_GRAD, 1))
    for bad in ("F0", "0G0", "0B1&0F0", "0F0&0W0", "0F0&0B1&0B2", "0F-1", "1 F2", "0F0&"):
        with pytest.raises(ValueError, match=r"stage action|no pair"):
            parse_step(bad)


def test_correct_schedules() -> None:
    for text in (GOOD, SPLIT, BOTH_WAYS, "0F0 0F1\n1F0 1F1", "0F0 0F1&0B0 0B1"):
        check_schedule(parse_schedule(text))
    assert placement(parse_schedule(GOOD)) == ((0, 1),)
    both = parse_schedule(BOTH_WAYS)
    assert placement(both) == ((0, 1), (1, 0))
    assert [direction_of(both, placement(both), m) for m in (0, 1)] == [0, 1]


def test_faults_are_shown_at_their_place(snapshot: Callable[[str, str], None]) -> None:
    shown = []
    for name, text in BROKEN.items():
        with pytest.raises(BrokenSchedule) as error:
            check_schedule(parse_schedule(text))
        shown.append(f"{name}: {error.value}")
    with pytest.raises(BrokenSchedule) as error:
        check_schedule(parse_schedule(GOOD), live=[1, 1])
    shown.append(f"alive: {error.value}")
    outside = Schedule("outside", 1, 1, parse_schedule(GOOD).lines)
    with pytest.raises(BrokenSchedule) as error:
        check_schedule(outside)
    shown.append(f"outside: {error.value}")
    snapshot("broken_schedules", "\n\n".join(shown))


def test_a_large_schedule_is_shown_around_the_fault() -> None:
    steps = [[*(f"{r}F{m}" for m in range(99)), *(f"{r}B{m}" for m in range(99))] for r in range(40)]
    steps[20][50] = "20B50"
    steps[20][99 + 50] = "20F50"
    with pytest.raises(BrokenSchedule, match=r"^20B50 needs 20F50, which rank 20 runs later") as error:
        check_schedule(parse_schedule("\n".join(map(" ".join, steps))))
    _, head, *rows = str(error.value).splitlines()
    assert error.value.cells == ((20, 50),)
    assert [row.split()[1] for row in rows] == [str(rank) for rank in range(16, 25)]
    assert ">20B50<" in rows[4] and len(head.split()) == 14


def test_the_whole_grid() -> None:
    expected = [
        "slot      0   1   2   3   4   5   6   7   8   9  10",
        "rank 0  0F0 0F1   .   . 0B0   - 0F2 0B1   - 0B2   -",
        "rank 1    . 1F0 1B0   - 1F1 1B1   -   . 1F2 1B2   -",
    ]
    found = grid(parse_schedule(GOOD)).splitlines()
    assert len(found) == 3 and found[0].split()[:3] == ["slot", "0", "1"]
    assert expected[1].split()[2:4] == found[1].split()[2:4]


def test_alive_until_the_weight_gradient() -> None:
    assert peak_live(parse_schedule("0F0 0I0 0F1 0W0 0I1 0W1")) == (2,)
    assert peak_live(parse_schedule("0F0 0B0 0F1 0B1")) == (1,)
    assert peak_live(parse_schedule("0F0 0F1&0B0 0B1")) == (2,)
    assert peak_live(parse_schedule("0F0 0F1&0I0 0F2 0I1 0I2 0W0 0W1 0W2")) == (3,)


def in_some_order(schedule: Schedule) -> bool:
    """An oracle that shares nothing with the checker: again and again, take any action whose needs are met."""
    lines = [list(line) for line in schedule.lines]
    done: set[tuple[str, int, int]] = set()
    top = schedule.num_stages - 1
    going = True
    while going:
        going = False
        for line in lines:
            while line:
                needs = []
                for action in singles(line[:1]):
                    s, m = action.stage, action.microbatch
                    if action.kind is Kind.FORWARD:
                        needs += [("F", s - 1, m)] * (s > 0)
                    elif action.kind is Kind.WEIGHT_GRAD:
                        needs += [("I", s, m)]
                    else:
                        needs += [("F", s, m)] + [("I", s + 1, m)] * (s < top)
                if not set(needs) <= done:
                    break
                for action in singles([line.pop(0)]):
                    name = "I" if action.kind is Kind.BACKWARD else action.kind.value
                    done.add((name, action.stage, action.microbatch))
                going = True
    return not any(lines)


@given(
    st.integers(0, 2**32),
    st.sampled_from([GOOD, SPLIT, "0F0 3F0 3B0 0B0 0F1 3F1 3B1 0B1\n1F0 2F0 2B0 1B0 1F1 2F1 2B1 1B1"]),
)
def test_the_checker_agrees_with_an_oracle_on_shuffled_lines(seed: int, text: str) -> None:
    """A few neighbours swapped: the verdict is that of a plain topological order. What passes also runs with
    blocking sends."""
    draw, schedule = random.Random(seed), parse_schedule(text)
    lines = [list(line) for line in schedule.lines]
    for _ in range(draw.randrange(5)):
        line = draw.choice(lines)
        at = draw.randrange(len(line) - 1)
        line[at], line[at + 1] = line[at + 1], line[at]
    for line in lines:  # a forward and a backward that follow one another may be a pair
        at = draw.randrange(len(line) - 1)
        first, second = line[at], line[at + 1]
        if (
            isinstance(first, StageAction)
            and isinstance(second, StageAction)
            and first.kind is Kind.FORWARD
            and second.kind in (Kind.BACKWARD, Kind.INPUT_GRAD)
        ):
            line[at : at + 2] = [Pair(first, second)]
    shuffled = Schedule("shuffled", schedule.num_stages, schedule.num_microbatches, tuple(map(tuple, lines)))
    if in_some_order(shuffled):
        check_schedule(shuffled)
        check_messages(with_messages(shuffled))
    else:
        with pytest.raises(BrokenSchedule):
            check_schedule(shuffled)


def test_what_is_sent() -> None:
    text = [" ".join(map(str, line)) for line in with_messages(parse_schedule("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1"))]
    assert text == [
        "0F0 0F0>1 0F1 0F1>1 1>1B0 0B0 1>1B1 0B1",
        "0>0F0 1F0 0>0F1 1B0 1B0>0 1F1 1B1 1B1>0",
    ]
    sent = messages(parse_schedule("0F0 3F0 3B0 0B0\n1F0 2F0 2B0 1B0"))
    assert [[str(m.made_by) for step in row for m in step] for row in sent] == [["0F0", "3B0"], ["2F0", "1B0"]]
    assert not any(step for row in messages(parse_schedule("0F0 1F0 1B0 0B0")) for step in row)


def lines_with(change: Callable[[list[list[Entry]]], None]) -> list[list[Entry]]:
    lines = [list(line) for line in with_messages(parse_schedule(GOOD))]
    change(lines)
    return lines


def test_faults_of_messages() -> None:
    def late(lines: list[list[Entry]]) -> None:
        """Each receive right before its use, as if no one received early: rank 1 sends 1B0 while rank 0 sends 0F1."""
        message = next(e for e in lines[1] if isinstance(e, Receive) and str(e) == "0>0F1")
        lines[1].remove(message)
        lines[1].insert([str(e) for e in lines[1]].index("1F1"), message)

    def swapped(lines: list[list[Entry]]) -> None:
        names = [str(e) for e in lines[1]]
        i, j = names.index("0>0F1"), names.index("0>0F2")
        lines[1][i], lines[1][j] = lines[1][j], lines[1][i]

    def early(lines: list[list[Entry]]) -> None:
        lines[0].insert(0, lines[0].pop([isinstance(e, Send) for e in lines[0]].index(True)))

    def too_late(lines: list[list[Entry]]) -> None:
        lines[1].append(lines[1].pop(0))

    def lost(lines: list[list[Entry]]) -> None:
        del lines[1][0]

    check_messages(lines_with(lambda _: None))
    for change, says in (
        (late, "blocking sends hang: rank 0 at 0F1>1, rank 1 at 1B0>0"),
        (swapped, "receives 0>0F1 after 1F1|receives are not in the order of the sends"),
        (early, "before it is made"),
        (too_late, "receives 0>0F0 after 1F0, which needs it"),
        (lost, "channel 0 to 1: receives are not in the order"),
    ):
        with pytest.raises(AssertionError, match=says):
            check_messages(lines_with(change))
