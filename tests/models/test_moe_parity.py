"""With weights copied over, logits equal HuggingFace's Mixtral, Qwen3-MoE and DeepSeek-V3 in float64.

To 1e-6 as they are (routers and norms of theirs compute in fp32), to 1e-10 once those casts are replaced here.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tests.models.test_hf_parity import _Wide, assert_names_cover, batch_of, replace_fp32_casts
from torch import Tensor, nn

from heptad.config.schema import ModelSection, RopeScaling
from heptad.models.decoder import Decoder
from heptad.models.hf import bias_names, from_hf, names
from heptad.models.router import routers

MIXTRAL = ModelSection(
    layers=3, width=42, heads=6, kv_heads=3, head_dim=22, mlp_width=53, vocab=101, max_positions=68, rope_theta=5003.0,
    experts=7, experts_per_token=2, expert_width=31,
)  # fmt: skip
DEEPSEEK = ModelSection(
    layers=3, width=42, heads=6, mlp_width=53, vocab=101, max_positions=68, rope_theta=5003.0, norm_eps=1e-6,
    attention_kind="mla", q_lora_rank=19, kv_lora_rank=17, qk_nope_head_dim=11, qk_rope_head_dim=6, v_head_dim=13,
    experts=12, experts_per_token=3, expert_width=31, shared_experts=2, dense_layers=1, router="deepseek",
    router_groups=4, router_group_limit=2, routed_scale=2.5, bias_update_speed=0.1,
)  # fmt: skip
YARN = RopeScaling(kind="yarn", factor=4.0, original_max_positions=17, beta_fast=3.0)
SECTIONS = {
    "mixtral": MIXTRAL,
    "qwen3_moe": MIXTRAL.model_copy(update={"qk_norm": True, "norm_eps": 1e-6}),
    "qwen3_moe, weights not normalised": MIXTRAL.model_copy(
        update={"qk_norm": True, "norm_eps": 1e-6, "normalise_top_k": False}
    ),
    "deepseek_v3": DEEPSEEK,
    "deepseek_v3, whole queries, yarn": DEEPSEEK.model_copy(
        update={"q_lora_rank": None, "rope_scaling": YARN, "dense_layers": 2}
    ),
}


def _shared(section: ModelSection) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": section.rope_theta}
    if section.rope_scaling is not None:
        rope |= {"rope_type": "yarn", "factor": section.rope_scaling.factor, "mscale": 1.0, "mscale_all_dim": 1.0}
        rope |= {"original_max_position_embeddings": section.rope_scaling.original_max_positions}
        rope |= {"beta_fast": section.rope_scaling.beta_fast, "beta_slow": section.rope_scaling.beta_slow}
    return dict(
        vocab_size=section.vocab, hidden_size=section.width, num_hidden_layers=section.layers,
        num_attention_heads=section.heads, max_position_embeddings=section.max_positions,
        rms_norm_eps=section.norm_eps, num_experts_per_tok=section.experts_per_token, rope_parameters=rope,
        attn_implementation="sdpa", tie_word_embeddings=False, experts_implementation="eager",
    )  # fmt: skip


def _build(transformers: Any, name: str, section: ModelSection) -> nn.Module:
    sizes = _shared(section)
    kind = name.partition(",")[0]
    if kind == "deepseek_v3":
        config = transformers.DeepseekV3Config(
            **sizes, num_key_value_heads=section.heads, intermediate_size=section.mlp_width,
            moe_intermediate_size=section.expert_width, n_routed_experts=section.experts,
            n_shared_experts=section.shared_experts, routed_scaling_factor=section.routed_scale,
            kv_lora_rank=section.kv_lora_rank, q_lora_rank=section.q_lora_rank,
            qk_rope_head_dim=section.qk_rope_head_dim, v_head_dim=section.v_head_dim,
            qk_nope_head_dim=section.qk_nope_head_dim, n_group=section.router_groups,
            topk_group=section.router_group_limit, first_k_dense_replace=section.dense_layers,
            norm_topk_prob=section.normalise_top_k,
        )  # fmt: skip
        return transformers.DeepseekV3ForCausalLM(config)
    sizes |= dict(num_key_value_heads=section.kv_heads, head_dim=section.head_dim)
    if kind == "mixtral":
        config = transformers.MixtralConfig(
            **sizes, intermediate_size=section.expert_width, num_local_experts=section.experts
        )
        return transformers.MixtralForCausalLM(config)
    config = transformers.Qwen3MoeConfig(
        **sizes, intermediate_size=section.mlp_width, moe_intermediate_size=section.expert_width,
        num_experts=section.experts, norm_topk_prob=section.normalise_top_k,
    )  # fmt: skip
    return transformers.Qwen3MoeForCausalLM(config)


def theirs_of(name: str) -> Any:
    """The transformers model of a section, in float64, random weights, and biases of routers that move the choice."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the library's own deprecations
        import transformers

        model = _build(transformers, name, SECTIONS[name]).double().eval()
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for key, param in [*model.named_parameters(), *model.named_buffers()]:
            noise = torch.randn(param.shape, generator=generator, dtype=param.dtype)
            if key.endswith("e_score_correction_bias"):
                param.copy_(0.3 * noise)
            elif not key.endswith("inv_freq"):
                param.copy_(1 + 0.2 * noise if "norm" in key else 0.15 * noise)
    return model


def ours_of(name: str, state: dict[str, Tensor]) -> Decoder:
    model = Decoder(SECTIONS[name], device="cpu", dtype=torch.float64)
    with torch.no_grad():
        for key, value in from_hf(SECTIONS[name], state).items():
            model.get_parameter(key).copy_(value)
    for key, router in routers(model).items():
        if router.bias is not None:
            router.bias.copy_(state[bias_names(SECTIONS[name])[key]])
    return model.eval()


@contextmanager
def wide_routers(name: str) -> Iterator[None]:
    """Their routers' fp32 is float64 inside."""
    kind = name.partition(",")[0]
    module = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "torch", _Wide())
        patch.setattr(Tensor, "float", Tensor.double)
        yield


def _widened(theirs: nn.Module, section: ModelSection) -> None:
    """Norms and rotary tables in float64; the rotation of MLA is of a part of a head."""
    turned = section
    if section.attention_kind == "mla":
        turned = section.model_copy(update={"head_dim": section.qk_rope_head_dim})
    replace_fp32_casts(theirs, turned)
    for module in theirs.modules():
        if type(module).__name__.endswith("Router") and hasattr(module, "e_score_correction_bias"):
            module.e_score_correction_bias = module.e_score_correction_bias.double()  # type: ignore[operator]


@pytest.mark.parametrize("name", SECTIONS)
def test_logits_equal(name: str) -> None:
    theirs, batch = theirs_of(name), batch_of()
    ours = ours_of(name, theirs.state_dict())
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got = ours.logits(batch)
        largest = float(got.abs().max())
        assert largest > 1
        assert (got - theirs(batch.ids).logits).abs().max() <= 1e-5 * max(1.0, largest)
        _widened(theirs, SECTIONS[name])
        with wide_routers(name):
            assert (got - theirs(batch.ids).logits).abs().max() <= 1e-10


@pytest.mark.parametrize("name", SECTIONS)
def test_names_cover_every_tensor_and_return(name: str) -> None:
    theirs = theirs_of(name)
    state = theirs.state_dict()
    assert_names_cover(SECTIONS[name], theirs, ours_of(name, state))
    biases = {key for key in state if key.endswith("e_score_correction_bias")}
    assert biases == (set(bias_names(SECTIONS[name]).values()) if biases else set())


def test_multi_token_prediction_is_left_out() -> None:
    section = DEEPSEEK.model_copy(update={"mtp_depth": 1})
    assert names(section) == names(DEEPSEEK)
