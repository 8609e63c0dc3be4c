"""Bytes of activations of experts and latent attention, measured on real runs and equal to the formulas to the byte."""

from __future__ import annotations

from typing import Any

import pytest
from tests.recompute.memory import many, memory_job

from heptad.config.schema import ModelSection
from heptad.launch.forked import forked
from heptad.recompute.cost import Sizes

SOFTMAX: dict[str, Any] = dict(experts=5, experts_per_token=2, expert_width=5, dense_layers=1)
DEEPSEEK: dict[str, Any] = dict(
    kv_heads=None, head_dim=None, attention_kind="mla", q_lora_rank=11, kv_lora_rank=9, qk_nope_head_dim=5,
    qk_rope_head_dim=4, v_head_dim=3, experts=6, experts_per_token=3, expert_width=5, router="deepseek",
    router_groups=3, router_group_limit=2, shared_experts=2, routed_scale=1.7,
)  # fmt: skip
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "softmax": (SOFTMAX, {}),
    "softmax, losses": ({**SOFTMAX, "aux_loss": 0.1, "z_loss": 0.1, "normalise_top_k": False}, dict(params="bf16")),
    "softmax, jitter": ({**SOFTMAX, "jitter": 0.1, "norm": "layer", "mlp": "plain"}, {}),
    "deepseek": (DEEPSEEK, {}),
    "deepseek, losses": ({**DEEPSEEK, "balance_loss": 0.1, "z_loss": 0.1, "jitter": 0.1}, dict(params="fp64")),
    "deepseek, formed scores": ({**DEEPSEEK, "attention": "math", "dropout": 0.1, "attention_dropout": 0.1}, {}),
    "deepseek, whole queries, bf16": ({**DEEPSEEK, "q_lora_rank": None, "norm": "layer"}, dict(params="bf16")),
    "deepseek, in part": (DEEPSEEK, dict(recompute=dict(mode="selective"))),
    "softmax, again": ({**SOFTMAX, "layers": 3}, dict(recompute=dict(mode="full"), microbatches=2)),
    "equal widths": ({**DEEPSEEK, "v_head_dim": 9}, {}),
}


@pytest.mark.parametrize("name", CASES)
def test_bytes_alive_after_every_action_are_predicted(name: str) -> None:
    model, job = CASES[name]
    cases = [(memory_job(model, **job), documents) for documents in (False, True)]
    (found,) = forked(1, many, cases)
    for one in found:
        assert one.measured == one.predicted, one.actions


ONE = {"layers": 2, "dense_layers": 1}
"""One mixture: the terms of a block are of one routing."""
SPREAD: dict[int, dict[str, tuple[dict[str, Any], dict[str, Any]]]] = {
    2: {
        "ep": ({**SOFTMAX, **ONE}, dict(dp_shard=2, ep=2)),
        "ep, bf16": ({**DEEPSEEK, **ONE, "capacity_factor": 0.7}, dict(dp_shard=2, ep=2, params="bf16")),
        "etp": ({**SOFTMAX, **ONE, "mlp": "plain"}, dict(dp_shard=2, etp=2)),
        "recomputed": ({**SOFTMAX, **ONE}, dict(dp_shard=2, ep=2, recompute=dict(mode="full"), microbatches=4)),
    },
    4: {
        "ep and etp": ({**DEEPSEEK, **ONE}, dict(dp_shard=4, ep=2, etp=2)),
        "ep and edp": ({**SOFTMAX, **ONE}, dict(dp_shard=4, ep=2)),
        "two levels": ({**SOFTMAX, **ONE, "experts": 7}, dict(dp_shard=4, ep=4, ep_inner=2)),
        "two levels, not normalised": (
            {**SOFTMAX, **ONE, "experts": 7, "normalise_top_k": False}, dict(dp_shard=4, ep=4, ep_inner=2),
        ),
        "two levels, deepseek": ({**DEEPSEEK, **ONE, "experts": 12}, dict(dp_shard=4, ep=4, ep_inner=2, params="fp64")),
    },
}  # fmt: skip


@pytest.mark.parametrize("world", SPREAD)
def test_bytes_alive_where_experts_lie_on_several_ranks_follow_from_the_routing(world: int) -> None:
    jobs = [memory_job(model, **{"microbatches": world, **job}) for model, job in SPREAD[world].values()]
    for rank in forked(world, many, [(job, False) for job in jobs]):
        for name, one in zip(SPREAD[world], rank, strict=True):
            assert one.measured == one.predicted, (name, one.actions)


CUT: dict[str, Any] = dict(tp=2, sequence_parallel=True)
AXES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "softmax, tp": ({**SOFTMAX, "shared_experts": 1}, dict(tp=2)),
    "softmax, cut, jitter": ({**SOFTMAX, "jitter": 0.1, "shared_experts": 1}, CUT),
    "deepseek, tp": ({**DEEPSEEK, "balance_loss": 0.1, "z_loss": 0.1}, dict(tp=2)),
    "deepseek, cut": ({**DEEPSEEK, "balance_loss": 0.1}, CUT),
    "deepseek, kept": (DEEPSEEK, {**CUT, "keep_gathered": True}),
    "whole queries, cut": ({**DEEPSEEK, "q_lora_rank": None}, CUT),
    "whole queries, kept": ({**DEEPSEEK, "q_lora_rank": None}, {**CUT, "keep_gathered": True}),
    "filled up": ({**DEEPSEEK, "heads": 8}, {**CUT, "tp": 4}),
    "formed scores, tp": ({**DEEPSEEK, "attention": "math"}, dict(tp=2)),
}


@pytest.mark.parametrize("name", AXES)
def test_of_a_tensor_rank_too(name: str) -> None:
    model, job = AXES[name]
    for found in forked(job["tp"], many, [(memory_job(model, **job), False)]):
        for one in found:
            assert one.measured == one.predicted, one.actions


def test_multi_token_prediction_is_refused() -> None:
    with pytest.raises(AssertionError, match="not counted"):
        Sizes(ModelSection(mtp_depth=1), 1, 7)
