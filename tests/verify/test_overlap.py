"""Overlapped pairs with experts on other ranks: as one device, and every byte in the phase of its own side."""

from __future__ import annotations

from typing import Any

import pytest
from tests.verify.layouts import layout_job
from tests.verify.several import assert_all_right, by_ranks
from tests.verify.test_moe_layouts import DEEPSEEK, FURTHER, SOFTMAX, piped

from heptad.axes.program import stages_of
from heptad.config.check import problems
from heptad.loader.synthetic import synthetic
from heptad.models.spec import unit_specs
from heptad.schedule.action import UnitUse
from heptad.schedule.expand import expand

PLAIN = {**SOFTMAX, "layers": 4, "dense_layers": 0}
LATENT = {**DEEPSEEK, "layers": 4, "dense_layers": 0, "capacity_factor": 0.7}
JOBS: dict[str, dict[str, Any]] = {
    "dualpipe, recomputed, stage 3": {**piped("dualpipe", LATENT, 2, ep=2), "zero": 3, "recompute": dict(mode="full")},
    "dualpipev, dense first, predictions": piped("dualpipev", {**FURTHER, "layers": 5}, 2, ep=2),
    "two levels": piped("dualpipe", {**PLAIN, "experts": 7}, 4, ep=4, ep_inner=2),
}
MORE: dict[str, dict[str, Any]] = {
    "segments": {**piped("dualpipe", LATENT, 2, ep=2), "recompute": dict(mode="full", segment=2)},
    "in part": {**piped("dualpipev", PLAIN, 2, ep=2), "recompute": dict(mode="selective")},
    "offload": {**piped("dualpipev", PLAIN, 2, ep=2), "offload": dict(activations="cpu")},
    "tensor ranks, cut": {**piped("dualpipe", LATENT, 1, tp=2, sequence_parallel=True, ep=2), "zero": 2},
    "context ranks": piped("dualpipev", LATENT, 1, cp=2, ep=2),
    "expert tensor ranks": piped("dualpipe", LATENT, 4, ep=2, etp=2),
    "stage 3, shared buckets": {**piped("dualpipev", LATENT, 4, ep=2, bucket_mb=0.02), "zero": 3},
}


def _right(names: list[str]) -> None:
    jobs = [layout_job(**{**JOBS, **MORE}[name]) for name in names]
    assert not [found for job in jobs for found in problems(job)]
    for job in jobs:
        units = unit_specs(job.model)
        stages = stages_of(job, units)
        assert stages is not None
        uses = tuple(UnitUse(unit.name, (), (), ()) for unit in units)
        assert all(any(len(step) > 1 for step in expand(stages, place, uses).steps) for place in range(2))
    assert_all_right([(job, synthetic(job)) for job in jobs])


@pytest.mark.parametrize("names", by_ranks({**JOBS, **MORE}, lambda name: name in JOBS))
def test_pairs(names: list[str]) -> None:
    _right(names)
