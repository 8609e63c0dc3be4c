from __future__ import annotations

import pytest

from heptad.axes.data.buckets import plan_buckets
from heptad.cli.job import ready
from heptad.config.check import problems
from heptad.config.recompute import blocks
from heptad.config.schema import Job
from heptad.config.sizes import holds_rows
from heptad.models.resolve import first_trained
from heptad.models.spec import param_specs, unit_specs
from heptad.recompute.policy import segments
from heptad.verify.shrink import shrink
from heptad.verify.stages import shrink_microbatches


def buckets_of(job: Job, reduce_bytes: int) -> int:
    return len(
        plan_buckets(unit_specs(job.model), param_specs(job.model), {"dense": 1}, job.layout.bucket_mb, reduce_bytes)
    )


@pytest.mark.parametrize("preset", ["debug", "default", "llama3-405b", "gpt2-small", "qwen3-8b", "debug-tiny"])
def test_structure_is_kept_and_sizes_are_small(preset: str) -> None:
    if preset in ("debug", "default"):
        job = ready(preset, [])
    else:
        job = ready("debug", [f"model.preset={preset}", "layout.dp_shard=4", "layout.dp_replicate=2"])
    shrunk = shrink(job, steps=3)
    small, model = shrunk.job, shrunk.job.model
    assert sum(spec.numel for spec in param_specs(model)) < 30_000
    assert model.kv_heads is not None and job.model.kv_heads is not None and model.head_dim is not None
    assert 2 <= model.layers <= 3 and model.heads // model.kv_heads == job.model.heads // job.model.kv_heads
    assert model.head_dim % 2 == 0
    for name in ("norm", "mlp", "activation", "positions", "qk_norm", "qkv_bias", "mlp_bias", "tied", "dropout"):
        assert getattr(model, name) == getattr(job.model, name), name
    kept = {"bucket_mb": small.layout.bucket_mb}
    assert small.layout == job.layout.model_copy(update=kept)
    ranks = job.layout.dp_replicate * job.layout.dp_shard
    before, after = (item.train.global_batch // (ranks * item.train.micro_batch) for item in (job, small))
    assert (
        after == (min(before, 3) if job.layout.pp == 1 else shrink_microbatches(job, before))
        and small.train.global_batch % (ranks * small.train.micro_batch) == 0
    )
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
    assert small.model.frozen == ("blocks.2.mlp.*", "embed.*")
    assert sum(not spec.trainable for spec in param_specs(small.model)) == 5


def test_a_class_of_ones_own_keeps_its_sizes() -> None:
    job = ready("debug", ["model.class=examples.custom_model:TokenShift"])
    small = shrink(job, 3)
    assert small.job.model == job.model and any("keeps its sizes" in note for note in small.notes)


HEADS = {
    "llama3-8b": (32, 8),
    "llama3-405b": (128, 8),
    "qwen3-8b": (32, 8),
    "gpt2-like": (16, 16),
    "gpt3-like": (96, 96),
    "one kv head": (24, 1),
    "two kv heads": (48, 2),
}


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("heads", sorted(HEADS))
def test_tensor_ranks_hold_heads_in_the_same_way(heads: str, tp: int) -> None:
    query, kv = HEADS[heads]
    preset = heads if heads in ("llama3-8b", "llama3-405b", "qwen3-8b") else "llama3-8b"
    sets = [f"model.preset={preset}", f"layout.tp={tp}", f"model.heads={query}", f"model.kv_heads={kv}"]
    if tp > 1:
        sets += ["layout.sequence_parallel=true", "layout.keep_gathered=true"]
    job = ready("debug", [*sets, "layout.dp_shard=2"])
    small = shrink(job, 3).job
    before, after = job.model, small.model
    assert problems(small) == []
    assert before.kv_heads is not None and after.kv_heads is not None
    assert after.heads // after.kv_heads == before.heads // before.kv_heads
    assert max(tp // after.kv_heads, 1) == max(tp // before.kv_heads, 1), "ranks that share a kv head"
    if before.heads // before.kv_heads <= 4 and before.kv_heads > tp:
        assert after.kv_heads == 2 * tp, "several kv heads a rank stay several"
    assert small.layout == job.layout.model_copy(update={"bucket_mb": small.layout.bucket_mb})
    sizes = (after.width, after.mlp_width, after.vocab, small.data.seq_len, after.max_positions)
    assert all(prime(size) and size > 2 for size in sizes) and len(set(sizes)) == 5
    assert holds_rows(after.mlp_width, tp) and holds_rows(after.vocab, tp) and small.data.seq_len >= tp
    assert max(sizes) < 40 and shrink(small, 3).job.model == after


@pytest.mark.parametrize("tp", [12, 16, 24, 32, 64])
def test_sizes_grow_with_more_tensor_ranks(tp: int) -> None:
    job = ready(
        "debug",
        ["model.preset=gpt3-175b", "model.heads=192", "model.kv_heads=192", "data.seq_len=512", f"layout.tp={tp}"],
    )
    small = shrink(job, 3).job
    model = small.model
    sizes = (model.width, model.mlp_width, model.vocab, small.data.seq_len, model.max_positions)
    assert problems(small) == [] and len(set(sizes)) == 5 and all(map(prime, sizes)) and small.data.seq_len >= tp


def test_a_model_that_is_smaller_keeps_its_sizes() -> None:
    sets = ["model.mlp_width=8", "model.vocab=16", "data.seq_len=5", "layout.tp=8", "model.layers=2"]
    job = ready("debug", sets)
    small = shrink(job, 3).job
    assert (small.model.mlp_width, small.model.vocab, small.data.seq_len, small.model.layers) == (8, 16, 5, 2)
    assert (small.model.heads, small.model.kv_heads) == (job.model.heads, job.model.kv_heads)


def test_options_of_the_step_are_kept() -> None:
    sets = ["offload.activations=cpu", "train.compile=true", "model.attention=math", "model.attention_dropout=0.1"]
    job = ready("debug", [*sets, "recompute.mode=selective", "recompute.layers=[0, 7]"])
    small = shrink(job, 3).job
    assert small.offload == job.offload and small.train.compile
    assert (small.model.attention, small.model.attention_dropout) == ("math", 0.1)
    assert (small.recompute.mode, small.recompute.layers) == ("selective", (0, 2))


def segments_of(job: Job) -> list[int]:
    """Number of blocks of each segment."""
    section, kinds = job.recompute, [unit.kind for unit in unit_specs(job.model)]
    return [len(units) for units in segments(section.mode, section.segment, section.layers, kinds)]


RECOMPUTED: dict[str, tuple[list[str], str, list[int]]] = {
    "all, one by one": ([], "1 []", [1, 1, 1]),
    "all, in segments": (["segment=3"], "2 []", [2, 1]),
    "all, in one segment": (["segment=16"], "3 []", [3]),
    "all, segments of Chen": (["segment=sqrt"], "sqrt []", [2, 1]),
    "all, named": (["segment=4", f"layers={list(range(16))}"], "2 [0, 1, 2]", [2, 1]),
    "the first": (["layers=[0]"], "1 [0]", [1]),
    "the last": (["layers=[15]"], "1 [2]", [1]),
    "all but the last": (["layers=[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14]"], "1 [0, 1]", [1, 1]),
    "every other": (["layers=[0, 2, 4, 6, 8, 10, 12, 14]"], "1 [1, 2]", [1, 1]),
    "the upper half, in segments": (["layers=[8, 9, 10, 11, 12, 13, 14, 15]", "segment=4"], "2 [1, 2, 3]", [2, 1]),
    "the lower half, in segments": (["layers=[0, 1, 2, 3, 4, 5, 6, 7]", "segment=sqrt"], "sqrt [0, 1, 3]", [2, 1]),
    "one segment at the start": (["layers=[0, 1]", "segment=2"], "2 [0, 1]", [2]),
    "one segment at the end": (["layers=[13, 14, 15]", "segment=3"], "2 [1, 2]", [2]),
    "two stretches": (["layers=[1, 2, 3, 12, 13]", "segment=3"], "2 [1, 2, 3]", [2, 1]),
}


@pytest.mark.parametrize("which", RECOMPUTED)
def test_recompute_keeps_its_structure(which: str) -> None:
    options, shown, after = RECOMPUTED[which]
    sets = ["model.layers=16", "recompute.mode=full", *(f"recompute.{option}" for option in options)]
    job = ready("debug", sets)
    small = shrink(job, 3).job
    assert problems(small) == [] and segments_of(small) == after
    assert f"{small.recompute.segment} {list(small.recompute.layers)}" == shown
    assert (max(segments_of(job)) > 1) == (max(after) > 1)
    if max(after) > 1:
        assert (len(segments_of(job)) > 1) == (len(after) > 1)
    left_out = [
        len(set(range(item.model.layers)) - set(blocks(item.recompute, item.model.layers))) for item in (job, small)
    ]
    assert (left_out[0] > 0) == (left_out[1] > 0)
    assert shrink(small, 3).job.recompute == small.recompute and shrink(small, 3).job.model == small.model


@pytest.mark.parametrize(
    ("frozen", "layers", "after", "kept"),
    [
        (["embed.*", *(f"blocks.{i}.*" for i in range(8))], "[8, 9]", ("embed.*", "blocks.0.*", "blocks.1.*"), (2,)),
        (["embed.*", *(f"blocks.{i}.*" for i in range(15))], "[15]", ("embed.*", "blocks.0.*", "blocks.1.*"), (2,)),
        (["embed.*", "blocks.[0-4].*"], "[5]", None, (1,)),
        (["embed.*", "blocks.0.*"], "[1]", ("embed.*", "blocks.0.*"), (1,)),
        (["embed.*", "blocks.*.mlp.*"], "[1]", ("embed.*", "blocks.*.mlp.*"), (0,)),
    ],
)
def test_recomputed_blocks_have_a_backward_above_frozen_ones(
    frozen: list[str], layers: str, after: tuple[str, ...] | None, kept: tuple[int, ...]
) -> None:
    sets = ["model.layers=16", f"model.frozen={frozen}", "recompute.mode=full", f"recompute.layers={layers}"]
    small = shrink(ready("debug", sets), 3).job
    assert small.recompute.layers == kept and first_trained(small.model) <= kept[0] and problems(small) == []
    assert after is None or small.model.frozen == after


@pytest.mark.parametrize(
    ("sets", "chunk"),
    [
        ([], "auto"),
        (["train.loss_chunk=64"], 11),
        (["train.loss_chunk=63"], 6),
        (["train.loss_chunk=17"], 4),
        (["train.loss_chunk=1"], 1),
        (["train.micro_batch=2", "train.loss_chunk=10"], 8),
        (["model.vocab=128256", "train.micro_batch=8"], 8),
        (["model.vocab=128256", "train.micro_batch=8", "layout.tp=8"], "auto"),
        (["model.vocab=128256", "train.micro_batch=8", "layout.engine=fsdp2"], "auto"),
    ],
)
def test_several_chunks_of_the_loss_stay_several(sets: list[str], chunk: int | str) -> None:
    small = shrink(ready("debug", sets), 3).job
    assert small.train.loss_chunk == chunk and problems(small) == []
    assert shrink(small, 3).job.train.loss_chunk == chunk
