"""With weights copied over, logits equal HuggingFace's Llama, Mistral, Qwen3 and GPT-2 in float64: tiny odd sizes.

As they are to 1e-6 (of the largest logit, or of 1 where all are smaller: their norms and rotary tables compute in fp32,
which alone moves a logit of 4 by 2.5e-6), to 1e-10 absolute once those casts are replaced here.
"""

from __future__ import annotations

import types
import warnings
from typing import Any

import pytest
import torch
from tests.models.helpers import GPT
from torch import Tensor, nn

from heptad.config.schema import ModelSection, RopeScaling
from heptad.models.batch import Batch
from heptad.models.decoder import Decoder
from heptad.models.hf import from_hf, names, to_hf

LLAMA = ModelSection(
    layers=3, width=42, heads=6, kv_heads=3, head_dim=22, mlp_width=53, vocab=101, max_positions=68, rope_theta=5003.0
)
SCALED = RopeScaling(kind="llama3", factor=8.0, original_max_positions=29)
YARN = RopeScaling(kind="yarn", factor=4.0, original_max_positions=17, beta_fast=3.0)
SECTIONS = {
    "llama": LLAMA,
    "llama tied": LLAMA.model_copy(update={"tied": True, "norm_eps": 1e-4}),
    "llama with biases": LLAMA.model_copy(update={"qkv_bias": True, "attention_bias": True, "mlp_bias": True}),
    "llama 3 scaling": LLAMA.model_copy(update={"rope_scaling": SCALED}),
    "yarn": LLAMA.model_copy(update={"rope_scaling": YARN}),
    "yarn, own amplitude": LLAMA.model_copy(
        update={"rope_scaling": YARN.model_copy(update={"attention_factor": 1.25})}
    ),
    "qwen3": LLAMA.model_copy(update={"qk_norm": True, "norm_eps": 1e-6}),
    "qwen3 with a window": LLAMA.model_copy(update={"qk_norm": True, "norm_eps": 1e-6, "window": 13}),
    "mistral": LLAMA.model_copy(update={"window": 7}),
    "gpt2": GPT.model_copy(update={"layers": 3, "vocab": 101, "max_positions": 67}),
}


def theirs_of(name: str, std: float = 0.15) -> Any:
    """The transformers model of a section, in float64, random weights (biases and norms too)."""
    section = SECTIONS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the library's own deprecations
        import transformers

        model = _gpt2(transformers, section) if name == "gpt2" else _llama(transformers, section, name)
    model = model.double().eval()
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for key, param in model.named_parameters():
            noise = torch.randn(param.shape, generator=generator, dtype=param.dtype)
            param.copy_(1 + 0.2 * noise if "norm" in key or ".ln_" in key else std * noise)
    return model


def _llama(transformers: Any, section: ModelSection, name: str) -> nn.Module:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": section.rope_theta}
    scaling = section.rope_scaling
    if scaling is not None:
        rope |= {
            "rope_type": scaling.kind,
            "factor": scaling.factor,
            "original_max_position_embeddings": scaling.original_max_positions,
        }
        if scaling.kind == "llama3":
            rope |= {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
        else:
            rope |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow}
            if scaling.attention_factor is not None:
                rope["attention_factor"] = scaling.attention_factor
    sizes: dict[str, Any] = {
        "vocab_size": section.vocab,
        "hidden_size": section.width,
        "intermediate_size": section.mlp_width,
        "num_hidden_layers": section.layers,
        "num_attention_heads": section.heads,
        "num_key_value_heads": section.kv_heads,
        "head_dim": section.head_dim,
        "max_position_embeddings": section.max_positions,
        "rms_norm_eps": section.norm_eps,
        "tie_word_embeddings": section.tied,
        "rope_parameters": rope,
        "attention_bias": section.attention_bias,
        "attn_implementation": "sdpa",
    }
    if name == "mistral":
        return transformers.MistralForCausalLM(transformers.MistralConfig(**sizes, sliding_window=section.window))
    if name.startswith("qwen3"):
        slid = dict(use_sliding_window=section.window is not None, sliding_window=section.window, max_window_layers=0)
        return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes, **slid))
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, mlp_bias=section.mlp_bias))


def _gpt2(transformers: Any, section: ModelSection) -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=section.vocab,
        n_positions=section.max_positions,
        n_embd=section.width,
        n_layer=section.layers,
        n_head=section.heads,
        n_inner=section.mlp_width,
        bos_token_id=0,
        eos_token_id=0,
        layer_norm_epsilon=section.norm_eps,
        attn_implementation="sdpa",
    )
    return transformers.GPT2LMHeadModel(config)


def ours_of(name: str, state: dict[str, Tensor]) -> Decoder:
    model = Decoder(SECTIONS[name], device="cpu", dtype=torch.float64)
    with torch.no_grad():
        for key, value in from_hf(SECTIONS[name], state).items():
            model.get_parameter(key).copy_(value)
    return model


def batch_of(length: int = 61) -> Batch:
    ids = torch.randint(101, (2, length), generator=torch.Generator().manual_seed(1))
    row = torch.arange(length).expand(2, length)
    return Batch(ids, ids, row, torch.zeros_like(row), row, 0)


def replace_fp32_casts(model: nn.Module, section: ModelSection) -> None:
    """Norms and the rotary table of a transformers model in float64, by their own formulas."""
    for module in model.modules():
        kind = type(module).__name__
        if kind.endswith("RMSNorm"):
            module.forward = types.MethodType(_wide_norm, module)  # type: ignore[assignment]
        elif kind.endswith("RotaryEmbedding"):
            module.inv_freq = _their_frequencies(module, section)
            module.forward = types.MethodType(_wide_rotary, module)  # type: ignore[assignment]


def _wide_norm(self: Any, x: Tensor) -> Tensor:
    return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))


def _wide_rotary(self: Any, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    angles = position_ids[..., None].double() * self.inv_freq
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos() * self.attention_scaling, angles.sin() * self.attention_scaling


class _Wide:
    """torch, where fp32 means float64."""

    float = float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _their_frequencies(module: Any, section: ModelSection) -> Tensor:
    """Their own function of the configuration, run with float64 in place of fp32."""
    import transformers.modeling_rope_utils as rope

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rope, "torch", _Wide())
        if section.rope_scaling is not None:
            return rope.ROPE_INIT_FUNCTIONS[section.rope_scaling.kind](module.config)[0]
    assert section.head_dim is not None
    exact = section.rope_theta ** -(torch.arange(0, section.head_dim, 2, dtype=torch.float64) / section.head_dim)
    assert (exact - module.inv_freq).abs().max() < 1e-7
    return exact


@pytest.mark.parametrize("name", SECTIONS)
@pytest.mark.parametrize("std", [0.15, 0.02], ids=["strong weights", "initial weights"])
def test_logits_equal(name: str, std: float) -> None:
    theirs, batch = theirs_of(name, std), batch_of()
    ours = ours_of(name, theirs.state_dict())
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got = ours.logits(batch)
        largest = float(got.abs().max())
        assert (largest > 3) == (std > 0.1)
        assert (got - theirs(batch.ids).logits).abs().max() <= 1e-6 * max(1.0, largest)
        replace_fp32_casts(theirs, SECTIONS[name])
        assert (got - theirs(batch.ids).logits).abs().max() <= 1e-10


def assert_names_cover(section: ModelSection, theirs: nn.Module, ours: Decoder) -> None:
    """Every tensor of theirs has a parameter of ours and comes back as it was."""
    state, back = theirs.state_dict(), to_hf(section, dict(ours.named_parameters()))
    tied = {"lm_head.weight"} if section.tied else set()
    assert set(back) | tied == {key for key, _ in theirs.named_parameters()} | tied
    assert all(torch.equal(value, state[key]) for key, value in back.items())
    assert set(names(section)) == {key for key, _ in ours.named_parameters()}


@pytest.mark.parametrize("name", SECTIONS)
def test_names_cover_every_tensor_and_return(name: str) -> None:
    theirs = theirs_of(name)
    assert_names_cover(SECTIONS[name], theirs, ours_of(name, theirs.state_dict()))
