"""Each planted fault of the context axis is caught, and the guilty axis is found by measurement."""

from __future__ import annotations

from typing import Any

import pytest
from tests.verify.layouts import GPT, compared, layout_job
from tests.verify.several import assert_named, assert_refused, first_of_each

from heptad.verify.context_faults import CONTEXT
from heptad.verify.localise import present, without
from heptad.verify.run import Verdict, examine
from heptad.verify.shrink import Shrunk

RING: dict[str, Any] = dict(cp=2, prefetch=0)
PLAIN = RING | dict(context_split="contiguous")
DEALT = RING | dict(context="ulysses")
BOTH = RING | dict(cp=4, context="ring+ulysses", cp_ulysses=2)
GATHER = RING | dict(context="gather")
CASES: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "shifted_late": ("shifted_late", dict(layout=RING), "cp", "head"),
    "shifted_late-plain": ("shifted_late", dict(layout=PLAIN), "cp", "head"),
    "shifted_late-dealt": ("shifted_late", dict(layout=DEALT), "cp", "head"),
    "plain_positions": ("plain_positions", dict(layout=RING), "context_split", "blocks.0"),
    "plain_positions-learned": ("plain_positions", dict(layout=GATHER, model=GPT), "context_split", "embed"),
    "padding_counts": ("padding_counts", dict(layout=RING), "cp", "head"),
    "unseen_counts": ("unseen_counts", dict(layout=RING), "cp", "blocks.0"),
    "unseen_counts-dealt": ("unseen_counts", dict(layout=DEALT), "cp", "blocks.0"),
    "unseen_counts-gathered": ("unseen_counts", dict(layout=GATHER), "cp", "blocks.0"),
    "hop_forgotten": ("hop_forgotten", dict(layout=RING), "context", "blocks.0"),
    "hop_forgotten-both": ("hop_forgotten", dict(layout=BOTH), "context", "blocks.0"),
    "kv_gradient_lost": ("kv_gradient_lost", dict(layout=RING), "context", "attention"),
    "kv_gradient_lost-both": ("kv_gradient_lost", dict(layout=BOTH), "context", "attention"),
    "dealt_kv_not_summed": ("dealt_kv_not_summed", dict(layout=DEALT, model=dict(kv_heads=1)), "context", "attention"),
    "times_context_ranks": ("times_context_ranks", dict(layout=RING), "cp", "head"),
    "times_context_ranks-dealt": ("times_context_ranks", dict(layout=DEALT), "cp", "head"),
}
"""Fault, job, guilty axis, what the first differing module's name holds."""


def job_of(case: str, **options: Any) -> Any:
    return layout_job(**(dict(ranks=1, accumulation=2) | CASES[case][1] | options))


def test_every_kind_has_a_case() -> None:
    assert {fault for fault, *_ in CASES.values()} == set(CONTEXT)


@pytest.mark.parametrize("case", first_of_each(CASES))
def test_a_fault_is_caught_and_its_axis_named(case: str) -> None:
    fault, _, axis, module = CASES[case]
    verdict: Verdict = examine(Shrunk(job_of(case), ()), 1, (fault,))
    assert_named(verdict, axis, module)
    assert verdict.comparison is not None and verdict.comparison.traffic_matches  # none of them sends otherwise


@pytest.mark.slow
@pytest.mark.parametrize("params", ["fp32", "bf16"])
@pytest.mark.parametrize("case", CASES)
def test_a_fault_is_caught_in_every_precision(case: str, params: str) -> None:
    assert compared(job_of(case, params=params), inject=(CASES[case][0],)).differences


@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("case", CASES)
def test_a_fault_is_named_beside_the_data_and_the_tensor_axis(case: str, zero: int) -> None:
    layout = CASES[case][1]["layout"] | (dict(tp=2, sequence_parallel=True) if zero % 2 else {})
    options: dict[str, Any] = dict(zero=zero, ranks=1 if zero % 2 else 2, accumulation=3, layout=layout)
    verdict = examine(Shrunk(job_of(case, **options), ()), 1, (CASES[case][0],))
    assert verdict.blame is not None and verdict.blame.axis == CASES[case][2]


@pytest.mark.parametrize(
    ("fault", "options", "says"),
    [
        *((fault, {}, "the sequence is whole (layout.cp = 1)") for fault in CONTEXT),
        ("plain_positions", dict(layout=PLAIN), "tokens lie in plain order"),
        ("plain_positions", dict(layout=DEALT), "tokens lie in plain order"),
        ("padding_counts", dict(layout=RING, data=dict(seq_len=6)), "layout.cp divides data.seq_len"),
        ("hop_forgotten", dict(layout=DEALT), "no keys go round"),
        ("kv_gradient_lost", dict(layout=GATHER), "no keys go round"),
        ("dealt_kv_not_summed", dict(layout=DEALT), "no kv head is sent twice"),
        ("dealt_kv_not_summed", dict(layout=RING, model=dict(kv_heads=1)), "no kv head is sent twice"),
    ],
)
def test_a_fault_that_cannot_be_is_refused(fault: str, options: dict[str, Any], says: str) -> None:
    assert_refused(fault, layout_job(**options), 2, says)


def test_without_the_context_axis_goes_what_lives_on_it() -> None:
    job = layout_job(layout=BOTH)
    assert present(job)[1:4] == ["context_split", "context", "cp"]
    layout = without(job, ["cp"]).layout
    assert (layout.cp, layout.context, layout.cp_ulysses, layout.context_split) == (1, "ring", 1, "zigzag")
    layout = without(job, ["context"]).layout
    assert (layout.cp, layout.context, layout.cp_ulysses, layout.context_split) == (4, "gather", 1, "zigzag")
    layout = without(job, ["context_split"]).layout
    assert (layout.cp, layout.context, layout.context_split) == (4, "ring+ulysses", "contiguous")
    layout = without(layout_job(layout=DEALT), ["context"]).layout
    assert (layout.context, layout.context_split) == ("gather", "contiguous")  # the order that it had
    assert without(job, ["context", "cp"]).layout == without(job, ["cp"]).layout
    assert "context" not in present(layout_job(layout=GATHER))
    assert "context_split" not in present(layout_job(layout=DEALT))
