"""Which blocks are recomputed in which segments, what is refused, which bytes are predicted to move."""

from __future__ import annotations

from typing import Any

import pytest

from heptad.config.schema import LayoutSection
from heptad.errors import ConfigError
from heptad.recompute.policy import check_moves, moved_bytes, segments
from heptad.schedule.action import Kind, UnitUse, gradient_accumulation, parse_program
from heptad.schedule.lower import DataRule, lower


def kinds(blocks: int) -> list[str]:
    return ["embed", *["block"] * blocks, "head"]


@pytest.mark.parametrize(
    ("mode", "segment", "layers", "blocks", "want"),
    [
        ("none", 1, (), 4, ()),
        ("selective", 1, (), 4, ()),
        ("full", 1, (), 3, ((1,), (2,), (3,))),
        ("full", 2, (), 5, ((1, 2), (3, 4), (5,))),
        ("full", "sqrt", (), 9, ((1, 2, 3), (4, 5, 6), (7, 8, 9))),
        ("full", "sqrt", (), 1, ((1,),)),
        ("full", "sqrt", (), 7, ((1, 2, 3), (4, 5, 6), (7,))),
        ("full", 1, (4, 0, 2), 5, ((1,), (3,), (5,))),
        ("full", 2, (0, 1, 3, 4), 5, ((1, 2), (4, 5))),
        ("full", 2, (0, 1, 2, 4), 5, ((1, 2), (3,), (5,))),
    ],
)
def test_segments(mode: Any, segment: Any, layers: tuple[int, ...], blocks: int, want: Any) -> None:
    assert segments(mode, segment, layers, kinds(blocks)) == want


def test_the_first_and_the_last_unit_of_a_custom_model_are_kept() -> None:
    assert segments("full", 1, (), ["custom"] * 4) == ((1,), (2,))


@pytest.mark.parametrize(
    ("mode", "segment", "layers", "blocks", "field", "said"),
    [
        ("full", 1, (4,), 4, "recompute.layers", "blocks 0 to 3"),
        ("full", 1, (-1,), 4, "recompute.layers", "blocks 0 to 3"),
        ("selective", 1, (7,), 4, "recompute.layers", "blocks 0 to 3"),
        ("full", 5, (), 4, "recompute.segment", "segment = 4"),
        ("full", 3, (0, 1, 3), 4, "recompute.segment", "segment = 2"),
        ("full", "sqrt", (0, 2, 4, 6), 8, "recompute.segment", "segment = 1"),
        ("full", 1, (), 0, "recompute.mode", "no effect"),
        ("selective", 1, (), 0, "recompute.mode", "no effect"),
    ],
)
def test_a_policy_that_cannot_work_is_refused(
    mode: Any, segment: Any, layers: tuple[int, ...], blocks: int, field: str, said: str
) -> None:
    with pytest.raises(ConfigError) as error:
        segments(mode, segment, layers, kinds(blocks))
    assert field in str(error.value) and said in str(error.value)


def test_offload_that_cannot_work_is_refused() -> None:
    units = tuple(UnitUse(f"u{i}", (i,), (i,), (i,)) for i in range(4))
    rule = DataRule("never", "never", prefetch=1)
    program = lower(gradient_accumulation(units, 1), units, rule, True, (), offload=True)
    check_moves(program, LayoutSection())
    with pytest.raises(ConfigError, match=r"offload\.activations[\s\S]*fsdp2"):
        check_moves(program, LayoutSection(engine="fsdp2"))
    far = lower(gradient_accumulation(units, 1), units, DataRule("never", "never", prefetch=3), True, (), offload=True)
    with pytest.raises(ConfigError, match=r"offload\.activations[\s\S]*no effect[\s\S]*prefetch = 3"):
        check_moves(far, LayoutSection(prefetch=3))


def test_moved_bytes_follow_what_ran_last() -> None:
    program = parse_program("0F0 0O0 1F0 0o0 1O0 2F0 1o0 2B0 1P0 1p0 1C0 1O0 1o0 1P0 1p0 1B0 0P0 0p0 0B0 U")
    kept = {(0, Kind.FORWARD): 3, (1, Kind.FORWARD): 10, (1, Kind.RECOMPUTE): 500}
    assert moved_bytes(program, lambda unit, kind: kept[unit, kind]) == 513
