"""Bytes of activations of experts and latent attention, measured on real runs and equal to the formulas to the byte.

Rows of experts follow from what the routers of the same step chose, of each micro-batch and each mixture.
"""

from __future__ import annotations

from typing import Any

import pytest
from tests.recompute.memory import BOTH, Case, assert_predicted

from heptad.config.schema import ModelSection
from heptad.recompute import cost
from heptad.recompute.sizes import Sizes

SOFTMAX: dict[str, Any] = dict(experts=5, experts_per_token=2, expert_width=5, dense_layers=1)
DEEPSEEK: dict[str, Any] = dict(
    kv_heads=None, head_dim=None, attention_kind="mla", q_lora_rank=11, kv_lora_rank=9, qk_nope_head_dim=5,
    qk_rope_head_dim=4, v_head_dim=3, experts=6, experts_per_token=3, expert_width=5, router="deepseek",
    router_groups=3, router_group_limit=2, shared_experts=2, routed_scale=1.7,
)  # fmt: skip
CASES: dict[str, Case] = {
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
    "one head": ({**DEEPSEEK, "heads": 1}, {}),
    "one head, formed scores": ({**DEEPSEEK, "heads": 1, "attention": "math"}, {}),
    "capacity": ({**SOFTMAX, "capacity_factor": 0.5, "layers": 3}, dict(microbatches=2)),
}


@BOTH
def test_bytes_alive_after_every_action_are_predicted(other: bool) -> None:
    assert_predicted(1, CASES, other)


SPREAD: dict[int, dict[str, Case]] = {
    2: {
        "ep": (SOFTMAX, dict(dp_shard=2, ep=2)),
        "ep, bf16": ({**DEEPSEEK, "capacity_factor": 0.7}, dict(dp_shard=2, ep=2, params="bf16")),
        "etp": ({**SOFTMAX, "mlp": "plain"}, dict(dp_shard=2, etp=2)),
        "recomputed": (SOFTMAX, dict(dp_shard=2, ep=2, recompute=dict(mode="full"), microbatches=4)),
    },
    4: {
        "ep and etp": (DEEPSEEK, dict(dp_shard=4, ep=2, etp=2)),
        "ep and edp": (SOFTMAX, dict(dp_shard=4, ep=2)),
        "two levels": ({**SOFTMAX, "experts": 7}, dict(dp_shard=4, ep=4, ep_inner=2)),
        "two levels, not normalised": (
            {**SOFTMAX, "experts": 7, "normalise_top_k": False}, dict(dp_shard=4, ep=4, ep_inner=2),
        ),
        "two levels, deepseek": ({**DEEPSEEK, "experts": 12}, dict(dp_shard=4, ep=4, ep_inner=2, params="fp64")),
    },
}  # fmt: skip


@BOTH
@pytest.mark.parametrize("ranks", SPREAD)
def test_bytes_alive_where_experts_lie_on_several_ranks_follow_from_the_routing(ranks: int, other: bool) -> None:
    cases = {name: (model, {"microbatches": ranks, **job}) for name, (model, job) in SPREAD[ranks].items()}
    assert_predicted(ranks, cases, other)


CUT: dict[str, Any] = dict(tp=2, sequence_parallel=True)
AXES: dict[int, dict[str, Case]] = {
    2: {
        "softmax": ({**SOFTMAX, "shared_experts": 1}, dict(tp=2)),
        "softmax, cut, jitter": ({**SOFTMAX, "jitter": 0.1, "shared_experts": 1}, CUT),
        "deepseek": ({**DEEPSEEK, "balance_loss": 0.1, "z_loss": 0.1}, dict(tp=2)),
        "deepseek, cut": ({**DEEPSEEK, "balance_loss": 0.1}, CUT),
        "deepseek, kept": (DEEPSEEK, {**CUT, "keep_gathered": True}),
        "whole queries, cut": ({**DEEPSEEK, "q_lora_rank": None}, CUT),
        "whole queries, kept": ({**DEEPSEEK, "q_lora_rank": None}, {**CUT, "keep_gathered": True}),
        "formed scores": ({**DEEPSEEK, "attention": "math"}, dict(tp=2)),
        "one head a rank": ({**DEEPSEEK, "heads": 2}, CUT),
    },
    4: {"filled up": ({**DEEPSEEK, "heads": 8}, {**CUT, "tp": 4})},
}


@BOTH
@pytest.mark.parametrize("ranks", AXES)
def test_of_a_tensor_rank_too(ranks: int, other: bool) -> None:
    assert_predicted(ranks, AXES[ranks], other)


LATENT: dict[str, Any] = dict(
    kv_heads=None, head_dim=None, attention_kind="mla", q_lora_rank=11, kv_lora_rank=9, qk_nope_head_dim=5,
    qk_rope_head_dim=4, v_head_dim=3,
)  # fmt: skip
CONTEXT: dict[int, dict[str, Case]] = {
    2: {
        "latent, ring": (LATENT, dict(cp=2)),
        "latent, ulysses": (LATENT, dict(cp=2, context="ulysses", params="bf16")),
        "latent, gathered": ({**LATENT, "heads": 1}, dict(cp=2, context="gather")),
        "equal widths, ring": ({**LATENT, "v_head_dim": 9, "attention_dropout": 0.1}, dict(cp=2)),
        "equal widths, ulysses": ({**LATENT, "v_head_dim": 9, "window": 3}, dict(cp=2, context="ulysses")),
        "softmax, ring": ({**SOFTMAX, "aux_loss": 0.1, "z_loss": 0.1}, dict(cp=2, microbatches=2)),
        "softmax, capacity": ({**SOFTMAX, "capacity_factor": 0.7}, dict(cp=2, context="ulysses")),
        "deepseek, ring": ({**DEEPSEEK, "balance_loss": 0.1}, dict(cp=2, recompute=dict(mode="selective"))),
        "deepseek over experts": (DEEPSEEK, dict(cp=2, ep=2, params="fp64", microbatches=2)),
        "softmax, rows in parts": (SOFTMAX, dict(cp=2, etp=2, recompute=dict(mode="full"))),
    },
    4: {
        "latent, both": (LATENT, dict(cp=4, context="ring+ulysses", cp_ulysses=2)),
        "deepseek, cut over experts": (DEEPSEEK, dict(cp=2, tp=2, sequence_parallel=True, ep=4)),
        "softmax, whole over experts": (SOFTMAX, dict(cp=2, tp=2, context="gather", ep=2, etp=2)),
    },
}


@BOTH
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_of_a_context_rank_too(ranks: int, other: bool) -> None:
    """Of 7 tokens the ranks fill up one, which is sent to no expert."""
    assert_predicted(ranks, CONTEXT[ranks], other)


def test_rows_that_follow_from_the_routing_alone_are_not_guessed() -> None:
    for fields in (dict(spread=True), dict(filled=True), dict(section=ModelSection(**SOFTMAX, capacity_factor=1.0))):
        with pytest.raises(AssertionError, match="the rows of mixture 1 follow from the routing"):
            cost.block(Sizes(**{"section": ModelSection(**SOFTMAX), "batch": 1, "length": 7, **fields}), layer=1)
    section = ModelSection(**SOFTMAX, mtp_depth=1, layers=2)
    with pytest.raises(AssertionError, match="the rows of mixture 2 follow from the routing"):
        cost.head(Sizes(section, 1, 7))
