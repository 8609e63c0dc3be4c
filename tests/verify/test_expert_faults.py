"""Each planted fault of the expert axes is caught, and the guilty axis is found by measurement."""

from __future__ import annotations

from typing import Any

import pytest
from tests.verify.layouts import compared, layout_job
from tests.verify.several import assert_named, assert_refused, first_of_each
from tests.verify.test_moe_layouts import DEEPSEEK, SOFTMAX

from heptad.config.schema import Job
from heptad.verify.expert_faults import EXPERT
from heptad.verify.run import Verdict, examine
from heptad.verify.shrink import Shrunk

FOUR: dict[str, Any] = dict(ranks=4, model={**SOFTMAX, "experts": 7, "experts_per_token": 3}, layout=dict(ep=4))
CUT: dict[str, Any] = dict(ranks=1, model=SOFTMAX, layout=dict(tp=2, sequence_parallel=True))
RING: dict[str, Any] = dict(ranks=1, model=SOFTMAX, layout=dict(cp=2))
CASES: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "times_expert_ranks": ("times_expert_ranks", dict(model=DEEPSEEK, layout=dict(ep=2)), "ep", "experts"),
    "times_expert_ranks-copies": ("times_expert_ranks", FOUR | dict(layout=dict(ep=2)), "ep", "experts"),
    "rows_unsorted": ("rows_unsorted", dict(model=DEEPSEEK, layout=dict(ep=2)), "ep", "blocks.1"),
    "expert_part_alone": ("expert_part_alone", dict(model=DEEPSEEK, layout=dict(etp=2)), "etp", "blocks.1"),
    "second_on_a_node": ("second_on_a_node", FOUR | dict(layout=dict(ep=4, ep_inner=2)), "ep_inner", "blocks.1"),
    "router_not_summed": ("router_not_summed", CUT, "tp", "router"),
    "router_not_summed-whole": ("router_not_summed", CUT | dict(layout=dict(tp=2)), "tp", "router"),
    "load_by_rank": ("load_by_rank", CUT, "tp", "loss"),
    "load_by_rank-context": ("load_by_rank", RING | dict(model=DEEPSEEK), "cp", "loss"),
    "capacity_by_rank": ("capacity_by_rank", CUT, "tp", "blocks.1"),
    "capacity_by_rank-context": ("capacity_by_rank", RING, "cp", "blocks.1"),
    "bias_by_rank": ("bias_by_rank", dict(model=DEEPSEEK), "dp_shard", "router"),
    "bias_by_rank-tensor": ("bias_by_rank", CUT | dict(model=DEEPSEEK), "tp", "router"),
}
"""Fault, job, guilty axis, what the first differing module's name holds."""


def job_of(case: str, **options: Any) -> Job:
    return layout_job(**(dict(ranks=2, accumulation=2) | CASES[case][1] | options))


def test_every_kind_has_a_case() -> None:
    assert {fault for fault, *_ in CASES.values()} == set(EXPERT)


@pytest.mark.parametrize("case", first_of_each(CASES))
def test_a_fault_is_caught_and_its_axis_named(case: str) -> None:
    fault, _, axis, module = CASES[case]
    verdict: Verdict = examine(Shrunk(job_of(case), ()), 1, (fault,))
    assert_named(verdict, axis, module)


@pytest.mark.slow
@pytest.mark.parametrize("params", ["fp32", "bf16"])
@pytest.mark.parametrize("case", CASES)
def test_a_fault_is_caught_in_every_precision(case: str, params: str) -> None:
    assert compared(job_of(case, params=params), inject=(CASES[case][0],)).differences


@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("case", [case for case in CASES if not case.startswith("bias_by_rank")])
def test_a_fault_is_named_in_every_stage(case: str, zero: int) -> None:
    verdict = examine(Shrunk(job_of(case, zero=zero, accumulation=3), ()), 1, (CASES[case][0],))
    assert verdict.blame is not None and verdict.blame.axis == CASES[case][2]


@pytest.mark.parametrize(
    ("fault", "options", "says"),
    [
        *((fault, {}, "there are no experts") for fault in EXPERT if fault != "bias_by_rank"),
        ("bias_by_rank", dict(model=SOFTMAX), "no load moves a bias"),
        ("bias_by_rank", dict(ranks=1, model=DEEPSEEK), "one rank routes the whole batch"),
        ("times_expert_ranks", dict(model=DEEPSEEK), "layout.ep = 1"),
        ("expert_part_alone", dict(model=DEEPSEEK), "layout.etp = 1"),
        ("second_on_a_node", dict(model=DEEPSEEK, layout=dict(ep=2)), "layout.ep_inner"),
        ("load_by_rank", dict(model=SOFTMAX), "one rank routes a whole sequence"),
        ("load_by_rank", RING | dict(model={**SOFTMAX, "aux_loss": 0.0}), "no loss balances"),
        ("capacity_by_rank", RING | dict(model=DEEPSEEK), "nothing is dropped"),
    ],
)
def test_a_fault_that_cannot_be_is_refused(fault: str, options: dict[str, Any], says: str) -> None:
    assert_refused(fault, layout_job(**options), 2, says)
