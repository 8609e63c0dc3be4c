"""Programs with recomputed segments and moves: their text, what the checker refuses, which bytes move."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heptad.schedule.action import (
    Action,
    Kind,
    Program,
    Segments,
    UnitUse,
    format_program,
    gradient_accumulation,
    parse_program,
)
from heptad.schedule.check import ScheduleError, check
from heptad.schedule.lower import DataRule, lower

LOCAL = DataRule("never", "never")
SHARDED = DataRule("use", "microbatch")
FULL: Segments = ((1,), (2,), (3,), (4,))
PAIRS: Segments = ((1, 2), (3, 4))


def units_of(num_units: int, frozen: int = 0) -> tuple[UnitUse, ...]:
    """Unit i reads and writes bucket i; the first `frozen` have no backward."""
    return tuple(
        UnitUse(f"u{i}", (i,), (i,) if i else (), (i,) if i >= frozen else (), i >= frozen) for i in range(num_units)
    )


def text(recompute: Segments, rule: DataRule = LOCAL, offload: bool = False, frozen: int = 0) -> str:
    """The checked program of six units (four blocks) on one micro-batch."""
    units = units_of(6, frozen)
    program = lower(gradient_accumulation(units, 1, recompute), units, rule, True, recompute, offload)
    check(program, units, rule, recompute)
    return format_program(program)


def split(compute: Program, delay: bool) -> Program:
    """Every B as I and W; `delay`: all W after the last I of their micro-batch."""
    program: list[Action] = []
    waiting: list[Action] = []
    for position, action in enumerate(compute):
        if action.kind is not Kind.BACKWARD:
            program.append(action)
            continue
        program.append(Action(Kind.INPUT_GRAD, action.index, action.microbatch))
        waiting.append(Action(Kind.WEIGHT_GRAD, action.index, action.microbatch))
        ends = position + 1 == len(compute) or compute[position + 1].microbatch != action.microbatch
        if ends or not delay:
            program += waiting
            waiting = []
    return tuple(program)


def test_each_block_on_its_own() -> None:
    assert text(FULL) == "0F0 1F0 2F0 3F0 4F0 5F0 5B0 4C0 4B0 3C0 3B0 2C0 2B0 1C0 1B0 0B0 U"


def test_a_segment_runs_forward_again_before_its_first_backward() -> None:
    assert text(PAIRS) == "0F0 1F0 2F0 3F0 4F0 5F0 5B0 3C0 4C0 4B0 3B0 1C0 2C0 2B0 1B0 0B0 U"


def test_every_other_block() -> None:
    assert text(((1,), (3,))) == "0F0 1F0 2F0 3F0 4F0 5F0 5B0 4B0 3C0 3B0 2B0 1C0 1B0 0B0 U"


def test_frozen_units_are_not_made_again() -> None:
    assert text(PAIRS, frozen=2) == "0F0 1F0 2F0 3F0 4F0 5F0 5B0 3C0 4C0 4B0 3B0 2C0 2B0 U"


def test_a_segment_gathers_its_buckets_up_and_down() -> None:
    assert text(PAIRS, SHARDED) == (
        "0G0 1G0 0g0 0F0 0D0 2G0 1g0 1F0 1D0 3G0 2g0 2F0 2D0 4G0 3g0 3F0 3D0 5G0 4g0 4F0 4D0 5g0 5F0 3G0 5B0 5D0 5R0 "
        "4G0 3g0 3C0 3D0 5r0 4g0 4C0 3G0 4B0 4D0 4R0 1G0 3g0 3B0 3D0 4r0 3R0 2G0 1g0 1C0 1D0 3r0 2g0 2C0 1G0 2B0 2D0 "
        "2R0 1g0 1B0 1D0 2r0 1R0 0B0 0R0 1r0 0r0 U"
    )


def test_graphs_move_out_after_forward_and_back_one_action_ahead() -> None:
    assert text((), offload=True) == (
        "0F0 0O0 1F0 0o0 1O0 2F0 1o0 2O0 3F0 2o0 3O0 4F0 3o0 5F0 5B0 3P0 4B0 2P0 3p0 3B0 1P0 2p0 2B0 0P0 1p0 1B0 0p0 "
        "0B0 U"
    )


def test_of_a_recomputed_segment_the_kept_input_moves_and_not_what_is_read_at_once() -> None:
    assert text(PAIRS, offload=True) == (
        "0F0 0O0 1F0 0o0 1O0 2F0 1o0 3F0 3O0 4F0 3o0 5F0 3P0 5B0 3p0 3C0 4C0 4B0 1P0 3B0 1p0 1C0 2C0 2B0 0P0 1B0 0p0 "
        "0B0 U"
    )


def refused(line: str, rule: str, recompute: Segments = PAIRS) -> None:
    with pytest.raises(ScheduleError, match=rule):
        check(parse_program(line), units_of(6), LOCAL, recompute)


FORWARD = "0F0 1F0 2F0 3F0 4F0 5F0 5B0 "


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ("4C0 3C0 4B0 3B0 1C0 2C0 2B0 1B0 0B0 U", "3C0 has not run"),
        ("3C0 4B0 3B0 1C0 2C0 2B0 1B0 0B0 U", "4C0 has not run"),
        ("3C0 4C0 4B0 3B0 1C0 2B0 1B0 0B0 U", "2C0 has not run"),
        ("3C0 3C0 4C0 4B0 3B0 1C0 2C0 2B0 1B0 0B0 U", "has run already"),
        ("3C0 4C0 4B0 3C0 3B0 1C0 2C0 2B0 1B0 0B0 U", "has run already"),
        ("3C0 4C0 4B0 3B0 1C0 2C0 2B0 1B0 0C0 0B0 U", "unit 0 keeps its graph"),
        ("4O0 3C0 4C0 4B0 3B0 1C0 2C0 2B0 1B0 0B0 U", "unit 4 keeps nothing"),
        ("3O0 3C0 4C0 4B0 3B0 1C0 2C0 2B0 1B0 0B0 U", "is not on the device"),
        ("3C0 4C0 4B0 4O0 3B0 1C0 2C0 2B0 1B0 0B0 U", "unit 4 keeps nothing"),
        ("0O0 0o0 3C0 4C0 4B0 3B0 1C0 2C0 2B0 1B0 0B0 U", "is not on the device"),
        ("0O0 0P0 3C0 4C0 4B0 3B0 1C0 2C0 2B0 1B0 0p0 0B0 U", "moves go out"),
        ("0o0 3C0 4C0 4B0 3B0 1C0 2C0 2B0 1B0 0B0 U", "moves go out"),
    ],
)
def test_wrong_programs_are_refused(line: str, rule: str) -> None:
    refused(FORWARD + line, rule)


def test_a_forward_that_is_not_made_again_is_refused() -> None:
    refused(FORWARD + "3C0 4C0 4B0 3B0 2B0 1B0 0B0 U", "2C0 has not run")


@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("recompute", [FULL, PAIRS, ((2,), (4,))])
def test_a_split_backward_runs_each_forward_again_once(recompute: Segments, delay: bool) -> None:
    units = units_of(6)
    compute = split(gradient_accumulation(units, 2, recompute), delay)
    program = lower(compute, units, SHARDED, True, recompute, offload=True)
    check(program, units, SHARDED, recompute)
    again = [action for action in program if action.kind is Kind.RECOMPUTE]
    assert sorted(str(action) for action in again) == sorted(
        f"{unit}C{microbatch}" for segment in recompute for unit in segment for microbatch in range(2)
    )


@given(st.sampled_from([(), FULL, PAIRS, ((2, 3),)]), st.sampled_from([LOCAL, SHARDED]), st.integers(0, 3), st.data())
def test_moves_are_proven_and_a_lost_or_doubled_one_is_refused(
    recompute: Segments, rule: DataRule, prefetch: int, data: st.DataObject
) -> None:
    units = units_of(6)
    rule = DataRule(rule.gather, rule.reduce, prefetch=prefetch)
    program = lower(gradient_accumulation(units, 2, recompute), units, rule, True, recompute, offload=True)
    check(program, units, rule, recompute)
    assert parse_program(format_program(program)) == program
    moves = [p for p, action in enumerate(program) if action.kind in (Kind.OUT, Kind.WAIT_OUT, Kind.FETCH)]
    at = data.draw(st.sampled_from(moves))
    for broken in (program[:at] + program[at + 1 :], program[: at + 1] + program[at:]):
        with pytest.raises(ScheduleError):
            check(broken, units, rule, recompute)
