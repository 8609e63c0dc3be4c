"""Text form, lowering and proof of step programs: random models, rules and accumulations, and planted errors."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heptad.axes.data.cost import gathers
from heptad.schedule.action import (
    Action,
    Kind,
    UnitUse,
    format_program,
    forward_only,
    gradient_accumulation,
    parse_program,
)
from heptad.schedule.check import ScheduleError, check
from heptad.schedule.lower import DataRule, lower, phases

RULES = [
    DataRule("never", "step", scatter=False),
    DataRule("step", "step"),
    DataRule("step", "microbatch", replicas=True),
    DataRule("use", "microbatch"),
    DataRule("use", "microbatch", replicas=True, prefetch=2),
    DataRule("use", "microbatch", prefetch=0),
]


def plain(num_units: int, tied: bool = False, frozen: int = 0) -> tuple[UnitUse, ...]:
    """Unit i reads and writes bucket i; a table (unit 0) is not read backward; a tied head reads bucket 0 too."""
    units = []
    for i in range(num_units):
        extra = (0,) if tied and i == num_units - 1 and i else ()
        buckets = tuple(sorted({i, *extra}))
        writes = tuple(b for b in buckets if b >= frozen)
        units.append(UnitUse(f"u{i}", buckets, extra if i == 0 else buckets, writes, i >= frozen or bool(writes)))
    return tuple(units)


def test_the_whole_program_of_a_small_stage_three_step() -> None:
    units = plain(3)
    program = lower(gradient_accumulation(units, 1), units, DataRule("use", "microbatch"))
    assert format_program(program) == (
        "0G0 1G0 0g0 0F0 0D0 2G0 1g0 1F0 1D0 2g0 2F0 1G0 2B0 2D0 2R0 1g0 1B0 1D0 2r0 1R0 0B0 0R0 1r0 0r0 U"
    )


def test_stage_zero_reduces_once_a_step_under_the_last_backward() -> None:
    units = plain(3)
    program = lower(gradient_accumulation(units, 2), units, DataRule("never", "step", scatter=False))
    assert format_program(program) == "0F0 1F0 2F0 2B0 1B0 0B0 0F1 1F1 2F1 2B1 2R1 1B1 1R1 0B1 0R1 2r1 1r1 0r1 U"


def test_a_tied_table_is_reduced_once_after_its_last_write() -> None:
    units = plain(3, tied=True)
    program = lower(gradient_accumulation(units, 1), units, DataRule("use", "microbatch"))
    text = format_program(program).split()
    assert text.count("0R0") == 1
    assert text.index("0R0") > text.index("0B0")


@given(
    st.integers(2, 7), st.booleans(), st.integers(0, 3), st.integers(1, 4), st.sampled_from(RULES), st.integers(0, 3),
    st.booleans(),
)  # fmt: skip
def test_every_lowering_is_proven_and_round_trips(
    num_units: int, tied: bool, frozen: int, microbatches: int, rule: DataRule, recompute: int, train: bool
) -> None:
    units = plain(num_units, tied, min(frozen, num_units - 1))
    inner = tuple(range(1, num_units - 1))
    segments = tuple(inner[i : i + recompute] for i in range(0, len(inner), recompute)) if recompute else ()
    compute = gradient_accumulation(units, microbatches, segments) if train else forward_only(units, microbatches)
    program = lower(compute, units, rule, update=train)
    check(program, units, rule, segments if train else ())
    assert parse_program(format_program(program)) == program
    assert [action for action in program if action in compute] == list(compute)
    for bucket in range(num_units):
        if rule.gather == "use" and train:
            pairs = zip(program, phases(program), strict=True)
            found = [phase for action, phase in pairs if action.kind is Kind.GATHER and action.index == bucket]
            want = gathers(units, bucket, 3, microbatches, segments)
            assert (found.count("forward"), found.count("backward")) == want


@given(st.integers(3, 6), st.integers(1, 3), st.sampled_from(RULES), st.data())
def test_a_program_with_an_action_left_out_is_refused(
    num_units: int, microbatches: int, rule: DataRule, data: st.DataObject
) -> None:
    units = plain(num_units)
    program = lower(gradient_accumulation(units, microbatches), units, rule)
    drop = data.draw(st.integers(0, len(program) - 2))
    with pytest.raises(ScheduleError):
        check(program[:drop] + program[drop + 1 :], units, rule)


@given(st.integers(3, 5), st.integers(1, 3), st.sampled_from(RULES), st.data())
def test_a_doubled_action_is_refused(num_units: int, microbatches: int, rule: DataRule, data: st.DataObject) -> None:
    units = plain(num_units)
    program = lower(gradient_accumulation(units, microbatches), units, rule)
    at = data.draw(st.integers(0, len(program) - 1))
    with pytest.raises(ScheduleError):
        check(program[: at + 1] + program[at:], units, rule)


def test_the_error_shows_the_place() -> None:
    units, rule = plain(3), DataRule("use", "microbatch")
    program = lower(gradient_accumulation(units, 1), units, rule)
    broken = tuple(action for action in program if str(action) != "1g0")
    with pytest.raises(ScheduleError, match=r"bucket 1 is not gathered\n(.*\n)*-> 1F0"):
        check(broken, units, rule)


def test_prefetch_holds_one_bucket_more_than_it_is() -> None:
    units = plain(4)
    for prefetch in (1, 2):
        program = lower(gradient_accumulation(units, 1), units, DataRule("use", "microbatch", prefetch=prefetch))
        changes = [(action.kind is Kind.GATHER) - (action.kind is Kind.DROP) for action in program]
        assert max(accumulate(changes)) == prefetch + 1


@pytest.mark.parametrize("text", ["F0", "1Y0", "1F", "", "1f0", "U1"])
def test_no_action(text: str) -> None:
    with pytest.raises(ValueError, match="no action"):
        Action.parse(text)
