"""Each planted fault is caught in every precision, and the guilty axis is found by measurement."""

from __future__ import annotations

from typing import Any

import pytest
from tests.verify.layouts import compared, layout_job

from heptad.errors import ConfigError
from heptad.launch.forked import forked
from heptad.loader.synthetic import synthetic
from heptad.verify.compare import compare
from heptad.verify.context_faults import CONTEXT
from heptad.verify.expert_faults import EXPERT
from heptad.verify.faults import KINDS, names, parse
from heptad.verify.localise import NOBODY, without
from heptad.verify.pipeline_faults import PIPELINE
from heptad.verify.ranks import RankReport, _rank
from heptad.verify.reference import Reference
from heptad.verify.run import Verdict, examine
from heptad.verify.shrink import Shrunk
from heptad.verify.tensor_faults import TENSOR

GUILTY = {
    "rank_scale": "dp_shard",
    "missing_reduction": "dp_shard",
    "wrong_denominator": "dp_shard",
    "dropped_microbatch": "accumulation",
    "replica_not_summed": "dp_replicate",
    "stale_gather": "dp_shard",
    "norm_local": "dp_shard",
    "param:random": "dp_shard",
}
PRECISIONS = ("fp64", "fp32", "bf16")


def layout_for(fault: str) -> dict[str, Any]:
    """Two ranks, in the layout in which the fault can exist."""
    return {"ranks": 2, "hsdp": fault == "replica_not_summed", "layout": {"prefetch": 0}}


def examined(fault: str, steps: int = 2, **layout: Any) -> Verdict:
    return examine(Shrunk(layout_job(**layout), ()), steps, (fault,))


def test_the_list_is_complete() -> None:
    assert names() == [*GUILTY, *TENSOR, *PIPELINE, *CONTEXT, *EXPERT] and len(names()) == len(KINDS)


@pytest.mark.parametrize("fault", GUILTY)
def test_a_fault_is_caught_and_its_axis_named(fault: str) -> None:
    verdict = examined(fault, **layout_for(fault))
    assert not verdict.ok and verdict.blame is not None and verdict.module is not None
    assert verdict.blame.axis == GUILTY[fault]


@pytest.mark.parametrize("params", [pytest.param("fp32", marks=pytest.mark.slow), "bf16"])
@pytest.mark.parametrize("fault", GUILTY)
def test_a_fault_is_caught_in_every_precision(fault: str, params: str) -> None:
    assert compared(layout_job(params=params, **layout_for(fault)), inject=(fault,)).differences


@pytest.mark.slow
@pytest.mark.parametrize("params", PRECISIONS)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("fault", GUILTY)
def test_a_fault_is_named_in_every_stage_and_precision_with_replicas(fault: str, zero: int, params: str) -> None:
    layout: dict[str, Any] = dict(zero=zero, ranks=4, hsdp=True, params=params)
    if zero == 0 and fault in ("replica_not_summed", "stale_gather", "norm_local"):
        with pytest.raises(ConfigError, match="cannot exist"):
            examined(fault, **layout)
        return
    verdict = examined(fault, **layout)
    both = zero == 0 and fault == "missing_reduction"  # stage 0 reduces over both at once
    assert verdict.blame is not None
    assert verdict.blame.axis == ("dp_replicate+dp_shard" if both else GUILTY[fault])


def test_two_faults_at_once_need_two_axes() -> None:
    verdict = examined("dropped_microbatch+rank_scale", layout={"prefetch": 0})
    assert verdict.blame is not None and verdict.blame.axis == "dp_shard+accumulation"


def test_two_faults_on_one_axis_are_healed_by_it() -> None:
    verdict = examined("param:blocks.0.mlp.up.weight+norm_local", accumulation=1, layout={"prefetch": 0})
    assert verdict.blame is not None and verdict.blame.axis == "dp_shard"
    assert verdict.module == "blocks.0.mlp.up"


@pytest.mark.parametrize("seed", [0, 5])
def test_a_parameter_chosen_at_random_is_the_module_named(seed: int) -> None:
    job = layout_job(seed=seed)
    (fault,) = parse(("param:random",), job, 2)
    verdict = examine(Shrunk(job, ()), 2, ("param:random",), localise=False)
    assert verdict.module == fault.param.rpartition(".")[0]
    assert verdict.comparison is not None and verdict.comparison.worst[0] == fault.param


def test_random_means_other_parameters_for_other_seeds() -> None:
    aims = {parse(("param:random",), layout_job(seed=seed), 2)[0].param for seed in range(20)}
    assert len(aims) > 8


def test_a_fault_of_the_model_is_no_axis(monkeypatch: pytest.MonkeyPatch) -> None:
    from heptad.models.parallel import RowLinear

    right = RowLinear.write_weight_grads

    def wrong(self: RowLinear, saved: Any, dys: Any, sink: Any) -> None:
        right(self, saved, (dys[0] * (1.5 if self.role == "down" else 1.0),), sink)

    monkeypatch.setattr(RowLinear, "write_weight_grads", wrong)  # forked ranks inherit it; the reference has no taps
    verdict = examine(Shrunk(layout_job(), ()), 1)
    assert verdict.blame is not None and verdict.blame.axis == NOBODY
    assert verdict.module == "blocks.1.mlp.down"


@pytest.mark.parametrize(
    ("fault", "layout", "says"),
    [
        ("rank_scael", {}, "did you mean 'rank_scale'"),
        ("param:blocks.0.mlp.upp.weight", {}, "did you mean 'blocks.0.mlp.up.weight'"),
        ("param", {}, "did you mean 'param:random'"),
        ("rank_scale:x", {}, "did you mean 'rank_scale'"),
        ("rank_scale", {"ranks": 1}, "there is one data rank"),
        ("replica_not_summed", {}, "no replicas"),
        ("stale_gather", {"zero": 0}, "stage 0 cuts nothing"),
        ("dropped_microbatch", {"accumulation": 1}, "one micro-batch"),
        ("missing_reduction", {"layout": {"engine": "fsdp2"}}, "inside torch"),
    ],
)
def test_a_fault_that_cannot_be_is_refused(fault: str, layout: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse((fault,), layout_job(**layout), 2)
    assert says in str(error.value)


def test_a_stale_gather_needs_a_second_step() -> None:
    with pytest.raises(ConfigError, match="second step"):
        parse(("stale_gather",), layout_job(), 1)


def test_without_keeps_the_global_batch() -> None:
    job = layout_job(ranks=8, hsdp=True, accumulation=3)
    for axes in (["dp_shard"], ["dp_replicate", "accumulation"], ["dp_replicate", "dp_shard", "accumulation", "zero"]):
        other = without(job, axes)
        assert other.train.global_batch == job.train.global_batch
        ranks = other.layout.dp_replicate * other.layout.dp_shard
        microbatches = other.train.global_batch // (ranks * other.train.micro_batch)
        assert (microbatches == 1) == ("accumulation" in axes)


def _several(rank: int, jobs: list[Any], steps: int) -> list[RankReport]:
    return [_rank(rank, job, synthetic(job), steps, (), False) for job in jobs]


@pytest.mark.slow
@pytest.mark.parametrize("params", PRECISIONS)
@pytest.mark.parametrize("start", range(0, 200, 25))
def test_200_clean_runs_raise_no_false_alarm(start: int, params: str) -> None:
    stages = (0, 1, 2, 3)
    jobs = [
        layout_job(zero=stages[seed % 4], tied=bool(seed % 3), params=params, seed=seed)
        for seed in range(start, start + 25)
    ]
    ranks = forked(2, _several, jobs, 2, timeout_s=600)
    for at, job in enumerate(jobs):
        found = compare(job, Reference(job, synthetic(job)), [reports[at] for reports in ranks], 2)
        assert found.ok, (job.train.seed, found.differences[:3])
