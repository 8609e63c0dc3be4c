"""HuggingFace's names and layouts of the decoder's parameters, both ways: Llama, Qwen3, Mixtral, DeepSeek-V3; GPT-2.

GPT-2 keeps linears as Conv1D (input dim first) and q, k, v in one. Of experts gate and up are one stack, as
`transformers` holds them in memory (5.x); of DeepSeek-V3 the rotated features of a head are interleaved, so rows of
what makes them are permuted. Its multi-token prediction has no place in that model and is left out. Read next:
`spec.py`, `tests/models/test_hf_parity.py` (logits equal in float64).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from heptad.config.experts import routes
from heptad.config.schema import ModelSection
from heptad.models.spec import complete, param_specs

_LLAMA = {
    "embed.tokens": "model.embed_tokens",
    "attention.norm": "input_layernorm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "attention.out": "self_attn.o_proj",
    "mlp.norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
    "head.norm": "model.norm",
    "head.out": "lm_head",
}
_LATENT = {
    "attention.q_a": "self_attn.q_a_proj",
    "attention.q_norm": "self_attn.q_a_layernorm",
    "attention.q_b": "self_attn.q_b_proj",
    "attention.kv_a": "self_attn.kv_a_proj_with_mqa",
    "attention.kv_norm": "self_attn.kv_a_layernorm",
    "attention.kv_b": "self_attn.kv_b_proj",
}
_EXPERTS = {
    "mlp.router.gate": "mlp.gate",
    "mlp.shared.gate": "mlp.shared_experts.gate_proj",
    "mlp.shared.up": "mlp.shared_experts.up_proj",
    "mlp.shared.down": "mlp.shared_experts.down_proj",
}
_STACKS = {"gate": "gate_up_proj", "up": "gate_up_proj", "down": "down_proj"}
_GPT2 = {
    "embed.tokens": "transformer.wte",
    "embed.positions": "transformer.wpe",
    "attention.norm": "ln_1",
    "attention.q": "attn.c_attn",
    "attention.k": "attn.c_attn",
    "attention.v": "attn.c_attn",
    "attention.out": "attn.c_proj",
    "mlp.norm": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
    "head.norm": "transformer.ln_f",
    "head.out": "lm_head",
}


@dataclass(frozen=True, slots=True)
class HfTensor:
    """Where one of our parameters lies: tensor `name`; `transposed`: its last two dims lie the other way round; `rows`
    [start, stop) of the output dim where several of ours share it; `order`: for each of our rows, the row of theirs."""

    name: str
    transposed: bool = False
    rows: tuple[int, int] | None = None
    order: tuple[int, ...] | None = None


def names(section: ModelSection) -> dict[str, HfTensor]:
    """Our name -> HuggingFace's, for a section in Llama's or Qwen3's form (rms, gated) or GPT-2's (layer, plain)."""
    section = complete(section)
    gpt2 = section.norm == "layer"
    assert section.mlp == ("plain" if gpt2 else "gated"), "no HuggingFace model of ours mixes these"
    main = (item.name for item in param_specs(section) if not item.name.startswith("head.predictions."))
    return {name: _place(name, section, gpt2) for name in main}


def bias_names(section: ModelSection) -> dict[str, str]:
    """Router -> HuggingFace's tensor of the bias of its choice."""
    routed = (layer for layer in range(section.layers) if routes(section, layer))
    return {f"blocks.{i}.mlp.router": f"model.layers.{i}.mlp.gate.e_score_correction_bias" for i in routed}


def _place(name: str, section: ModelSection, gpt2: bool) -> HfTensor:
    module, _, kind = name.rpartition(".")
    prefix = ""
    if module.startswith("blocks."):
        _, layer, module = module.split(".", 2)
        prefix = f"transformer.h.{layer}." if gpt2 else f"model.layers.{layer}."
    if module.startswith("mlp.experts."):
        return _stack(prefix, module.rpartition(".")[2], section)
    known = _GPT2 if gpt2 else {**_LLAMA, **_EXPERTS, **(_LATENT if section.attention_kind == "mla" else {})}
    full = f"{prefix}{known[module]}.{kind}"
    linear = bool(prefix) and not module.endswith("norm")
    input_first = module in ("attention.out", "mlp.down", "mlp.shared.down")  # ours, to cut weights along dim 0
    transposed = linear and kind == "weight" and gpt2 is not input_first
    return HfTensor(full, transposed, _rows(module, section) if gpt2 else None, _order(module, section))


def _stack(prefix: str, part: str, section: ModelSection) -> HfTensor:
    """gate and up [E, 2F, D] are one, and down lies [E, D, F]."""
    inner = section.expert_width
    assert inner is not None
    rows = {"gate": (0, inner), "up": (inner, 2 * inner)}.get(part)
    return HfTensor(f"{prefix}mlp.experts.{_STACKS[part]}", part == "down", rows)


def _order(module: str, section: ModelSection) -> tuple[int, ...] | None:
    """Rotated features: theirs turn in pairs (0, 1), (2, 3), …, ours in (0, rope/2), (1, rope/2 + 1), …"""
    nope, rope = section.qk_nope_head_dim, section.qk_rope_head_dim
    if section.attention_kind != "mla" or module not in ("attention.q", "attention.q_b", "attention.kv_a"):
        return None
    assert nope is not None and rope is not None and section.kv_lora_rank is not None
    turned = [*range(0, rope, 2), *range(1, rope, 2)]
    if module == "attention.kv_a":
        return (*range(section.kv_lora_rank), *(section.kv_lora_rank + at for at in turned))
    head = [*range(nope), *(nope + at for at in turned)]
    return tuple(first * (nope + rope) + at for first in range(section.heads) for at in head)


def _rows(module: str, section: ModelSection) -> tuple[int, int] | None:
    assert section.head_dim is not None
    size = section.heads * section.head_dim
    starts = {"attention.q": 0, "attention.k": size, "attention.v": 2 * size}
    return None if module not in starts else (starts[module], starts[module] + size)


def from_hf(section: ModelSection, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our parameters out of a HuggingFace state dict, views where the layout allows. KeyError names a missing one."""
    params = {}
    for name, place in names(section).items():
        tensor = state[place.name].transpose(-1, -2) if place.transposed else state[place.name]
        if place.rows is not None:
            start, stop = place.rows
            tensor = tensor.narrow(max(tensor.dim() - 2, 0), start, stop - start)
        params[name] = tensor if place.order is None else tensor[list(place.order)]
    return params


def to_hf(section: ModelSection, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A HuggingFace state dict out of our parameters; a tied head is left out, as `transformers` saves it."""
    parts: dict[str, list[Tensor]] = {}
    transposed = {}
    for name, place in names(section).items():
        tensor = params[name]
        if place.order is not None:
            tensor = torch.empty_like(tensor).index_copy_(0, torch.tensor(place.order), tensor.detach())
        parts.setdefault(place.name, []).append(tensor)
        transposed[place.name] = place.transposed
    joined = {
        name: torch.cat(tensors, max(tensors[0].dim() - 2, 0)) if len(tensors) > 1 else tensors[0]
        for name, tensors in parts.items()
    }
    return {
        name: (tensor.transpose(-1, -2) if transposed[name] else tensor).contiguous() for name, tensor in joined.items()
    }
