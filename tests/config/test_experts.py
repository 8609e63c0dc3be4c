"""Rules of experts, latent attention and multi-token prediction; messages as a user reads them."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from heptad.config.check import problems
from heptad.config.experts import most_capacity
from heptad.config.load import load
from heptad.config.schema import DataSection, Job, ModelSection
from heptad.errors import ConfigError
from heptad.models.build import build
from heptad.models.resolve import resolve
from heptad.models.spec import complete

BASE = load("debug-moe")


def found(layout: dict[str, Any] | None = None, **model: Any) -> list[str]:
    """What is wrong with debug-moe changed so: "field: rule (fix)"."""
    changed = {**BASE.model_dump(by_alias=True), "model": {"preset": "debug-moe", **model}}
    changed["layout"] = {**changed["layout"], **(layout or {})}
    if layout and "dp_shard" not in layout:
        changed["train"] = {**changed["train"], "global_batch": 24}
    return [f"{item.field}: {item.rule} ({item.fix})" for item in problems(Job.model_validate(changed))]


CASES: dict[str, tuple[dict[str, Any], str]] = {
    "choices": (dict(experts_per_token=9, router_group_limit=4), "different experts, of which there are 8"),
    "all dense": (dict(dense_layers=4), "some block has experts: dense_layers < layers = 4 (dense_layers <= 3)"),
    "groups": (dict(router_groups=3), "router_groups divides experts (8 % 3 = 2)"),
    "limit": (dict(router_group_limit=5), "at most this many of the router_groups = 4"),
    "few in groups": (dict(router_group_limit=1, experts_per_token=3), "fewer experts than experts_per_token = 3"),
    "biases": (dict(mlp_bias=True), "routed experts are stacks of matrices without biases (mlp_bias = false)"),
    "softmax": (dict(router="softmax"), 'would have no effect: router is "softmax"'),
    "aux": (dict(aux_loss=0.1), "remove it, or balance_loss"),
    "dense": (dict(experts=None), "would have no effect: there are no experts (remove it, or give model.experts)"),
    "no value size": (dict(v_head_dim=None), 'attention_kind = "mla" has no default for it'),
    "odd": (dict(qk_rope_head_dim=3), "qk_rope_head_dim is even (it is 3)"),
    "wide values": (dict(v_head_dim=13), "padded to the width of queries, qk_nope_head_dim + qk_rope_head_dim = 12"),
    "head_dim": (dict(head_dim=8), "a head is qk_nope_head_dim + qk_rope_head_dim = 12 wide (remove it)"),
    "kv_heads": (dict(kv_heads=2), "kv_heads = heads = 8"),
    "learned": (dict(positions="learned"), "for rotary positions"),
    "qk_norm": (dict(qk_norm=True), "mla normalises its latents instead"),
    "gqa": (dict(attention_kind="gqa"), 'would have no effect: attention_kind is "gqa"'),
    "all experts": (dict(experts_per_token=8, router_group_limit=None, router_groups=1), "model.bias_update_speed: it "
        "would have no effect: every token goes to all 8 experts, so their load is even (remove it, or experts_per_t"),
    "one choice": (dict(experts_per_token=1), "model.normalise_top_k: the one weight of a token divided by itself is "
        "1: no gradient of the loss would reach the router (normalise_top_k = false, or experts_per_token = 2)"),
    "room for all": (dict(capacity_factor=3.94), "model.capacity_factor: it would have no effect: each expert has room "
        "for all data.seq_len = 64 tokens of a sequence, so none is dropped (remove it, or capacity_factor <= 3.937)"),
    "all groups": (dict(router_group_limit=None), "model.router_groups: it would have no effect: a token's experts may "
        "lie in all 4 groups (remove it, or router_group_limit <= 3)"),
    "all groups, needed": (dict(experts_per_token=8, router_group_limit=4), "(remove it, or fewer experts_per_token)"),
    "beyond a sequence": (dict(mtp_depth=64), "model.mtp_depth: depth k predicts k + 1 tokens on, inside a sequence of "
        "data.seq_len = 64: depths below that (mtp_depth <= 63, or a longer seq_len)"),
    "weight alone": (dict(mtp_weight=0.1), "nothing further is predicted (mtp_depth = 0)"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_rule_is_said_once(name: str) -> None:
    model, rule = CASES[name]
    assert any(rule in line for line in found(**model)), found(**model)


@pytest.mark.parametrize("experts", [2, 6, 7])
def test_the_largest_capacity_that_drops_is_no_idle_one_and_a_larger_one_is(experts: int) -> None:
    for chosen, seq_len in product(range(1, experts + 1), range(2, 40)):
        sizes = dict(experts=experts, experts_per_token=chosen, normalise_top_k=False)
        most = most_capacity(ModelSection.model_validate(sizes), seq_len)
        for factor, idle in ((most, False), (most + 0.002, True)):
            model = ModelSection.model_validate({**sizes, "capacity_factor": factor})
            job = Job(model=model, data=DataSection(seq_len=seq_len))
            assert bool([item for item in problems(job) if item.field == "model.capacity_factor"]) == idle


def test_the_fixes_of_idle_options_hold() -> None:
    for model in (
        dict(experts_per_token=1, normalise_top_k=False), dict(capacity_factor=3.9375), dict(router_group_limit=3),
        dict(experts_per_token=7, router_group_limit=None, router_groups=1), dict(mtp_depth=63),
    ):  # fmt: skip
        assert found(**model) == [], model


def test_what_is_right_is_left_alone_and_resolved_jobs_load_again() -> None:
    assert found() == [] and found(mtp_depth=2, mtp_weight=0.1, capacity_factor=1.5, z_loss=0.1, jitter=0.1) == []
    for preset in ("debug-moe", "deepseek-v3", "mixtral-8x7b", "qwen3-30b-a3b"):
        job = resolve(load("debug-moe", [f"model.preset={preset}"]))
        assert problems(job) == [] and resolve(job) == job


@pytest.mark.parametrize("axis", ["tp", "cp"])
def test_tensor_and_context_ranks_suit_them(axis: str) -> None:
    assert found({axis: 2}, mtp_depth=1) == []


CARVED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "no experts": (dict(ep=2, dp_shard=2), dict(experts=None),
        "layout.ep: it would have no effect: there are no experts (remove it, or give model.experts)"),
    "an idle rank": (dict(ep=6, dp_shard=6), {},
        "layout.ep: each of the ep = 6 ranks holds an expert, 2 of the 8 a rank (ep = 3)"),
    "no rows": (dict(etp=4, dp_shard=4), dict(expert_width=5),
        "layout.etp: each of the etp = 4 ranks holds rows of an expert, 2 of the 5 a rank (etp = 2)"),
    "absurdly many": (dict(ep=10**9, dp_shard=10**9), {},
        "layout.ep: each of the ep = 1000000000 ranks holds an expert, 1 of the 8 a rank (ep = 8)"),
    "carved from too few": (dict(ep=3, etp=4, dp_shard=2, tp=3), {}, "layout.ep: ep × etp = 12 divides dp_shard × cp × "
        "tp = 6, from which expert ranks are carved (ep × etp = 6, or dp_shard = 4)"),
    "fsdp2": (dict(ep=2, dp_shard=2, engine="fsdp2"), {}, "layout.engine: fsdp2 cuts every parameter over all data "
        'ranks, but ep × etp = 2 cuts experts over some (engine = "heptad", or ep = 1 and etp = 1)'),
    "a node of no divisor": (dict(ep=4, ep_inner=3, dp_shard=4), {}, "layout.ep_inner: ep_inner is the ranks of a node "
        "among ep = 4: it divides them, and there are several nodes (ep_inner = 2, or 1 for a dispatch in one step)"),
    "one node": (dict(ep=2, ep_inner=2, dp_shard=2), {}, "there are several nodes (an ep with two factors, such as 4"),
    "nothing dispatched": (dict(ep_inner=2), {},
        "layout.ep_inner: it would have no effect: nothing is dispatched between ranks (ep = 1) (remove it, or ep >"),
}  # fmt: skip
"""layout, model, what is said."""


def test_expert_axes_that_hold_something_are_left_alone() -> None:
    for layout in (dict(ep=4), dict(ep=2, etp=2), dict(etp=4), dict(ep=4, ep_inner=2), dict(dp_replicate=2, ep=4)):
        assert found({"dp_shard": 4, **layout}) == [], layout


@pytest.mark.parametrize("name", CARVED)
def test_expert_axes_that_would_hold_nothing_are_refused(name: str) -> None:
    layout, model, said = CARVED[name]
    lines = found(layout, **model)
    assert any(said in line for line in lines), lines


def test_each_tensor_rank_holds_rows_of_the_shared_experts() -> None:
    rule = "each of the tp = 4 ranks holds a row, but there are 3 (3 × 1) (expert_width = 4, or tp = 2)"
    assert f"model.expert_width: {rule}" in found({"tp": 4}, expert_width=1, shared_experts=3)
    assert found({"tp": 4}, dense_layers=0, mlp_width=1) == []  # no block has such an MLP


def test_predictions_want_one_token_table() -> None:
    lines = found({"pp": 2, "schedule": "pipedream", "zero": 1}, mtp_depth=1)
    assert any("pipedream would update it at two times" in line for line in lines)
    assert any('engine = "fsdp2" wraps each unit by itself' in line for line in found({"engine": "fsdp2"}, mtp_depth=1))


def test_a_class_of_ones_own_has_its_own_blocks() -> None:
    job = Job(model=ModelSection(class_="examples.custom_model:TokenShift", experts=4))
    with pytest.raises(ConfigError, match="has blocks of its own"):
        build(job)


def test_sizes_are_filled_in() -> None:
    section = complete(ModelSection(experts=4, mlp_width=99, router="deepseek", router_groups=2))
    assert (section.expert_width, section.router_group_limit) == (99, 2)
    latent = complete(resolve(BASE).model)
    assert (latent.head_dim, latent.kv_heads) == (12, 8)
    with pytest.raises(ConfigError, match="some block has experts"):
        complete(ModelSection(experts=4, dense_layers=2))
