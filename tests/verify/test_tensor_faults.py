"""Each planted fault of the tensor axis and of recompute is caught, and the guilty axis is found by measurement."""

from __future__ import annotations

from typing import Any

import pytest
from tests.verify.layouts import GPT, compared, layout_job
from tests.verify.several import assert_named, assert_refused, first_of_each

from heptad.errors import ConfigError
from heptad.verify.faults import parse
from heptad.verify.localise import without
from heptad.verify.run import Verdict, examine
from heptad.verify.shrink import Shrunk
from heptad.verify.tensor_faults import TENSOR

WHOLE: dict[str, Any] = dict(tp=2, prefetch=0)
CUT = WHOLE | dict(sequence_parallel=True)
BIASED = GPT | dict(attention_bias=True)
CASES: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "norm_not_summed": ("norm_not_summed", dict(layout=CUT), "sequence_parallel", "norm"),
    "norm_not_summed-kept": (
        "norm_not_summed",
        dict(layout=CUT | dict(keep_gathered=True), model=GPT),
        "sequence_parallel",
        "norm",
    ),
    "norm_not_summed-heads": ("norm_not_summed", dict(layout=WHOLE, model=dict(qk_norm=True)), "tp", "_norm"),
    "bias_repeated": ("bias_repeated", dict(layout=CUT, model=BIASED), "tp", "blocks."),
    "bias_repeated-whole": ("bias_repeated", dict(layout=WHOLE, model=BIASED), "tp", "blocks."),
    "kv_not_summed": ("kv_not_summed", dict(layout=WHOLE, model=dict(kv_heads=1)), "tp", "attention."),
    "padded_logit": ("padded_logit", dict(layout=WHOLE, model=dict(vocab=13)), "tp", "head"),
    "norm_counts_replicas": ("norm_counts_replicas", dict(layout=WHOLE), "tp", "gradient norm"),
    "shard_dropout": ("shard_dropout", dict(layout=CUT, model=dict(dropout=0.1)), "sequence_parallel", "embed"),
    "stale_dropout": (
        "stale_dropout",
        dict(layout=WHOLE, model=dict(dropout=0.1), recompute=dict(mode="full")),
        "recompute",
        "blocks.1.mlp.down",
    ),
    "stale_dropout-scores": (
        "stale_dropout",
        dict(model=dict(attention_dropout=0.1), recompute=dict(mode="full", segment=2)),
        "recompute",
        "blocks.1.",
    ),
    "stale_dropout-selective": (
        "stale_dropout",
        dict(layout=CUT, model=dict(attention_dropout=0.1), recompute=dict(mode="selective")),
        "recompute",
        "blocks.1.attention",
    ),
}
"""Fault, job, guilty axis, how the first differing module's name begins or what it holds."""


def job_of(case: str, **options: Any) -> Any:
    return layout_job(**(dict(ranks=1, accumulation=1) | CASES[case][1] | options))


def examined(case: str, **options: Any) -> Verdict:
    fault = CASES[case][0]
    return examine(Shrunk(job_of(case, **options), ()), 2 if TENSOR[fault].second else 1, (fault,))


def test_every_kind_has_a_case() -> None:
    assert {fault for fault, *_ in CASES.values()} == set(TENSOR)


@pytest.mark.parametrize("case", first_of_each(CASES))
def test_a_fault_is_caught_and_its_axis_named(case: str) -> None:
    verdict = examined(case)
    _, _, axis, module = CASES[case]
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
def test_a_fault_is_named_on_four_ranks_and_beside_the_data_axis(case: str, zero: int) -> None:
    layout = {**CASES[case][1].get("layout", WHOLE), "tp": 4 if zero % 2 else 2}
    verdict = examined(case, zero=zero, ranks=1 if zero % 2 else 2, accumulation=1, layout=layout)
    assert verdict.blame is not None and verdict.blame.axis == CASES[case][2]


@pytest.mark.parametrize(
    ("fault", "options", "says"),
    [
        ("norm_not_summed", {}, "one tensor rank (layout.tp = 1)"),
        ("norm_not_summed", dict(layout=WHOLE), "every norm sees all tokens and heads"),
        ("norm_not_summed", dict(layout=CUT, model=dict(frozen=("*norm*",))), "is frozen"),
        ("bias_repeated", dict(layout=WHOLE), "no row-parallel linear has a bias"),
        ("bias_repeated", dict(layout=WHOLE, model=dict(mlp_bias=True, frozen=("*.down.bias",))), "is frozen"),
        ("kv_not_summed", dict(layout=WHOLE), "no kv head is shared"),
        ("padded_logit", dict(layout=WHOLE, model=dict(vocab=30)), "layout.tp divides model.vocab"),
        ("norm_counts_replicas", {}, "one tensor rank"),
        ("shard_dropout", dict(layout=WHOLE, model=dict(dropout=0.1)), "no cut stream is dropped"),
        ("shard_dropout", dict(layout=CUT), "no cut stream is dropped"),
        ("stale_dropout", dict(model=dict(dropout=0.1)), "nothing is recomputed"),
        ("stale_dropout", dict(recompute=dict(mode="full")), "nothing is dropped"),
        ("stale_dropout", dict(model=dict(dropout=0.1), recompute=dict(mode="selective")), "no dropout again but"),
        ("norm_not_sumed", {}, "did you mean 'norm_not_summed'"),
    ],
)
def test_a_fault_that_cannot_be_is_refused(fault: str, options: dict[str, Any], says: str) -> None:
    assert_refused(fault, layout_job(**options), 2, says)


def test_a_bias_that_starts_at_zero_needs_a_second_step() -> None:
    with pytest.raises(ConfigError, match="second step"):
        parse(("bias_repeated",), layout_job(layout=WHOLE, model=BIASED), 1)


def test_without_the_tensor_axis_goes_what_lives_on_it() -> None:
    job = layout_job(
        layout=dict(tp=2, sequence_parallel=True, keep_gathered=True),
        model=dict(attention="flash"),
        offload=dict(activations="cpu"),
        train=dict(compile=True),
    )
    layout = without(job, ["tp"]).layout
    assert (layout.tp, layout.sequence_parallel, layout.keep_gathered) == (1, False, False)
    layout = without(job, ["sequence_parallel"]).layout
    assert (layout.tp, layout.sequence_parallel, layout.keep_gathered) == (2, False, False)
    layout = without(job, ["keep_gathered"]).layout
    assert (layout.tp, layout.sequence_parallel, layout.keep_gathered) == (2, True, False)
    other = without(job, ["attention", "offload", "compile"])
    assert (other.model.attention, other.offload.activations, other.train.compile) == ("math", "none", False)
    assert other.layout == job.layout
