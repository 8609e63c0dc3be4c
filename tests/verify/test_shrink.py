from __future__ import annotations

import pytest

from heptad.axes.data.buckets import plan_buckets
from heptad.cli.job import ready
from heptad.config.schema import Job
from heptad.models.spec import param_specs, unit_specs
from heptad.verify.shrink import shrink


def buckets_of(job: Job, reduce_bytes: int) -> int:
    return len(plan_buckets(unit_specs(job.model), param_specs(job.model), 1, job.layout.bucket_mb, reduce_bytes))


@pytest.mark.parametrize("preset", ["debug", "default", "llama3-405b", "gpt2-small", "qwen3-8b", "debug-tiny"])
def test_structure_is_kept_and_sizes_are_small(preset: str) -> None:
    if preset in ("debug", "default"):
        job = ready(preset, [])
    else:
        job = ready("debug", [f"model.preset={preset}", "layout.dp_shard=4", "layout.dp_replicate=2"])
    shrunk = shrink(job, steps=3)
    small, model = shrunk.job, shrunk.job.model
    assert sum(spec.numel for spec in param_specs(model)) < 30_000
    assert 2 <= model.layers <= 3 and model.heads // model.kv_heads == job.model.heads // job.model.kv_heads
    assert model.head_dim % 2 == 0
    for name in ("norm", "mlp", "activation", "positions", "qk_norm", "qkv_bias", "mlp_bias", "tied", "dropout"):
        assert getattr(model, name) == getattr(job.model, name), name
    kept = {"bucket_mb": small.layout.bucket_mb}
    assert small.layout == job.layout.model_copy(update=kept)
    ranks = job.layout.dp_replicate * job.layout.dp_shard
    before, after = (item.train.global_batch // (ranks * item.train.micro_batch) for item in (job, small))
    assert after == min(before, 3) and small.train.global_batch % (ranks * small.train.micro_batch) == 0
    assert (buckets_of(small, 8) > 1) == (buckets_of(job, 4) > 1)
    assert all(prime(size) for size in (model.width, model.vocab, small.data.seq_len))
    assert shrink(small, steps=3).job.model == model  # shrinking again changes no size
    assert "->" in "\n".join(shrunk.notes)


def prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, number))


def test_full_keeps_sizes_and_sets_the_precision() -> None:
    job = ready("debug", ["layout.dp_shard=2"])
    full = shrink(job, 3, full=True).job
    assert full == job.model_copy(update={"precision": full.precision}) and full.precision.params == "fp64"


def test_frozen_names_follow_the_blocks() -> None:
    job = ready("debug", ['model.frozen=["blocks.7.mlp.*", "embed.*"]'])
    small = shrink(job, 3).job
    assert small.model.frozen == ("blocks.1.mlp.*", "embed.*")
    assert sum(not spec.trainable for spec in param_specs(small.model)) == 5


def test_a_class_of_ones_own_keeps_its_sizes() -> None:
    job = ready("debug", ["model.class=examples.custom_model:TokenShift"])
    small = shrink(job, 3)
    assert small.job.model == job.model and any("keeps its sizes" in note for note in small.notes)
