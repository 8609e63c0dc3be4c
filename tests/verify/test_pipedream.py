"""PipeDream under verify: every update of every stage against one device with weights as stale, on every layout.

In float64, within 1e-10: an update is the gradient of one micro-batch, here one of seven tokens."""

from __future__ import annotations

from typing import Any

import pytest
from tests.sweep import pairwise, sampled
from tests.verify.layouts import layout_job
from tests.verify.several import together
from tests.verify.test_pipeline_layouts import RECOMPUTE, microbatches, named, ranks_of

from heptad.axes.data.versions import Versions
from heptad.config.check import check
from heptad.config.schema import Job
from heptad.launch.forked import forked
from heptad.loader.synthetic import synthetic
from heptad.mesh.layout import Layout
from heptad.train.stale import StageUpdates
from heptad.verify.compare import Comparison, compare
from heptad.verify.ranks import RankReport, _rank
from heptad.verify.stale import reference_of

Item = dict[str, Any]
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "sgd": dict(name="sgd", momentum=0.9),
    "muon": dict(roles={"matrix": "muon"}, muon_lr=0.01),
}
FACTORS: dict[str, tuple[Any, ...]] = {
    "schedule": ("pipedream",),
    "pp": (2, 3, 4),
    "microbatches": ("P", "2P", "2P+1"),
    "zero": (0, 1),
    "tensor": ("1", "2", "2cut"),
    "data": (1, 2),
    "recompute": tuple(RECOMPUTE),
    "optimizer": tuple(OPTIMIZERS),
}


def valid(item: Item) -> bool:
    return ranks_of(item) <= 8


COVER = pairwise(FACTORS, valid, sampled(FACTORS, valid, 400, 3))


def job_of(item: Item) -> Job:
    job = layout_job(
        zero=item["zero"],
        ranks=item["data"],
        accumulation=microbatches(item),
        model=dict(layers=max(3, item["pp"]), qkv_bias=True, dropout=0.1),
        layout=dict(
            pp=item["pp"], schedule="pipedream", tp=int(item["tensor"][0]), sequence_parallel=item["tensor"] == "2cut"
        ),
        recompute=RECOMPUTE[item["recompute"]],
        optimizer=dict(clip_norm=None) | OPTIMIZERS[item["optimizer"]],
    )
    check(job)
    return job


def _several(rank: int, jobs: list[Job], steps: int, broken: str) -> list[RankReport]:
    if broken == "nothing kept":
        Versions.exchange = lambda self, microbatch: None  # type: ignore[method-assign]
    elif broken == "an update late":
        apply = StageUpdates.apply
        StageUpdates.apply = lambda self: apply(self) if self._num_updates or rank else None  # type: ignore[method-assign]
    return [_rank(rank, job, synthetic(job), steps, (), False) for job in jobs]


def compared(jobs: list[Job], broken: str = "") -> list[Comparison]:
    ranks = forked(Layout.of(jobs[0].layout).world, _several, jobs, 2, broken, timeout_s=300)
    found = []
    for at, job in enumerate(jobs):
        found.append(compare(job, reference_of(job, synthetic(job)), [reports[at] for reports in ranks], 2))
    return found


@pytest.mark.parametrize("items", together(COVER, ranks_of), ids=named)
def test_pairwise_cover(items: list[Item]) -> None:
    jobs = [job_of(item) for item in items]
    for job, found in zip(jobs, compared(jobs), strict=True):
        assert not found.differences, (job.layout, job.optimizer, found.differences[:5])
        assert found.traffic_matches, (job.layout, found.predicted, found.counted)


@pytest.mark.parametrize("broken", ["nothing kept", "an update late"])
def test_other_weights_are_found(broken: str) -> None:
    item = dict(pp=2, microbatches="2P", zero=0, tensor="1", data=1, recompute="none", optimizer="sgd")
    (found,) = compared([job_of(item)], broken)
    assert found.differences[0].error > 1e3 * found.differences[0].bound
