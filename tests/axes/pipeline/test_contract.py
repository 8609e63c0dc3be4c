"""The axis contract of the pipeline axis: loss, every gradient, norm, parameters after SGD, traffic of every rank."""

from __future__ import annotations

from typing import Any

import pytest
from tests.axes.data.test_contract import assert_equal_to_one_device
from tests.tiny import GPT, tiny_job

from heptad.config.schema import Job

TIED: dict[str, Any] = dict(tied=True)
DROPPED: dict[str, Any] = GPT | dict(dropout=0.1, attention_dropout=0.1)
SIX: dict[str, Any] = dict(layers=6)
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "naive": ({}, dict(pp=2, schedule="naive", zero=0, global_batch=2)),
    "naive, 2 chunks": (dict(layers=4), dict(pp=2, vpp=2, schedule="naive", zero=3, global_batch=3)),
    "gpipe of 3, stage 3 without data ranks": (TIED, dict(pp=3, schedule="gpipe", zero=3, global_batch=6)),
    "gpipe, 2 chunks": (TIED | dict(layers=4), dict(pp=2, vpp=2, schedule="gpipe", zero=2, dp_shard=2, global_batch=8)),
    "1f1b, odd M": (TIED, dict(pp=2, schedule="1f1b", zero=0, dp_replicate=2, global_batch=10)),
    "1f1b of 4, stage 1": (SIX, dict(pp=4, schedule="1f1b", zero=1, dp_shard=2, global_batch=8)),
    "1f1b x hsdp": (TIED, dict(pp=2, schedule="1f1b", zero=3, dp_shard=2, dp_replicate=2, global_batch=8)),
    "1f1b x tp, cut stream": (DROPPED, dict(pp=2, tp=2, sequence_parallel=True, zero=1, dp_shard=2, global_batch=4)),
    "1f1b x tp, pipeline innermost": (
        TIED,
        dict(pp=2, tp=2, zero=2, dp_shard=2, global_batch=4, order="dp_replicate-dp_shard-cp-tp-pp"),
    ),
    "interleaved, odd M": (TIED | SIX, dict(pp=2, vpp=3, schedule="interleaved", zero=3, dp_shard=2, global_batch=10)),
    "interleaved x tp": (DROPPED | SIX, dict(pp=3, schedule="interleaved", tp=2, zero=2, global_batch=3)),
    "zbh1": (TIED, dict(pp=3, schedule="zbh1", zero=3, dp_shard=2, global_batch=12)),
    "zbh1, 2 chunks": (SIX, dict(pp=2, vpp=2, schedule="zbh1", zero=2, dp_shard=2, global_batch=6)),
    "zbv": (TIED | SIX, dict(pp=2, schedule="zbv", zero=3, dp_shard=2, global_batch=10)),
    "zbv, reduced each time": (TIED | SIX, dict(pp=2, schedule="zbv", zero=3, dp_shard=2, reduce_grads="microbatch")),
    "gpipe, one block a stage, reduced each time": (
        dict(layers=2), dict(pp=2, schedule="gpipe", zero=2, dp_shard=2, reduce_grads="microbatch"),
    ),
    "zbv of 3 x tp": (TIED | SIX, dict(pp=3, schedule="zbv", zero=0, tp=2, global_batch=3)),
    "dualpipe": (TIED, dict(pp=2, schedule="dualpipe", zero=3, dp_shard=2, global_batch=8)),
    "dualpipe of 4": (DROPPED | SIX, dict(pp=4, schedule="dualpipe", zero=1, dp_shard=2, global_batch=16)),
    "dualpipe x tp, cut stream": (TIED, dict(pp=2, schedule="dualpipe", tp=2, sequence_parallel=True, zero=2)),
    "dualpipev": (TIED | SIX, dict(pp=2, schedule="dualpipev", zero=2, dp_shard=2, global_batch=10)),
    "dualpipev of 3": (SIX, dict(pp=3, schedule="dualpipev", zero=0, global_batch=6)),
    "explicit stages": (SIX, dict(pp=2, zero=3, dp_shard=2, layers_per_stage=(5, 1))),
    "shared buckets, two ahead": (TIED | SIX, dict(pp=2, zero=3, dp_shard=2, bucket_mb=0.01, prefetch=2)),
    "frozen embedding": (dict(frozen=("embed.*",)), dict(pp=2, zero=3, dp_shard=2)),
    "frozen first stage": (
        SIX | dict(frozen=("embed.*", "blocks.[0-2].*")),
        dict(pp=3, schedule="zbh1", zero=2, dp_shard=2),
    ),
    "frozen into the second stage": (
        SIX | dict(frozen=("embed.*", "blocks.[0-2].*")),
        dict(pp=3, tp=2, sequence_parallel=True, zero=1, schedule="1f1b"),
    ),
    "frozen but one chunk": (SIX | dict(frozen=("head.*", "embed.*", "blocks.[1-5].*")), dict(pp=2, schedule="zbv")),
}  # fmt: skip


def job_of(name: str, **sections: Any) -> Job:
    model, layout = LAYOUTS[name]
    job = tiny_job(model, **layout)
    for section, options in sections.items():
        job = job.model_copy(update={section: getattr(job, section).model_copy(update=options)})
    return job


def num_ranks(job: Job) -> int:
    layout = job.layout
    return layout.pp * layout.tp * layout.dp_shard * layout.dp_replicate


def assert_contract(job: Job) -> None:
    for rank in assert_equal_to_one_device(job, num_ranks(job)):
        assert rank[-1]["predicted"] == rank[-1]["counted"]


@pytest.mark.parametrize("name", LAYOUTS)
def test_equals_one_device_and_sends_what_it_predicts(name: str) -> None:
    assert_contract(job_of(name))


RECOMPUTED: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("zbh1", dict(recompute=dict(mode="full"))),
    "full, tensor": ("1f1b x tp, cut stream", dict(recompute=dict(mode="full"))),
    "segments cut by stages": ("zbv", dict(recompute=dict(mode="full", segment=4))),
    "segments in pairs": ("dualpipe of 4", dict(recompute=dict(mode="full", segment="sqrt"))),
    "selective": ("interleaved x tp", dict(recompute=dict(mode="selective"))),
    "selective, split backward": ("dualpipev", dict(recompute=dict(mode="selective"))),
    "some blocks": ("1f1b of 4, stage 1", dict(recompute=dict(mode="full", layers=(1, 2, 5)))),
    "frozen below": ("frozen first stage", dict(recompute=dict(mode="full", layers=(3, 4)))),
    "offload": ("gpipe, 2 chunks", dict(offload=dict(activations="cpu"))),
    "offload, nothing moves on the last rank": ("explicit stages", dict(offload=dict(activations="cpu"))),
    "offload, recompute": (
        "zbh1, 2 chunks",
        dict(offload=dict(activations="cpu"), recompute=dict(mode="full", segment=2)),
    ),
}


@pytest.mark.parametrize("name", RECOMPUTED)
def test_recompute_and_offload_under_a_pipeline(name: str) -> None:
    layout, sections = RECOMPUTED[name]
    assert_contract(job_of(layout, **sections))
