"""Parameters and FLOPs counted: published figures, the stated conventions, and the torch model's own matmuls."""

from __future__ import annotations

import pytest
import torch
from tests.models.helpers import GPT, LLAMA, QWEN, packed
from tests.models.moe import DEEPSEEK, SOFTMAX
from torch.utils.flop_counter import FlopCounterMode

from heptad.account.flops import attention_flops, flops_per_token, mfu, model_flops, tokens_per_s
from heptad.account.parameters import active, by_role, main, multiplying, total
from heptad.config.presets import model_preset
from heptad.config.schema import ModelSection
from heptad.models.batch import visible
from heptad.models.decoder import Decoder
from heptad.models.spec import pairs, param_specs

LLAMA_405B = ModelSection.model_validate(model_preset("llama3-405b"))


def test_llama_405b_counts() -> None:
    specs = param_specs(LLAMA_405B)
    assert total(specs) == 405_853_388_800
    assert multiplying(LLAMA_405B) == 403_747_897_344  # 403.75 B: the lookup and the norms do not multiply
    assert by_role(specs) == {
        "embedding": 2_101_346_304,
        "norm": 253 * 16_384,
        "matrix": 401_646_551_040,
        "head": 2_101_346_304,
    }


def test_trainable_parameters_leave_frozen_ones_out() -> None:
    section = LLAMA.model_copy(update={"frozen": ("embed.*",)})
    specs = param_specs(section)
    assert total(specs) - total(specs, trainable_only=True) == 53 * 28


@pytest.mark.parametrize("section", [GPT, LLAMA, QWEN, GPT.model_copy(update={"tied": False})])
def test_flops_equal_the_matmuls_torch_counts(section: ModelSection) -> None:
    """Forward and backward of whole rows; with dropout's formed scores every product is a matmul torch can count."""
    formed = section.model_copy(update={"attention_dropout": 0.5})
    model, batch = Decoder(formed, device="cpu"), packed([[13], [13], [13]])
    with FlopCounterMode(display=False) as counter:
        model(batch).backward()
    assert counter.get_total_flops() == model_flops(section, [13, 13, 13], "full")


MOE = [
    SOFTMAX,
    DEEPSEEK.model_copy(update={"shared_experts": 1, "dense_layers": 0}),
    DEEPSEEK.model_copy(update={"q_lora_rank": None, "mlp": "plain"}),
]


@pytest.mark.parametrize("section", MOE)
def test_flops_of_experts_and_latent_attention_equal_the_matmuls_torch_counts(section: ModelSection) -> None:
    """Without drops every token meets K experts, whichever they are."""
    formed = section.model_copy(update={"attention_dropout": 0.5})
    model, batch = Decoder(formed, device="cpu"), packed([[13], [13], [13]])
    with FlopCounterMode(display=False) as counter:
        model(batch).backward()
    assert counter.get_total_flops() == model_flops(section, [13, 13, 13], "full")


@pytest.mark.parametrize(
    ("name", "whole", "met"),
    [
        ("mixtral-8x7b", 46_702_792_704, 12_879_925_248),
        ("qwen3-30b-a3b", 30_532_122_624, 3_353_032_704),
        ("deepseek-v3", 671_026_404_352, 37_552_282_624),
    ],
)
def test_published_totals_and_active_parameters(name: str, whole: int, met: int) -> None:
    """46.7 and 12.9 B; 30.5 and 3.3 B; 671 and 37 B (36.63 B without the lookup), 11.61 B more for the prediction."""
    section = ModelSection.model_validate(model_preset(name))
    assert (total(main(section)), active(section)) == (whole, met)
    if section.mtp_depth:
        assert met - section.vocab * section.width == 36_625_603_584
        assert total(param_specs(section)) - whole == 11_610_067_968
        plain = section.model_copy(update={"mtp_depth": 0})
        further = multiplying(section) - multiplying(plain)
        block = multiplying(plain) - multiplying(plain.model_copy(update={"layers": 60}))
        assert further == block + 2 * section.width**2 + section.vocab * section.width


def test_c_124_attention_flops() -> None:
    section = ModelSection(layers=2, width=128, heads=8, head_dim=16)
    assert attention_flops(section, [128], "full") == 50_331_648
    assert attention_flops(section, [128], "causal") == 25_165_824
    assert attention_flops(section, [96, 32], "full") == 50_331_648 * (96**2 + 32**2) // 128**2
    assert model_flops(section, [96, 32], "causal") == 6 * multiplying(section) * 128 + 25_165_824 * 10 // 16
    assert flops_per_token(section, 128, "full") == 6 * multiplying(section) + 50_331_648 / 128


@pytest.mark.parametrize("window", [None, 1, 2, 17, 32, 95, 96, 300])
def test_c_124_a_window_leaves_the_pairs_that_its_mask_leaves(window: int | None) -> None:
    """Packed documents too: every visible pair, the diagonal at half as without a window."""
    lengths = [96, 1, 31]
    near = sum(pairs(length, window) for length in lengths)
    documents = torch.arange(3).repeat_interleave(torch.tensor(lengths)).view(1, -1)
    assert int(visible(documents, window).sum()) == (near + sum(lengths)) / 2
    section = ModelSection(layers=2, width=128, heads=8, head_dim=16, window=window)
    assert attention_flops(section, lengths, "full") == 6 * 2 * 8 * 2 * 16 * near
    assert attention_flops(section, lengths, "causal") * 2 == attention_flops(section, lengths, "full")
    plain = section.model_copy(update={"window": None})
    if window is None or window >= 96:
        assert model_flops(section, lengths, "causal") == model_flops(plain, lengths, "causal")


def test_c_124_mfu_never_passes_one_at_long_context() -> None:
    """A device at its peak that skips the masked half: MFU is 1 under causal, and would pass it under full."""
    section, length, peak = ModelSection(layers=2, width=128, heads=8), 1 << 17, 1e12
    seconds = model_flops(section, [length], "causal") / peak
    assert mfu(model_flops(section, [length], "causal"), seconds, 1, peak) == 1.0
    assert mfu(model_flops(section, [length], "full"), seconds, 1, peak) > 1.9


def test_c_124_published_mfu_of_llama_405b() -> None:
    """arXiv 2407.21783, table 4: 16,384 H100, 8K, 16M tokens a batch, 400 TFLOP/s a device, 41 %."""
    assert mfu(400e12, 1.0, 1, 989e12) == pytest.approx(0.41, abs=0.01)
    attention = 6 * 126 * 128 * (128 + 128) * 8192 // 2
    assert flops_per_token(LLAMA_405B, 8192, "causal") == 6 * 403_747_897_344 + attention


def test_c_123_tokens_per_second_count_each_token_once() -> None:
    assert tokens_per_s(global_batch=8, seq_len=16, seconds=0.5) == 256
    batch = packed([[16], [9, 7]])
    assert batch.ids.numel() == 32 and batch.num_targets() == 29  # supervised tokens are another count
