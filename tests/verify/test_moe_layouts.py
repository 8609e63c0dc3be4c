"""Experts, latent attention and multi-token prediction under every axis but their own, and recompute: as one device."""

from __future__ import annotations

from typing import Any

import pytest
from tests.verify.layouts import compared, layout_job
from tests.verify.several import assert_jobs_right, by_ranks, fast
from tests.verify.test_layouts import assert_right

from heptad.config.check import check, problems
from heptad.config.load import load
from heptad.models.resolve import resolve
from heptad.verify.shrink import shrink

SOFTMAX: dict[str, Any] = dict(
    layers=3, mlp_width=11, experts=5, experts_per_token=2, expert_width=7, dense_layers=1, aux_loss=0.3, z_loss=0.05,
    jitter=0.1, capacity_factor=0.8,
)  # fmt: skip
DEEPSEEK: dict[str, Any] = dict(
    layers=3, kv_heads=None, head_dim=None, attention_kind="mla", q_lora_rank=11, kv_lora_rank=9, qk_nope_head_dim=5,
    qk_rope_head_dim=4, v_head_dim=3, experts=6, experts_per_token=2, expert_width=7, dense_layers=1,
    router="deepseek", router_groups=3, router_group_limit=2, balance_loss=0.1, shared_experts=1, routed_scale=1.7,
    bias_update_speed=0.05,
)  # fmt: skip
FURTHER = {**DEEPSEEK, "mtp_depth": 1}
MUON: dict[str, Any] = dict(name="muon", muon_lr=0.05)
FOUR = {**FURTHER, "layers": 4}


def piped(schedule: str, model: dict[str, Any], ranks: int = 1, **layout: Any) -> dict[str, Any]:
    return dict(zero=1, ranks=ranks, accumulation=4, model=model, layout=dict(pp=2, schedule=schedule, **layout))


JOBS: dict[str, dict[str, Any]] = {
    "stage 0": dict(zero=0, ranks=2, model=DEEPSEEK),
    "stage 1, hsdp": dict(zero=1, ranks=4, hsdp=True, model=FURTHER),
    "stage 2": dict(zero=2, ranks=2, model=SOFTMAX),
    "stage 3, hsdp": dict(zero=3, ranks=4, hsdp=True, model=SOFTMAX),
    "stage 3, tied": dict(zero=3, ranks=2, tied=True, model=FURTHER),
    "recomputed": dict(zero=3, ranks=2, model=DEEPSEEK, recompute=dict(mode="full")),
    "recomputed in part": dict(zero=1, ranks=2, model=DEEPSEEK, recompute=dict(mode="selective")),
    "offload": dict(zero=1, ranks=2, model=SOFTMAX, offload=dict(activations="cpu")),
    "fsdp2": dict(zero=3, ranks=2, model=DEEPSEEK, layout=dict(engine="fsdp2"), optimizer=MUON),
    "muon": dict(zero=3, ranks=2, model=DEEPSEEK, optimizer=MUON),
    "fp32": dict(zero=2, ranks=2, model=DEEPSEEK, params="fp32"),
    "1f1b": piped("1f1b", FURTHER),
    "zbh1": piped("zbh1", SOFTMAX, 2),
    "zbv": piped("zbv", FOUR),
    "interleaved": piped("interleaved", FOUR),
    "dualpipe": piped("dualpipe", FURTHER, 2),
    "dualpipev": piped("dualpipev", FOUR),
    "pipedream": {**piped("pipedream", DEEPSEEK), "optimizer": dict(clip_norm=None)},
}


CUT = dict(tp=2, sequence_parallel=True)
LIMITED = {**FURTHER, "capacity_factor": 0.7, "z_loss": 0.05}
GROUPS = {**LIMITED, "mtp_depth": 2, "layers": 2, "attention_dropout": 0.1, "dropout": 0.1}
WIDE = {**SOFTMAX, "heads": 8, "kv_heads": 4, "window": 3}
DENSE_QUERIES = {**LIMITED, "q_lora_rank": None, "qkv_bias": True, "attention_bias": True}


def cut(model: dict[str, Any], ranks: int = 1, **layout: Any) -> dict[str, Any]:
    return dict(zero=layout.pop("zero", 1), ranks=ranks, accumulation=2, model=model, layout=layout)


AXES: dict[str, dict[str, Any]] = {
    "softmax, tp": cut(SOFTMAX, tp=2),
    "softmax, tp cut": cut(SOFTMAX, **CUT, zero=2),
    "deepseek, tp": cut(LIMITED, tp=2, zero=0),
    "deepseek, tp cut": {**cut(LIMITED, **CUT, zero=3), "recompute": dict(mode="full")},
    "kept, in part": {**cut(LIMITED, **CUT, keep_gathered=True), "recompute": dict(mode="selective")},
    "tp 4": {**cut(GROUPS, tp=4, sequence_parallel=True), "train": dict(micro_batch=2, global_batch=4)},
    "tp 4 whole": {**cut(GROUPS, tp=4), "train": dict(micro_batch=2, global_batch=4)},
    "queries without latents": cut(DENSE_QUERIES, **CUT),
    "layer norm": cut({**LIMITED, "norm": "layer"}, tp=2),
    "frozen": cut({**LIMITED, "frozen": ("embed.*", "blocks.0.*", "*.q_a.*", "*.kv_norm.*", "*router*")}, **CUT),
    "ring": {**cut(LIMITED, cp=2), "train": dict(micro_batch=2, global_batch=4)},
    "ring of 3": {**cut(SOFTMAX, cp=3, zero=2), "recompute": dict(mode="full")},
    "gather of 4": cut(GROUPS, cp=4, context="gather"),
    "ulysses": cut(LIMITED, cp=2, context="ulysses", zero=3),
    "ulysses of 4": cut(WIDE, cp=4, context="ulysses"),
    "ring and heads": cut(LIMITED, cp=4, context="ring+ulysses", cp_ulysses=2),
    "plain order": cut({**LIMITED, "window": 3}, cp=2, context_split="contiguous"),
    "both": {**cut(GROUPS, cp=2, **CUT), "recompute": dict(mode="full"), "train": dict(micro_batch=2, global_batch=4)},
    "both, whole": {**cut(LIMITED, cp=2, tp=2), "offload": dict(activations="cpu")},
    "tensor outermost": cut(LIMITED, ranks=2, cp=2, **CUT, order="tp-pp-dp_replicate-dp_shard-cp"),
    "muon": {**cut(LIMITED, tp=2, cp=2), "optimizer": MUON},
    "1f1b, tp": piped("1f1b", LIMITED, **CUT),
    "zbv, cp": piped("zbv", {**LIMITED, "layers": 4}, cp=2),
    "dualpipe, both": piped("dualpipe", LIMITED, cp=2, tp=2),
    "zbh1, both": {**piped("zbh1", SOFTMAX, cp=2, **CUT), "recompute": dict(mode="full")},
}


def test_every_job_is_a_legal_one() -> None:
    assert not [(name, found) for name, item in AXES.items() for found in problems(layout_job(**item))]


SLOW = (
    "softmax, tp", "layer norm", "plain order", "tp 4 whole", "ulysses of 4", "ring and heads", "tensor outermost",
    "muon", "zbh1, both",
)  # fmt: skip
"""Each differs from others in one option; the pairwise cover of all axes has it too."""


@pytest.mark.parametrize("names", by_ranks(AXES, lambda name: name not in SLOW))
def test_tensor_and_context_axes(names: list[str]) -> None:
    assert_jobs_right(names, AXES)


@pytest.mark.parametrize(
    "name", fast(JOBS, lambda name: name in ("fsdp2", "muon", "fp32", "pipedream", "stage 3, tied"))
)
def test_layouts(name: str) -> None:
    assert_right(layout_job(**JOBS[name]))


def test_c_044_the_loss_of_a_router_below_the_last_stage_changes_its_gradient_alone() -> None:
    """Of two pipelines with other coefficients the first loss is the same, and the one after an update is not."""
    found = [
        compared(layout_job(**piped("1f1b", {**SOFTMAX, "aux_loss": factor}), params="fp64")) for factor in (0.0, 1e3)
    ]
    assert all(not item.differences for item in found)
    assert found[0].losses[0] == found[1].losses[0] and found[0].losses[1] != found[1].losses[1]


@pytest.mark.parametrize("preset", ["debug-moe", "deepseek-v3", "mixtral-8x7b", "qwen3-30b-a3b"])
def test_shrunk_jobs_keep_their_kind(preset: str) -> None:
    job = resolve(load("debug-moe", [f"model.preset={preset}"]))
    small = shrink(job, 3).job
    check(small)
    before, after = job.model, small.model
    for name in ("attention_kind", "router", "normalise_top_k", "capacity_factor", "mtp_depth", "mtp_weight"):
        assert getattr(before, name) == getattr(after, name)
    assert (after.dense_layers > 0) == (before.dense_layers > 0) and after.dense_layers < after.layers
    assert after.experts is not None and after.experts > after.experts_per_token > 1
    assert (after.router_group_limit, after.router_groups) in ((None, 1), (2, 3), (2, 4))
    assert (after.bias_update_speed > 0) == (before.bias_update_speed > 0)
    assert after.width == 13 and (after.expert_width or 0) <= 7
