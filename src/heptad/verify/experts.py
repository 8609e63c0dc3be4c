"""A mixture of experts and latent attention made small with the same structure. No torch.

Up to `EXPERTS` experts are kept; of more remain as few as still have groups, more than one choice, and experts that a
token does not meet. Dense first blocks follow where they stood (`blocks.py`), and some block keeps experts. The speed
of the router's bias is raised, so that a step moves choices. Read next: `shrink.py`, which calls this.
"""

from __future__ import annotations

from heptad.config.schema import ModelSection

EXPERTS, CHOICES, GROUPS, WIDTH = 8, 2, 3, 7
LATENT = {"q_lora_rank": 11, "kv_lora_rank": 9, "qk_nope_head_dim": 5, "qk_rope_head_dim": 4, "v_head_dim": 3}
SPEED = 0.05

SIZES = (
    *LATENT, "experts", "experts_per_token", "shared_experts", "expert_width", "dense_layers", "router_groups",
    "router_group_limit", "bias_update_speed", "mtp_depth",
)  # fmt: skip


def shrink_experts(model: ModelSection, layers: int) -> dict[str, object]:
    """What changes in a resolved `model` that now has `layers` blocks."""
    changes: dict[str, object] = {"mtp_depth": min(model.mtp_depth, 2)}
    if model.attention_kind == "mla":
        sizes = {name: min(value, most) for name, most in LATENT.items() if (value := getattr(model, name)) is not None}
        changes |= sizes
        changes["head_dim"] = sizes["qk_nope_head_dim"] + sizes["qk_rope_head_dim"]
        changes["v_head_dim"] = min(sizes["v_head_dim"], sizes["qk_nope_head_dim"] + sizes["qk_rope_head_dim"])
    if model.experts is None:
        return changes
    assert model.expert_width is not None
    dense = sum(index * model.layers // layers < model.dense_layers for index in range(layers))
    changes["dense_layers"] = min(dense, layers - 1)
    changes["expert_width"] = min(model.expert_width, WIDTH)
    changes["shared_experts"] = min(model.shared_experts, 2)
    if model.bias_update_speed:
        changes["bias_update_speed"] = max(model.bias_update_speed, SPEED)
    return changes | (_fewer(model) if model.experts > EXPERTS else {})


def _fewer(model: ModelSection) -> dict[str, object]:
    """Experts, choices and groups where there were many."""
    choices = min(model.experts_per_token, CHOICES)
    if model.router_groups == 1:
        return {"experts": EXPERTS - 1, "experts_per_token": choices}
    groups = min(model.router_groups, GROUPS)
    most = model.router_group_limit or model.router_groups
    limit = min(most, groups - 1) if most < model.router_groups else groups
    experts = {"experts": 2 * groups, "experts_per_token": choices}
    return {**experts, "router_groups": groups, "router_group_limit": limit}
