"""Rules of a mixture of experts, of latent attention (MLA) and of multi-token prediction: sizes, idle options, layouts.

The sizes' rules hold for a section alone, so `models/spec.complete` asks them too. Read next: `check.py`, `unbuilt.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from heptad.config.effect import idle, is_set
from heptad.config.schema import Job, LayoutSection, ModelSection
from heptad.config.sizes import divisors, holds_rows
from heptad.errors import Problem

LATENT = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
"""Sizes that latent attention must be given; `q_lora_rank` may be left out: queries are then not compressed."""

ROUTED = (
    "experts_per_token", "shared_experts", "expert_width", "dense_layers", "router", "router_groups",
    "router_group_limit", "normalise_top_k", "routed_scale", "capacity_factor", "aux_loss", "balance_loss", "z_loss",
    "jitter", "bias_update_speed",
)  # fmt: skip
DEEPSEEK = ("router_groups", "router_group_limit", "balance_loss", "bias_update_speed")


def problems(job: Job, model: ModelSection) -> Iterator[Problem]:
    """`model` is the section with its preset filled in."""
    yield from sizes(model)
    yield from _idle(model)
    yield from _idle_of_sizes(model, job.data.seq_len)
    yield from _carved(job.layout, model)
    yield from _layouts(job, model)


def sizes(model: ModelSection) -> Iterator[Problem]:
    """What of one section does not fit together."""
    if model.attention_kind == "mla":
        yield from _latent(model)
    if model.experts is not None:
        yield from _experts(model, model.experts)


def _latent(model: ModelSection) -> Iterator[Problem]:
    missing = [name for name in LATENT if getattr(model, name) is None]
    for name in missing:
        rule = 'attention_kind = "mla" has no default for it: its sizes are its own'
        yield Problem(f"model.{name}", "(absent)", rule, f'give {name}, or attention_kind = "gqa"')
    if model.positions != "rotary":
        rule = 'attention_kind = "mla" keeps qk_rope_head_dim features of a head for rotary positions'
        yield Problem("model.positions", model.positions, rule, 'positions = "rotary", or attention_kind = "gqa"')
    if missing:
        return
    nope, rope, value = model.qk_nope_head_dim or 0, model.qk_rope_head_dim or 0, model.v_head_dim or 0
    if rope % 2:
        rule = f"rotary positions turn pairs of elements, so qk_rope_head_dim is even (it is {rope})"
        yield Problem("model.qk_rope_head_dim", rope, rule, f"qk_rope_head_dim = {rope - 1 or 2} or {rope + 1}")
    if value > nope + rope:
        rule = f"values are padded to the width of queries, qk_nope_head_dim + qk_rope_head_dim = {nope + rope}"
        yield Problem("model.v_head_dim", value, rule, f"v_head_dim <= {nope + rope}")
    if model.head_dim not in (None, nope + rope):
        rule = f"under mla a head is qk_nope_head_dim + qk_rope_head_dim = {nope + rope} wide"
        yield Problem("model.head_dim", model.head_dim, rule, "remove it")
    if model.kv_heads not in (None, model.heads):
        rule = f"under mla every query head has keys and values of its own: kv_heads = heads = {model.heads}"
        yield Problem("model.kv_heads", model.kv_heads, rule, "remove it")
    yield from idle("model", model, ("qk_norm",), "mla normalises its latents instead", 'attention_kind = "gqa"')


def _experts(model: ModelSection, experts: int) -> Iterator[Problem]:
    chosen, groups, limit = model.experts_per_token, model.router_groups, model.router_group_limit
    if chosen > experts:
        rule = f"a token goes to different experts, of which there are {experts}"
        yield Problem("model.experts_per_token", chosen, rule, f"experts_per_token <= {experts}")
    if model.dense_layers >= model.layers:
        rule = f"some block has experts: dense_layers < layers = {model.layers}"
        yield Problem("model.dense_layers", model.dense_layers, rule, f"dense_layers <= {model.layers - 1}")
    if experts % groups:
        rule = f"groups are of equal size: router_groups divides experts ({experts} % {groups} = {experts % groups})"
        yield Problem("model.router_groups", groups, rule, "a divisor of experts")
    elif limit is not None and limit > groups:
        rule = f"a token's experts lie in at most this many of the router_groups = {groups}"
        yield Problem("model.router_group_limit", limit, rule, f"router_group_limit <= {groups}")
    elif limit is not None and chosen <= experts and limit * (experts // groups) < chosen:
        rule = f"{limit} groups of {experts // groups} have fewer experts than experts_per_token = {chosen}"
        fix = f"router_group_limit >= {-(-chosen // (experts // groups))}"
        yield Problem("model.router_group_limit", limit, rule, fix)
    if model.mlp_bias:
        rule = "routed experts are stacks of matrices without biases"
        yield Problem("model.mlp_bias", True, rule, "mlp_bias = false")


def _idle(model: ModelSection) -> Iterator[Problem]:
    if model.experts is None:
        yield from idle("model", model, ROUTED, "there are no experts", "give model.experts")
    elif model.router == "softmax":
        yield from idle("model", model, DEEPSEEK, 'router is "softmax"', 'router = "deepseek"')
    else:
        why = 'router "deepseek" has a loss a sequence of its own'
        yield from idle("model", model, ("aux_loss",), why, "balance_loss")
    if model.attention_kind == "gqa":
        names = ("q_lora_rank", *LATENT)
        yield from idle("model", model, names, 'attention_kind is "gqa"', 'attention_kind = "mla"')
    if not model.mtp_depth:
        why = "nothing further is predicted (mtp_depth = 0)"
        yield from idle("model", model, ("mtp_weight",), why, "mtp_depth = 1")


def _idle_of_sizes(model: ModelSection, seq_len: int) -> Iterator[Problem]:
    """Options that do nothing at these sizes, and the default that would leave a router untrained."""
    if model.mtp_depth >= seq_len:
        rule = f"depth k predicts k + 1 tokens on, inside a sequence of data.seq_len = {seq_len}: depths below that"
        yield Problem("model.mtp_depth", model.mtp_depth, rule, f"mtp_depth <= {seq_len - 1}, or a longer seq_len")
    experts, chosen, groups = model.experts, model.experts_per_token, model.router_groups
    if experts is None or chosen > experts:
        return
    if chosen == experts:
        names = ("aux_loss", "balance_loss", "bias_update_speed")
        why = f"every token goes to all {experts} experts, so their load is even"
        yield from idle("model", model, names, why, f"experts_per_token <= {experts - 1}")
    if chosen == 1 and model.normalise_top_k:
        rule = "the one weight of a token divided by itself is 1: no gradient of the loss would reach the router"
        yield Problem("model.normalise_top_k", True, rule, "normalise_top_k = false, or experts_per_token = 2")
    factor = model.capacity_factor
    if factor is not None and factor * chosen * seq_len * (1 - 1e-12) > experts * (seq_len - 1):  # as the router rounds
        why = f"each expert has room for all data.seq_len = {seq_len} tokens of a sequence, so none is dropped"
        fix = f"capacity_factor <= {most_capacity(model, seq_len):g}"
        yield from idle("model", model, ("capacity_factor",), why, fix)
    if groups > 1 and model.router == "deepseek" and (model.router_group_limit or groups) == groups:
        why = f"a token's experts may lie in all {groups} groups"
        fewer = (groups - 1) * (experts // groups) >= chosen
        fix = f"router_group_limit <= {groups - 1}" if fewer else "fewer experts_per_token"
        yield from idle("model", model, ("router_groups",), why, fix)


def _carved(layout: LayoutSection, model: ModelSection) -> Iterator[Problem]:
    """The expert axes: each of their ranks holds an expert, or rows of one. What they are carved from: `sizes.py`."""
    ep, etp, inner = layout.ep, layout.etp, layout.ep_inner
    if model.experts is None:
        yield from idle("layout", layout, ("ep", "etp", "ep_inner"), "there are no experts", "give model.experts")
        return
    if layout.engine == "fsdp2" and ep * etp > 1:
        rule = f"fsdp2 cuts every parameter over all data ranks, but ep × etp = {ep * etp} cuts experts over some"
        yield Problem("layout.engine", layout.engine, rule, 'engine = "heptad", or ep = 1 and etp = 1')
    if not holds_rows(model.experts, ep):
        rule = f"each of the ep = {ep} ranks holds an expert, {-(-model.experts // ep)} of the {model.experts} a rank"
        yield Problem("layout.ep", ep, rule, f"ep = {_degree(model.experts, ep)}")
    width = model.expert_width or model.mlp_width
    if not holds_rows(width, etp):
        rule = f"each of the etp = {etp} ranks holds rows of an expert, {-(-width // etp)} of the {width} a rank"
        yield Problem("layout.etp", etp, rule, f"etp = {_degree(width, etp)}")
    if inner > 1 and ep == 1:
        yield from idle("layout", layout, ("ep_inner",), "nothing is dispatched between ranks (ep = 1)", "ep > 1")
    elif inner > 1 and (ep % inner or inner == ep):
        between = [item for item in divisors(ep) if 1 < item < ep]
        rule = f"ep_inner is the ranks of a node among ep = {ep}: it divides them, and there are several nodes"
        fix = f"ep_inner = {' or '.join(map(str, between))}" if between else "an ep with two factors, such as 4"
        yield Problem("layout.ep_inner", inner, rule, f"{fix}, or 1 for a dispatch in one step")


def _degree(rows: int, degree: int) -> int:
    """The largest divisor of `degree`, so that it still divides the ranks, of which each rank holds one of `rows`."""
    return max(item for item in divisors(degree)[:-1] if holds_rows(rows, item))


def _layouts(job: Job, model: ModelSection) -> Iterator[Problem]:
    """Layouts in which further predictions have no meaning, or no token table of their own."""
    if model.mtp_depth and job.layout.pp > 1 and job.layout.schedule == "pipedream":
        rule = "mtp_depth reads the token table on the last stage too, and pipedream would update it at two times"
        yield Problem("model.mtp_depth", model.mtp_depth, rule, 'mtp_depth = 0, or schedule = "1f1b"')
    if model.mtp_depth and job.layout.engine == "fsdp2":
        rule = 'engine = "fsdp2" wraps each unit by itself, and mtp_depth reads the token table in the last one too'
        yield Problem("model.mtp_depth", model.mtp_depth, rule, 'engine = "heptad", or mtp_depth = 0')


def routes(model: ModelSection, layer: int) -> bool:
    """Whether block `layer` has experts."""
    return model.experts is not None and layer >= model.dense_layers


def updates_bias(model: ModelSection) -> bool:
    """Whether the router has a bias that each step's load moves."""
    return model.experts is not None and model.router == "deepseek" and is_set(model, "bias_update_speed")


def most_capacity(model: ModelSection, seq_len: int) -> float:
    """The largest capacity_factor, in thousandths, with which a sequence can have a token too many for an expert."""
    assert model.experts is not None
    return math.floor(1000 * model.experts * (seq_len - 1) / (model.experts_per_token * seq_len)) / 1000


def balances(model: ModelSection) -> float:
    """The coefficient of the loss that keeps experts evenly loaded."""
    return model.balance_loss if model.router == "deepseek" else model.aux_loss
