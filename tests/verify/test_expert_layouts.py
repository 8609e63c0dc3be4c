"""The expert axis under the data axis, pipelines, recompute, tensor and context axes: as one device, and each rank's
traffic what follows from the routing."""

from __future__ import annotations

from typing import Any

import pytest
from tests.verify.layouts import layout_job
from tests.verify.several import assert_all_right
from tests.verify.test_moe_layouts import DEEPSEEK, FURTHER, SOFTMAX, piped

from heptad.loader.synthetic import synthetic

TWELVE = {**DEEPSEEK, "experts": 12, "shared_experts": 0}
SEVEN = {**SOFTMAX, "experts": 7, "experts_per_token": 3}
JOBS: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "ep": dict(zero=0, model=DEEPSEEK, layout=dict(ep=2)),
        "etp": dict(zero=1, model=FURTHER, layout=dict(etp=2)),
        "ep, recomputed": dict(zero=3, model=SEVEN, layout=dict(ep=2), recompute=dict(mode="full")),
        "etp over tensor ranks": dict(zero=0, ranks=1, model=SEVEN, layout=dict(tp=2, etp=2, sequence_parallel=True)),
        "ep over tensor ranks, whole stream": dict(zero=0, ranks=1, model=DEEPSEEK, layout=dict(tp=2, ep=2)),
        "ep over context ranks": dict(zero=2, ranks=1, model=FURTHER, layout=dict(cp=2, ep=2)),
        "frozen": dict(zero=1, model={**DEEPSEEK, "frozen": ("*.experts.*", "*.router.*")}, layout=dict(ep=2)),
        "frozen below": dict(zero=1, model={**SEVEN, "frozen": ("embed.*", "blocks.0.*", "*.attention.*", "*norm.*")},
                             layout=dict(ep=2), recompute=dict(mode="full")),
    },
    4: {
        "ep and edp": dict(zero=3, model=SEVEN, layout=dict(ep=2)),
        "ep 4": dict(zero=2, model=SEVEN, layout=dict(ep=4)),
        "ep and etp, recomputed": dict(zero=1, model=FURTHER, layout=dict(ep=2, etp=2), recompute=dict(mode="full")),
        "two levels": dict(zero=3, model=SEVEN, layout=dict(ep=4, ep_inner=2)),
        "two levels, recomputed": dict(zero=0, model=TWELVE, layout=dict(ep=4, ep_inner=2),
                                       recompute=dict(mode="full")),
        "hsdp": dict(zero=3, hsdp=True, model=DEEPSEEK, layout=dict(ep=2)),
        "zbh1": piped("zbh1", SEVEN, 2, ep=2),
        "dualpipe": piped("dualpipe", FURTHER, 2, ep=2),
        "pipedream": {**piped("pipedream", DEEPSEEK, 2, etp=2), "optimizer": dict(clip_norm=None)},
        "frozen, two levels": dict(zero=1, model={**TWELVE, "frozen": ("*.experts.*",)},
                                   layout=dict(ep=4, ep_inner=2)),
    },
}  # fmt: skip


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_layouts(world: int) -> None:
    jobs = [layout_job(**{"ranks": world, **described}) for described in JOBS[world].values()]
    assert_all_right([(job, synthetic(job)) for job in jobs])
