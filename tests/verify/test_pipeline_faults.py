"""Each fault of the pipeline is caught, and the guilty axis is found by measurement."""

from __future__ import annotations

from typing import Any

import pytest
from tests.verify.layouts import compared, layout_job
from tests.verify.several import assert_named, assert_refused

from heptad.verify.localise import present, without
from heptad.verify.pipeline_faults import PIPELINE
from heptad.verify.run import Verdict, examine, job_line
from heptad.verify.shrink import Shrunk

TWO: dict[str, Any] = dict(pp=2, schedule="1f1b", prefetch=0)
TWINS: dict[str, Any] = dict(pp=2, schedule="dualpipe", prefetch=0)
CASES: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "tied table": ("tied_not_summed", dict(layout=TWO, tied=True), "pp", "embed.tokens"),
    "tied table, split backward": (
        "tied_not_summed",
        dict(layout=TWO | dict(schedule="zbh1"), tied=True),
        "pp",
        "embed.tokens",
    ),
    "twins": ("twin_not_summed", dict(layout=TWINS, accumulation=4), "pp", "."),
    "tied copies in the norm": ("copies_counted", dict(layout=TWO, tied=True), "pp", "gradient norm"),
    "twins in the norm": ("copies_counted", dict(layout=TWINS, accumulation=4), "pp", "gradient norm"),
    "labels of another micro-batch": ("swapped_microbatches", dict(layout=TWO), "pp", "head"),
    "labels of another, twins": ("swapped_microbatches", dict(layout=TWINS, accumulation=4), "pp", "head"),
    "old activations": ("stale_activation", dict(layout=TWO, model=dict(layers=2)), "pp", "blocks.1"),
    "old activations, V": (
        "stale_activation",
        dict(layout=TWO | dict(schedule="zbv"), model=dict(layers=4)),
        "pp",
        "blocks.1",
    ),
    "a lost gradient": ("dropped_grad", dict(layout=TWO), "pp", "blocks.0"),
    "a lost gradient, interleaved": (
        "dropped_grad",
        dict(layout=TWO | dict(schedule="interleaved", vpp=2), model=dict(layers=4)),
        "pp",
        "blocks.2",
    ),
}
"""Fault, job, guilty axis, how the first differing module's name begins or what it holds."""


def job_of(case: str, **options: Any) -> Any:
    return layout_job(**(dict(ranks=1, zero=0, accumulation=2) | CASES[case][1] | options))


def examined(case: str, **options: Any) -> Verdict:
    return examine(Shrunk(job_of(case, **options), ()), 1, (CASES[case][0],))


def test_every_kind_has_a_case() -> None:
    assert {fault for fault, *_ in CASES.values()} == set(PIPELINE)


@pytest.mark.parametrize("case", CASES)
def test_a_fault_is_caught_and_its_axis_named(case: str) -> None:
    verdict = examined(case)
    _, _, axis, module = CASES[case]
    assert_named(verdict, axis, module)


@pytest.mark.slow
@pytest.mark.parametrize("params", ["fp32", "bf16"])
@pytest.mark.parametrize("case", CASES)
def test_a_fault_is_caught_in_every_precision(case: str, params: str) -> None:
    assert compared(job_of(case, params=params), inject=(CASES[case][0],)).differences


@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("case", CASES)
def test_a_fault_is_named_beside_the_other_axes(case: str, zero: int) -> None:
    layout = CASES[case][1]["layout"] | dict(tp=2 if zero % 2 else 1)
    verdict = examined(case, zero=zero, ranks=2, layout=layout)
    assert verdict.blame is not None and verdict.blame.axis == CASES[case][2]


@pytest.mark.parametrize(
    ("fault", "options", "says"),
    [
        *((fault, {}, "there is no pipeline (layout.pp = 1)") for fault in PIPELINE),
        ("tied_not_summed", dict(layout=TWO), "no table is on two ranks because it is tied"),
        (
            "tied_not_summed",
            dict(layout=TWO | dict(schedule="zbv"), tied=True, model=dict(layers=4)),
            "no table is on two ranks because it is tied",
        ),
        ("tied_not_summed", dict(layout=TWO, tied=True, model=dict(tied=True, frozen=("embed.*",))), "is frozen"),
        ("twin_not_summed", dict(layout=TWO, tied=True), "each stage is on one rank"),
        ("copies_counted", dict(layout=TWO), "every parameter is on one rank"),
        ("swapped_microbatches", dict(layout=TWO, accumulation=1), "one micro-batch a step"),
        ("stale_activation", dict(layout=TWO, accumulation=1), "one micro-batch a step"),
        ("dropped_grad", dict(layout=TWO, model=dict(frozen=("embed.*", "blocks.0.*"))), "nothing is trained below"),
        ("twin_not_sumed", {}, "did you mean 'twin_not_summed'"),
    ],
)
def test_a_fault_that_cannot_be_is_refused(fault: str, options: dict[str, Any], says: str) -> None:
    assert_refused(fault, layout_job(**(dict(ranks=1) | options)), 1, says)


@pytest.mark.parametrize(
    ("fault", "options", "axis"),
    [
        ("missing_reduction", dict(layout=TWO, ranks=2), "dp_shard"),
        ("norm_local", dict(layout=TWO, ranks=2, zero=3), "dp_shard"),
        ("dropped_microbatch", dict(layout=TWINS, accumulation=4), "accumulation"),
        ("norm_counts_replicas", dict(layout=TWO | dict(tp=2)), "tp"),
    ],
)
def test_faults_of_other_axes_are_named_beside_a_pipeline(fault: str, options: dict[str, Any], axis: str) -> None:
    job = layout_job(**(dict(ranks=1, zero=0) | options))
    verdict = examine(Shrunk(job, ()), 1, (fault,))
    assert verdict.blame is not None and verdict.blame.axis == axis


def test_without_the_pipeline_goes_what_lives_on_it() -> None:
    layout = dict(pp=2, schedule="interleaved", vpp=2, layers_per_stage=(1, 1, 1, 2))
    job = layout_job(ranks=1, model=dict(layers=5), layout=layout)
    assert present(job)[:2] == ["pp", "schedule"]
    one = without(job, ["pp"]).layout
    assert (one.pp, one.vpp, one.schedule, one.layers_per_stage) == (1, None, "1f1b", ())
    plain = without(job, ["schedule"]).layout
    assert (plain.pp, plain.vpp, plain.schedule, plain.layers_per_stage) == (2, 2, "gpipe", (1, 1, 1, 2))
    assert without(job, ["pp", "schedule"]).layout == one
    assert "pp 2 (interleaved, vpp 2)" in job_line(job)


def test_a_schedule_that_needs_several_micro_batches_becomes_gpipe_without_accumulation() -> None:
    job = layout_job(ranks=1, accumulation=4, model=dict(layers=4), layout=dict(pp=2, schedule="dualpipev"))
    other = without(job, ["accumulation"])
    assert (other.layout.schedule, other.layout.vpp, other.train.micro_batch) == ("gpipe", 2, 4)
    kept = without(layout_job(ranks=1, accumulation=4, layout=dict(pp=2, schedule="1f1b")), ["accumulation"])
    assert (kept.layout.schedule, kept.train.micro_batch) == ("1f1b", 4)
