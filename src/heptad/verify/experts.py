"""A mixture of experts and latent attention made small with the same structure. No torch.

Up to `EXPERTS` experts are kept; of more remain as few as still have groups, more than one choice, and experts that a
token does not meet, and as give every expert rank some, but not all of them as many; their inner width likewise over
the ranks of `etp`. Dense first blocks follow where they stood (`blocks.py`), and some block keeps experts. A capacity
still drops something; the speed of the router's bias is raised, so that a step moves choices. Read next: `shrink.py`,
which calls this.
"""

from __future__ import annotations

from itertools import count

from heptad.config.experts import most_capacity
from heptad.config.schema import LayoutSection, ModelSection
from heptad.config.sizes import holds_rows

EXPERTS, CHOICES, GROUPS, WIDTH = 8, 2, 3, 7
LATENT = {"q_lora_rank": 11, "kv_lora_rank": 9, "qk_nope_head_dim": 5, "qk_rope_head_dim": 4, "v_head_dim": 3}
SPEED = 0.05

SIZES = (
    *LATENT, "experts", "experts_per_token", "shared_experts", "expert_width", "dense_layers", "router_groups",
    "router_group_limit", "capacity_factor", "bias_update_speed", "mtp_depth",
)  # fmt: skip


def shrink_experts(model: ModelSection, layers: int, layout: LayoutSection, seq_len: int) -> dict[str, object]:
    """What changes in a resolved `model` that now has `layers` blocks and reads `seq_len` tokens."""
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
    changes["shared_experts"] = shared = min(model.shared_experts, 2)
    widths = (size for size in count(WIDTH) if _uneven(size, layout.etp))
    width = next(size for size in widths if not shared or holds_rows(shared * size, layout.tp))
    changes["expert_width"] = min(model.expert_width, width)
    if model.bias_update_speed:
        changes["bias_update_speed"] = max(model.bias_update_speed, SPEED)
    changes |= _fewer(model, layout.ep) if model.experts > EXPERTS else {}
    if model.capacity_factor is not None:
        most = most_capacity(model.model_copy(update=changes), seq_len)
        changes["capacity_factor"] = min(model.capacity_factor, most)
    return changes


def _uneven(size: int, ranks: int) -> bool:
    """Whether each of `ranks` ranks holds some of `size` rows, and one fewer than others."""
    return ranks == 1 or (size % ranks > 0 and holds_rows(size, ranks))


def _fewer(model: ModelSection, ep: int) -> dict[str, object]:
    """Experts, choices and groups where there were many; all of them where no smaller number suits the ranks."""
    assert model.experts is not None
    choices, groups = min(model.experts_per_token, CHOICES), min(model.router_groups, GROUPS)
    first = EXPERTS - 1 if groups == 1 else 2 * groups
    fits = (size for size in range(first, model.experts, groups) if _uneven(size, ep))
    found = next(fits, None)
    if found is None:
        return {"experts_per_token": choices} if groups == 1 else {}
    if groups == 1:
        return {"experts": found, "experts_per_token": choices}
    most = model.router_group_limit or model.router_groups
    limit = min(most, groups - 1) if most < model.router_groups else groups
    return {
        "experts": found, "experts_per_token": choices, "router_groups": groups, "router_group_limit": limit
    }  # fmt: skip
