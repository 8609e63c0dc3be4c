"""The data engine with two families of parameters: experts on other ranks than dense ones, as one device."""

from __future__ import annotations

from typing import Any

import pytest
from tests.verify.layouts import layout_job
from tests.verify.several import assert_jobs_right, by_ranks
from tests.verify.test_moe_layouts import CUT, DEEPSEEK, FOUR, FURTHER, MUON, SOFTMAX, cut, piped

from heptad.config.check import problems

SEVEN = {**SOFTMAX, "experts": 7}
SGD = dict(name="sgd", lr=0.1, clip_norm=None, schedule="constant")
CLIPPED = dict(name="sgd", lr=0.1, momentum=0.9, clip_norm=0.05)
ODD = dict(tp=2, cp=2, order="tp-cp-dp_replicate-dp_shard-pp")

JOBS: dict[str, dict[str, Any]] = {
    "c-041: ep 2 x dp 2, stage 0": {**cut(SOFTMAX, 4, zero=0, ep=2), "optimizer": SGD},
    "c-041: ep 2 x dp 2, stage 3": {**cut(DEEPSEEK, 4, zero=3, ep=2), "optimizer": SGD},
    "c-041: ep is the world": {**cut(SEVEN, 4, zero=3, ep=4), "optimizer": SGD},
    "c-041: ep is the world of two": {**cut(DEEPSEEK, 2, zero=1, ep=2), "optimizer": SGD},
    "c-041: etp is the world": {**cut(SEVEN, 4, zero=2, etp=4), "optimizer": SGD},
    "c-014: clipped, stage 0": {**cut(DEEPSEEK, 4, zero=0, ep=2), "optimizer": CLIPPED},
    "c-014: clipped, both cut": {**cut(SOFTMAX, 2, tp=2, ep=2, etp=2, zero=1), "optimizer": CLIPPED},
    "c-014: the same ranks in another order": {**cut(FURTHER, 1, zero=1, ep=2, etp=2, **ODD), "optimizer": CLIPPED},
    "c-014: other ranks, as many": {**cut(FURTHER, 1, zero=0, ep=2, **ODD), "optimizer": CLIPPED},
    "hsdp": cut(FURTHER, 4, dp_replicate=2, dp_shard=2, zero=2, ep=2),
    "hsdp, edp left": cut(DEEPSEEK, 8, dp_replicate=2, dp_shard=4, zero=3, etp=2),
    "micro-batches reduced": cut(SEVEN, 4, zero=3, ep=2, etp=2, reduce_grads="microbatch", prefetch=2),
    "shared buckets": cut(FURTHER, 4, zero=2, ep=2, bucket_mb=0.02),
    "frozen experts": cut({**DEEPSEEK, "frozen": ("*.experts.*",)}, 4, zero=3, ep=2),
    "only experts train": cut({**SEVEN, "frozen": ("embed.*", "head.*", "*.attention.*", "*norm*")}, 4, zero=1, etp=2),
    "recomputed": {**cut(DEEPSEEK, 2, zero=3, ep=2), "recompute": dict(mode="full")},
    "offload": {**cut(SOFTMAX, 2, zero=1, etp=2), "offload": dict(activations="cpu")},
    "muon": {**cut(DEEPSEEK, 4, zero=3, ep=2, etp=2), "optimizer": MUON},
    "muon, whole experts": {**cut(SEVEN, 2, zero=0, ep=2), "optimizer": MUON},
    "muon, cut by shards": {**cut(SEVEN, 4, zero=3, ep=2), "optimizer": MUON},
    "muon, rows": {**cut(FURTHER, 4, zero=1, etp=2), "optimizer": MUON},
    "muon, hsdp": {**cut(FURTHER, 4, dp_replicate=2, dp_shard=2, zero=2, ep=2), "optimizer": MUON},
    "muon, over tensor and context ranks": {**cut(SEVEN, 1, zero=2, ep=2, etp=2, **ODD), "optimizer": MUON},
    "muon, all three": {**cut(DEEPSEEK, 8, zero=3, ep=2, etp=2), "optimizer": MUON},
    "muon, dualpipe": {**piped("dualpipe", FURTHER, 2, ep=2), "optimizer": MUON},
    "muon, pipedream": {**piped("pipedream", DEEPSEEK, 2, etp=2), "optimizer": {**MUON, "clip_norm": None}},
    "fp32": {**cut(DEEPSEEK, 4, zero=2, ep=2), "params": "fp32"},
    "bf16": {**cut(SEVEN, 2, zero=3, ep=2), "params": "bf16"},
    "tp inside, ep outside": cut(DEEPSEEK, 2, **CUT, ep=2, zero=3),
    "an odd order": cut(SEVEN, 2, **ODD, dp_shard=2, ep=2, etp=2, zero=3),
    "1f1b": piped("1f1b", FURTHER, 2, ep=2),
    "dualpipe": piped("dualpipe", FURTHER, 2, etp=2),
    "zbv": {**piped("zbv", FOUR, 4, ep=2), "zero": 3},
    "interleaved": {**piped("interleaved", FOUR, 2, ep=2), "zero": 2},
    "pipedream": {**piped("pipedream", DEEPSEEK, 2, ep=2), "optimizer": dict(clip_norm=None)},
}


def test_every_job_is_a_legal_one() -> None:
    assert not [(name, found) for name, item in JOBS.items() for found in problems(layout_job(**item))]


def also_fast(name: str) -> bool:
    """Of the others every pair of options is in the cover of all axes too."""
    return name.startswith("c-0") or name in ("fp32", "bf16", "muon", "pipedream")


@pytest.mark.parametrize("names", by_ranks(JOBS, also_fast))
def test_layouts(names: list[str]) -> None:
    assert_jobs_right(names, JOBS)
