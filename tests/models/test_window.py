"""Sliding window: a query sees itself and the window - 1 tokens before it, inside its document."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.models.helpers import GPT, LLAMA, QWEN, packed, plain_backward, value, worst
from torch import Tensor

from heptad.config.schema import Job
from heptad.errors import ConfigError
from heptad.models.attention import MaskBias, flash_attention, math_attention
from heptad.models.batch import Batch, visible
from heptad.models.build import build
from heptad.models.decoder import Decoder
from heptad.models.dropout import Dropout

SECTIONS = {"gpt": GPT, "llama": LLAMA, "qwen": QWEN}
ROWS = {"packed": [[3, 13, 1], [17]], "whole": [[17], [17]]}


def decoder(name: str, **options: Any) -> Decoder:
    return Decoder(SECTIONS[name].model_copy(update=options), seed=2, device="cpu", dtype=torch.float64)


def by_hand(window: int) -> Any:
    """A core that asks of each pair whether the query sees the key, and takes the softmax of those."""

    def core(q: Tensor, k: Tensor, v: Tensor, batch: Batch, dropout: Dropout | None) -> Tensor:
        length, repeat = batch.ids.shape[1], q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        rows = batch.documents.tolist()
        sees = [
            [[row[i] == row[j] and 0 <= i - j < window for j in range(length)] for i in range(length)] for row in rows
        ]
        weights = (q @ k.mT / math.sqrt(q.shape[-1])).exp() * torch.tensor(sees).unsqueeze(1)
        weights = weights / weights.sum(-1, keepdim=True)
        if dropout is not None:
            weights = dropout.attention(weights, batch.index, batch.index, batch.step)
        return weights @ v

    return core


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("window", [1, 2, 5, 16])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {"attention": kind}) for name in SECTIONS for kind in ("flash", "math")),
        ("llama", {"attention_dropout": 0.2}),
    ],
)
def test_logits_and_gradients_equal_a_softmax_by_hand(
    name: str, options: dict[str, Any], window: int, rows: str
) -> None:
    batch, model = packed(ROWS[rows]), decoder(name, window=window, **options)
    logits, grads = model.logits(batch), plain_backward(model, model(batch))
    for block in model.blocks:
        block.attention.core = by_hand(window)
    assert (logits - model.logits(batch)).abs().max() <= 1e-11
    assert worst(grads, plain_backward(model, model(batch))) <= 1e-10


@pytest.mark.parametrize("attention", ["flash", "math"])
def test_a_token_reaches_window_less_one_tokens_on_in_each_block(attention: str) -> None:
    model, batch = decoder("llama", window=4, attention=attention), packed([[29]])
    ids = batch.ids.clone()
    ids[0, 10] = (ids[0, 10] + 1) % 53
    other = Batch(ids, batch.labels, batch.positions, batch.documents, batch.index, 0)
    changed = (model.logits(batch) != model.logits(other)).any(-1)[0].nonzero().flatten()
    assert changed.tolist() == list(range(10, 10 + 2 * 3 + 1))  # two blocks


def test_a_window_of_the_whole_sequence_is_none() -> None:
    for rows in ROWS.values():
        batch = packed(rows)
        assert torch.equal(visible(batch.documents, 17), visible(batch.documents))
        for attention in ("flash", "math"):
            one, other = (decoder("qwen", window=window, attention=attention)(batch) for window in (17, None))
            assert value(one) == pytest.approx(value(other), rel=1e-13)


def test_one_mask_serves_all_blocks_and_alone_all_batches_of_a_length() -> None:
    whole, mixed = (packed(ROWS[name]) for name in ("whole", "packed"))
    made = MaskBias(5)
    bias = made.of(whole, torch.float32)
    assert bias is not None and bias.shape == (1, 1, 17, 17) and made.kept() == (bias,)
    assert made.of(packed([[17], [17], [17]]), torch.float32) is bias
    other = made.of(mixed, torch.float32)
    assert other is not None and other.shape == (2, 1, 17, 17) and made.of(mixed, torch.float32) is other
    assert made.of(whole, torch.float32) is not other
    assert torch.equal(made.seen(whole)[0], visible(whole.documents, 5)[0])
    assert made.seen(mixed) is made.seen(mixed) and torch.equal(made.seen(mixed), visible(mixed.documents, 5))
    assert made.of(packed([[11]]), torch.float64).shape == (1, 1, 11, 11)  # type: ignore[union-attr]
    assert MaskBias().of(whole, torch.float32) is None


def test_bf16_and_fp32_run_it_too() -> None:
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, heads, 17, 6, generator=generator) for heads in (4, 2, 2))
    for batch in map(packed, ROWS.values()):
        exact = by_hand(5)(*(x.double() for x in (q, k, v)), batch, None)
        for dtype, bound in ((torch.float32, 1e-6), (torch.bfloat16, 0.03)):
            for core in (flash_attention, math_attention):
                found = core(*(x.to(dtype) for x in (q, k, v)), batch, None, MaskBias(5))
                assert found.dtype == dtype and (found.double() - exact).abs().max() <= bound


def test_a_class_of_ones_own_has_no_window() -> None:
    job = Job.model_validate({"model": {"class": "examples.custom_model:TokenShift", "window": 5}})
    with pytest.raises(
        ConfigError, match=r"it would have no effect: .*TokenShift computes its own attention"
    ) as refused:
        build(job)
    assert refused.value.problems[0].field == "model.window"
