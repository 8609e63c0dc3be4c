"""HuggingFace's names and layouts of the decoder's parameters, both ways: Llama and Qwen3, and GPT-2.

GPT-2 keeps linears as Conv1D (input dim first) and q, k, v in one; the others differ by name only. Read next:
`spec.py`, `tests/models/test_hf_parity.py` (logits equal in float64).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

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
    """Where one of our parameters lies: tensor `name`; `transposed`: dims the other way round than ours; `rows` [start,
    stop) of the output dim where several of ours share it."""

    name: str
    transposed: bool = False
    rows: tuple[int, int] | None = None


def names(section: ModelSection) -> dict[str, HfTensor]:
    """Our name -> HuggingFace's, for a section in Llama's or Qwen3's form (rms, gated) or GPT-2's (layer, plain)."""
    section = complete(section)
    gpt2 = section.norm == "layer"
    assert section.mlp == ("plain" if gpt2 else "gated"), "no HuggingFace model of ours mixes these"
    return {item.name: _place(item.name, section, gpt2) for item in param_specs(section)}


def _place(name: str, section: ModelSection, gpt2: bool) -> HfTensor:
    module, _, kind = name.rpartition(".")
    prefix = ""
    if module.startswith("blocks."):
        _, layer, module = module.split(".", 2)
        prefix = f"transformer.h.{layer}." if gpt2 else f"model.layers.{layer}."
    full = f"{prefix}{(_GPT2 if gpt2 else _LLAMA)[module]}.{kind}"
    linear = bool(prefix) and not module.endswith("norm")
    input_first = module in ("attention.out", "mlp.down")  # ours are, so that every weight is cut along dim 0
    transposed = linear and kind == "weight" and gpt2 is not input_first
    return HfTensor(full, transposed, _rows(module, section) if gpt2 else None)


def _rows(module: str, section: ModelSection) -> tuple[int, int] | None:
    assert section.head_dim is not None
    size = section.heads * section.head_dim
    starts = {"attention.q": 0, "attention.k": size, "attention.v": 2 * size}
    return None if module not in starts else (starts[module], starts[module] + size)


def from_hf(section: ModelSection, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our parameters out of a HuggingFace state dict, views where the layout allows. KeyError names a missing one."""
    params = {}
    for name, place in names(section).items():
        tensor = state[place.name].t() if place.transposed else state[place.name]
        params[name] = tensor if place.rows is None else tensor[slice(*place.rows)]
    return params


def to_hf(section: ModelSection, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A HuggingFace state dict out of our parameters; a tied head is left out, as `transformers` saves it."""
    parts: dict[str, list[Tensor]] = {}
    transposed = {}
    for name, place in names(section).items():
        parts.setdefault(place.name, []).append(params[name])
        transposed[place.name] = place.transposed
    joined = {name: torch.cat(tensors) if len(tensors) > 1 else tensors[0] for name, tensors in parts.items()}
    return {name: (tensor.t() if transposed[name] else tensor).contiguous() for name, tensor in joined.items()}
