"""Rules between fields: all violated ones at once, with the numbers and the nearest legal values."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from heptad.config import unbuilt
from heptad.config.check import check, problems
from heptad.config.load import load
from heptad.errors import ConfigError

Snapshot = Callable[[str, str], None]


def fields(*sets: str) -> list[str]:
    return [problem.field for problem in problems(load("debug", sets))]


C_117 = (
    "cluster.devices_per_node=6",
    "layout.tp=4",
    "model.heads=6",
    "model.kv_heads=2",
    "model.layers=5",
    "layout.pp=2",
    "data.seq_len=3",
    "layout.cp=4",
)


def test_c_117_one_error_lists_every_rule_with_numbers_and_legal_values(snapshot: Snapshot) -> None:
    with pytest.raises(ConfigError) as error:
        check(load("debug", C_117))
    named = {problem.field for problem in error.value.problems}
    assert {"layout", "model.heads", "model.kv_heads", "data.seq_len"} <= named  # world, heads, kv, seq
    snapshot("c_117_every_rule", str(error.value))


def test_c_034_fewer_kv_heads_than_tensor_ranks_that_do_not_divide_them_is_one_clear_error() -> None:
    sets = ["layout.tp=4", "model.heads=12", "model.kv_heads=3", "model.head_dim=8"]
    (problem,) = problems(load("debug", sets))
    assert problem.field == "model.kv_heads" and problem.value == 3
    assert "kv_heads = 3 < tp = 4" in problem.rule and "4 % 3 = 1" in problem.rule
    assert problem.fix == "tp = 3 or 6 (heads = 12), or kv_heads = 2 or 4"
    for tp, kv_heads in ((3, 3), (6, 3), (4, 2), (4, 4)):  # what the fix says is legal
        assert fields(f"layout.tp={tp}", "model.heads=12", f"model.kv_heads={kv_heads}", "model.head_dim=8") == []


def test_a_window_as_long_as_the_sequences_says_what_would_be_shorter() -> None:
    (problem,) = problems(load("debug", ["data.seq_len=48", "model.window=64"]))
    assert (problem.field, problem.value) == ("model.window", 64)
    assert problem.rule.endswith("no effect: a sequence of data.seq_len = 48 tokens has none that is 64 before another")
    assert problem.fix == "remove it, or window <= 47, or a longer seq_len"
    with pytest.raises(ConfigError, match=r"model.window = 0\n"):
        load("debug", ["model.window=0"])
    assert load("debug", ["model.window=none"]).model.window is None


def test_a_job_with_something_of_everything_wrong(snapshot: Snapshot) -> None:
    sets = (
        "model.preset=lama3-8b",
        "cluster.preset=h10",
        "layout.dp_shard=2",
        "layout.engine=fsdp2",
        "layout.zero=1",
        "layout.prefetch=3",
        "layout.order=tp-pp",
        "layout.schedule=gpipe",
        "train.global_batch=25",
        "train.micro_batch=3",
        "optimizer.momentum=0.9",
        "optimizer.warmup_steps=600",
        "precision.params=fp32",
        "precision.reduce=bf16",
        "data.text_field=body",
        "data.val_fraction=0",
        "train.val_every=5",
    )
    snapshot("something_of_everything", "\n".join(map(str, problems(load("debug", sets)))))


UNBUILT = {
    "precision.float8": "true",
    "zeropp.qwz": "true",
    "zeropp.hpz": "true",
    "zeropp.qgz": "true",
    "offload.optimizer": "cpu",
    "offload.params": "nvme",
    "offload.activations": "nvme",
    "checkpoint.async": "true",
}


def test_every_row_of_the_table_is_tried() -> None:
    assert set(UNBUILT) == {option.rstrip("_") for option, _, _ in unbuilt.TABLE}


@pytest.mark.parametrize("option", sorted(UNBUILT))
def test_what_is_not_built_is_refused(option: str) -> None:
    sets = [f"{option}={UNBUILT[option]}"]
    refused = [problem for problem in problems(load("debug", sets)) if problem.field == option]
    assert any("not built yet" in problem.rule for problem in refused), refused


@pytest.mark.parametrize(
    ("field", "sets"),
    [
        ("model.options", ["model.options.depth=3"]),
        ("model.rope_theta", ["model.preset=debug-gpt", "model.rope_theta=5e5"]),
        ("model.rope_scaling.beta_fast", [
            "model.rope_scaling={kind='llama3', factor=8.0, original_max_positions=128, beta_fast=16.0}"]),
        ("model.rope_scaling.low_freq_factor", [
            "model.rope_scaling={kind='yarn', factor=8.0, original_max_positions=128, low_freq_factor=2.0}"]),
        ("model.window", ["data.seq_len=128", "model.window=128"]),
        ("model.window", ["data.seq_len=1", "model.window=1"]),
        ("layout.sequence_parallel", ["layout.sequence_parallel=true"]),
        ("layout.keep_gathered", ["layout.sequence_parallel=true", "layout.keep_gathered=true"]),
        ("layout.keep_gathered", ["layout.tp=2", "layout.keep_gathered=true"]),
        ("recompute.segment", ["recompute.segment=2"]),
        ("recompute.segment", ["recompute.mode=selective", "recompute.segment=sqrt"]),
        ("recompute.layers", ["recompute.layers=[0]"]),
        ("layout.schedule", ["layout.schedule=gpipe"]),
        ("layout.vpp", ["layout.vpp=2"]),
        ("layout.layers_per_stage", ["layout.layers_per_stage=[8]"]),
        ("layout.context", ["layout.context=ulysses"]),
        ("layout.cp_ulysses", ["layout.cp_ulysses=2"]),
        ("layout.cp_ulysses", ["layout.cp=4", "layout.cp_ulysses=2"]),
        ("layout.context_split", ["layout.context_split=contiguous"]),
        ("layout.context_split", ["layout.cp=2", "layout.context=ulysses", "layout.context_split=contiguous"]),
        ("layout.bucket_mb", ["layout.engine=fsdp2", "layout.bucket_mb=5"]),
        ("train.loss_chunk", ["layout.engine=fsdp2", "train.loss_chunk=5"]),
        ("layout.prefetch", ["layout.engine=fsdp2", "layout.prefetch=2"]),
        ("layout.prefetch", ["layout.zero=0", "layout.prefetch=2"]),
        ("optimizer.momentum", ["optimizer.momentum=0.5"]),
        ("optimizer.betas", ["optimizer.name=sgd", "optimizer.betas=[0.9, 0.99]"]),
        ("optimizer.eps", ["optimizer.name=sgd", "optimizer.eps=1e-6"]),
        ("optimizer.muon_lr", ["optimizer.muon_lr=0.1"]),
        ("optimizer.muon_momentum", ["optimizer.muon_momentum=0.5"]),
        ("optimizer.decay_steps", ["optimizer.schedule=constant", "optimizer.decay_steps=2"]),
        ("optimizer.min_lr_ratio", ["optimizer.schedule=constant", "optimizer.min_lr_ratio=0.5"]),
        ("optimizer.min_lr_ratio", [
            "optimizer.schedule=wsd", "optimizer.decay_steps=0", "optimizer.min_lr_ratio=0.5"]),
        ("optimizer.decay_roles", ["optimizer.weight_decay=0", "optimizer.decay_roles=['norm']"]),
        ("optimizer.weight_decay", ["optimizer.decay_roles=[]"]),
        ("data.path", ["data.path=here", "data.sources=[{name='a', path='b'}]"]),
        ("data.text_field", ["data.text_field=body"]),
        ("data.prompt_field", ["data.prompt_field=question"]),
        ("train.val_batches", ["data.val_fraction=0", "train.val_batches=3"]),
        ("cluster.preset", ["cluster.file=pyproject.toml"]),
        ("data.seed", ["data.shuffle=false", "data.seed=3"]),
        ("data.sources[0].weight", ["data.sources=[{name='a', path='b', weight=2.0}]"]),
        ("checkpoint.keep", ["checkpoint.keep=5"]),
        ("optimizer.betas", [
            "optimizer.roles={matrix='sgd', embedding='sgd', head='sgd', norm='sgd', bias='sgd'}",
            "optimizer.betas=[0.9, 0.99]"]),
    ],
)  # fmt: skip
def test_c_120_an_option_without_effect_is_refused(field: str, sets: list[str]) -> None:
    assert field in fields(*sets)


@pytest.mark.parametrize(
    "sets",
    [
        ["model.class=a.b:C", "model.options.depth=3"],
        ["data.seq_len=128", "model.window=127"],
        ["layout.zero=1", "layout.prefetch=2", "layout.bucket_mb=0"],
        ["optimizer.name=sgd", "optimizer.momentum=0.5"],
        ["optimizer.roles.matrix=muon", "optimizer.muon_lr=0.1", "optimizer.betas=[0.9, 0.99]"],
        ["optimizer.name=muon", "optimizer.eps=1e-6"],
        ["optimizer.clip_norm=1e-3"],
        ["optimizer.clip_norm=none", "layout.engine=fsdp2"],
        ["data.path=here", "data.text_field=body", "data.prompt_field=question"],
        ["data.shuffle=false"],
        ["data.sources=[{name='a', path='b', weight=2.0}, {name='b', path='b'}]"],
        ["checkpoint.keep=5", "checkpoint.every=1"],
        ["precision.params=bf16", "precision.reduce=bf16"],
        ["precision.params=fp64", "precision.reduce=fp64"],
        ["precision.reduce=fp32"],
        ["layout.tp=4", "layout.sequence_parallel=true"],
        ["layout.tp=8", "layout.sequence_parallel=true", "layout.keep_gathered=true", "layout.dp_shard=2"],
        ["layout.tp=4", "model.mlp_width=167", "model.vocab=509"],
        ["layout.tp=4", "model.mlp_width=4", "model.vocab=4"],
        ["layout.cp=3", "data.seq_len=11"],
        ["layout.cp=4", "layout.context='ring+ulysses'", "layout.cp_ulysses=2"],
        ["layout.cp=4", "layout.context=ulysses", "model.kv_heads=1", "layout.tp=1"],
        ["layout.cp=2", "layout.context=gather", "layout.context_split=contiguous"],
        ["layout.cp=2", "model.attention_dropout=0.1"],
        ["layout.pp=2"],
        ["layout.pp=8", "layout.dp_shard=2", "layout.tp=2", "layout.zero=3"],
        ["layout.pp=2", "layout.layers_per_stage=[3, 5]"],
        ["layout.pp=2", "layout.schedule=pipedream", "layout.zero=1", "optimizer.clip_norm=none"],
        ["layout.pp=2", "layout.vpp=3", "layout.schedule=gpipe", "layout.layers_per_stage=[1, 1, 1, 1, 1, 3]"],
        ["layout.pp=4", "layout.schedule=zbv", "layout.layers_per_stage=[1, 1, 1, 1, 1, 1, 1, 1]"],
        ["layout.pp=2", "model.frozen=['embed.*', 'blocks.[0-3].*']"],
        ["recompute.mode=full"],
        ["recompute.mode=selective"],
        ["recompute.mode=selective", "recompute.layers=[0, 7]"],
        ["recompute.mode=full", "recompute.segment=8"],
        ["recompute.mode=full", "recompute.segment=sqrt"],
        ["recompute.mode=full", "recompute.segment=3", "recompute.layers=[7, 0, 2, 3, 4]"],
        ["recompute.mode=full", "recompute.layers=[0, 1, 2, 3, 4, 5, 6, 7]"],
        ["recompute.mode=full", "recompute.layers=[40]", "model.class=a.b:C"],
        ["recompute.mode=full", "recompute.segment=40", "model.class=a.b:C"],
        ["offload.activations=cpu"],
        ["offload.activations=cpu", "recompute.mode=full"],
        ["train.compile=true"],
        ["train.loss_chunk=1"],
        ["train.loss_chunk=128", "train.micro_batch=2"],
        ["model.attention=flash"],
        ["model.attention=math"],
        ["model.attention=math", "model.attention_dropout=0.1"],
        ["layout.order=tp-cp-dp_shard-dp_replicate-pp", "layout.dp_replicate=2", "layout.dp_shard=3"],
        ["cluster.devices_per_node=3", "cluster.nodes=2", "layout.dp_shard=6"],
    ],
)
def test_legal_jobs_pass(sets: list[str]) -> None:
    assert problems(load("debug", sets)) == []


@pytest.mark.parametrize(
    ("field", "fix", "sets"),
    [
        ("train.global_batch", "global_batch = 24 or 32", ["train.global_batch=27", "layout.dp_shard=8"]),
        ("train.global_batch", "micro_batch = 3 or 6", ["train.micro_batch=5", "layout.dp_shard=4"]),
        ("model.kv_heads", "kv_heads = 2 or 4", ["model.kv_heads=3"]),
        ("model.head_dim", "head_dim = 6 or 8", ["model.head_dim=7"]),
        ("data.seq_len", "data.seq_len <= 512", ["data.seq_len=513"]),
        ("model.class", "a colon", ["model.class=package.Name"]),
        ("layout", "layout.dp_shard = 8", ["cluster.preset=h100"]),
        ("layout", "cluster.devices_per_node = 1", ["cluster.preset=h100"]),
        ("cluster.nodes", "nodes = 2 or 4", ["cluster.nodes=3", "layout.dp_shard=4"]),
        ("layout.order", "pp-dp_replicate-dp_shard-cp-tp", ["layout.order=tp-tp-cp-pp-dp_shard"]),
        ("layout.ep", "ep × etp = 2 or 4", ["layout.dp_shard=4", "layout.ep=3"]),
        ("layout.zero", "zero = 3", ["layout.engine=fsdp2", "layout.zero=2"]),
        ("model.tied", 'engine = "heptad"', ["layout.engine=fsdp2", "model.tied=true"]),
        ("precision.reduce", "fp64", ["precision.params=fp64", "precision.reduce=fp32"]),
        ("precision.reduce", "fp32", ["precision.params=fp32", "precision.reduce=bf16"]),
        ("precision.reduce", "fp32", ["precision.params=fp32", "precision.reduce=fp64"]),
        ("precision.reduce", "fp32", ["precision.reduce=bf16"]),
        ("optimizer.warmup_steps", "warmup_steps <= 4", ["optimizer.warmup_steps=5"]),
        ("optimizer.decay_steps", "decay_steps <= 1", ["optimizer.warmup_steps=3", "optimizer.decay_steps=2"]),
        ("optimizer.roles.norm", "adamw", ["optimizer.roles.norm=muon"]),
        ("train.val_every", "val_fraction", ["data.val_fraction=0", "train.val_every=1"]),
        ("data.sources", "rename", ["data.sources=[{name='a', path='b'}, {name='a', path='c'}]"]),
        ("model.rope_scaling.low_freq_factor", "1 and 4", [
            "model.rope_scaling={kind='llama3', factor=8.0, original_max_positions=128, low_freq_factor=4.0}"]),
        ("layout.cp_ulysses", 'cp_ulysses = 2, or context = "ring"', [
            "layout.cp=4", "layout.context='ring+ulysses'", "layout.cp_ulysses=3"]),
        ("layout.cp_ulysses", 'cp_ulysses = 2 or 3, or context = "ring"', [
            "layout.cp=6", "layout.context='ring+ulysses'"]),
        ("layout.cp_ulysses", 'cp_ulysses = 2, or context = "ulysses"', [
            "layout.cp=4", "layout.context='ring+ulysses'", "layout.cp_ulysses=4"]),
        ("layout.cp_ulysses", "such as 4", [
            "layout.cp=3", "layout.context='ring+ulysses'", "layout.cp_ulysses=3"]),
        ("layout.context", 'cp = 8, heads = 16, or context = "ring"', ["layout.cp=16", "layout.context=ulysses"]),
        ("layout.context", 'cp = 2, heads = 16, or context = "ring"', [
            "layout.cp=4", "layout.tp=4", "layout.context=ulysses"]),
        ("layout.context", 'heads = 12, or context = "ring"', [
            "layout.cp=6", "layout.context='ring+ulysses'", "layout.cp_ulysses=3", "layout.tp=4"]),
        ("data.seq_len", "seq_len >= 4, or cp <= 3", ["layout.cp=4", "data.seq_len=3"]),
        ("layout.engine", "cp = 1", ["layout.engine=fsdp2", "layout.cp=2"]),
        ("model.mlp_width", "mlp_width = 8, or tp = 2", ["layout.tp=8", "model.mlp_width=5"]),
        ("model.mlp_width", "mlp_width = 16 or 22, or tp = 4", ["layout.tp=8", "model.mlp_width=17"]),
        ("model.vocab", "vocab = 4, or tp = 2", ["layout.tp=4", "model.vocab=3"]),
        ("model.kv_heads", "kv_heads = 4 or 12", ["layout.tp=4", "model.heads=12", "model.kv_heads=6"]),
        ("model.attention", 'attention = "math"', ["model.attention=flash", "model.attention_dropout=0.1"]),
        ("layout.engine", 'engine = "heptad"', ["layout.engine=fsdp2", "layout.tp=2"]),
        ("recompute.layers", "leave 8, 9 out", ["recompute.mode=selective", "recompute.layers=[7, 9, 8]"]),
        ("recompute.layers", "keep one", ["recompute.mode=full", "recompute.layers=[7, 7]"]),
        ("recompute.segment", "segment <= 8", ["recompute.mode=full", "recompute.segment=9"]),
        ("recompute.segment", "segment <= 2", [
            "recompute.mode=full", "recompute.layers=[0, 1, 3]", "recompute.segment=3"]),
        ("recompute.segment", "segment <= 1", [
            "recompute.mode=full", "recompute.layers=[0, 2, 4]", "recompute.segment=sqrt"]),
        ("train.loss_chunk", "loss_chunk <= 64", ["train.loss_chunk=65"]),
        ("layout.pp", "pp × vpp <= 8, or layers >= 9", ["layout.pp=9"]),
        ("layout.pp", "layers >= 10", ["layout.pp=5", "layout.schedule=dualpipev"]),
        ("layout.pp", "layers >= 9", ["layout.pp=3", "layout.vpp=3", "layout.schedule=interleaved"]),
        ("layout.layers_per_stage", "[3, 3, 2]", ["layout.pp=3", "layout.layers_per_stage=[4, 4]"]),
        ("layout.layers_per_stage", "[3, 3, 2]", ["layout.pp=3", "layout.layers_per_stage=[4, 4, 1]"]),
        ("layout.layers_per_stage", "[2, 2, 2, 2]", [
            "layout.pp=2", "layout.schedule=zbv", "layout.layers_per_stage=[4, 4]"]),
        ("layout.engine", 'engine = "heptad"', ["layout.engine=fsdp2", "layout.pp=2"]),
        ("layout.zero", "zero = 1", ["layout.pp=2", "layout.schedule=pipedream"]),
        ("layout.zero", 'schedule = "1f1b"', ["layout.pp=2", "layout.schedule=pipedream", "layout.zero=2"]),
        ("optimizer.clip_norm", 'clip_norm = "none"', ["layout.pp=2", "layout.schedule=pipedream"]),
        ("model.tied", "tied = false", ["layout.pp=2", "layout.schedule=pipedream", "model.tied=true"]),
    ],
)  # fmt: skip
def test_each_rule_names_the_nearest_legal_values(field: str, fix: str, sets: list[str]) -> None:
    found = [problem for problem in problems(load("debug", sets)) if problem.field == field]
    assert any(fix in problem.fix for problem in found), found


def test_no_fix_of_a_context_is_a_whole_sequence() -> None:
    """With cp = 1 the same `context` would be refused again, as one without effect."""
    job = load("debug", ["layout.cp=2", "layout.tp=8", "layout.context=ulysses"])
    assert [problem.fix for problem in problems(job)] == ['heads = 16, or context = "ring"']
    job = load("debug", ["layout.cp=2", "layout.context=ulysses", "model.heads=7", "model.kv_heads=7"])
    assert [problem.fix for problem in problems(job)] == ['cp = 7, heads = 6 or 8, or context = "ring"']


def test_c_113_warm_up_longer_than_the_job_is_refused() -> None:
    assert fields("train.steps=3", "optimizer.warmup_steps=4") == ["optimizer.warmup_steps"]
    assert fields("train.steps=3", "optimizer.warmup_steps=3", "optimizer.decay_steps=0") == []
