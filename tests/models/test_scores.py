"""Attention with formed scores, and the gated activation: the same bits as plain autograd, and less kept."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from heptad.models.activation import activate
from heptad.models.attention import MaskBias, flash_attention, math_attention
from heptad.models.batch import Batch
from heptad.models.dropout import Dropout

DTYPES = [torch.float32, torch.bfloat16, torch.float64]


def packed(batch: int, length: int) -> Batch:
    """Two documents in the last row."""
    documents = torch.zeros(batch, length, dtype=torch.int64)
    documents[-1, length // 2 :] = 1
    ids = torch.zeros_like(documents)
    return Batch(ids, ids, ids, documents, torch.arange(ids.numel()).view_as(ids), 3)


def plain_attention(q: Tensor, k: Tensor, v: Tensor, batch: Batch, dropout: Dropout | None) -> Tensor:
    """Torch's own operations, every intermediate in the graph."""
    repeat = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
    assert batch.mask is not None
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = (q @ k.transpose(-2, -1)).to(wide) / math.sqrt(q.shape[-1])
    probabilities = scores.masked_fill(~batch.mask, -math.inf).softmax(-1)
    if dropout is not None:
        probabilities = dropout.attention(probabilities, batch.index, batch.index, batch.step)
    return probabilities.to(v.dtype) @ v


def value_and_grads(run: Callable[..., Tensor], inputs: list[Tensor]) -> tuple[list[Tensor], int]:
    """(output and the inputs' gradients, bytes of storages saved)."""
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        out = run(*leaves)
    num_bytes = sum(tensor.untyped_storage().nbytes() for tensor in saved.values())
    dy = torch.randn(out.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, dy)], num_bytes


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rate", [0.0, 0.1])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (3, 1)])
def test_formed_scores_give_the_same_bits_and_keep_less(
    dtype: torch.dtype, rate: float, heads: int, kv_heads: int
) -> None:
    batch, d = packed(2, 13), 6
    generator = torch.Generator().manual_seed(heads)
    inputs = [torch.randn(2, 13, n, d, generator=generator).to(dtype) for n in (heads, kv_heads, kv_heads)]
    dropout = Dropout(rate, 1, "scores") if rate else None
    found, kept = value_and_grads(lambda *x: math_attention(*(t.transpose(1, 2) for t in x), batch, dropout), inputs)
    plain, more = value_and_grads(lambda *x: plain_attention(*(t.transpose(1, 2) for t in x), batch, dropout), inputs)
    assert all(torch.equal(one, other) for one, other in zip(found, plain, strict=True))
    scores = 2 * heads * 13 * 13
    assert kept == scores * (max(dtype.itemsize, 4) + (rate > 0)) + sum(x.numel() for x in inputs) * dtype.itemsize
    assert more >= kept + 2 * 13 * 13  # at least the mask


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_bias_serves_all_blocks_with_the_same_bits(dtype: torch.dtype) -> None:
    batch, shared = packed(2, 13), MaskBias()
    inputs = [torch.randn(2, 13, 4, 6, generator=torch.Generator().manual_seed(n)).to(dtype) for n in range(3)]
    found, _ = value_and_grads(lambda *x: flash_attention(*(t.transpose(1, 2) for t in x), batch, None, shared), inputs)
    plain, _ = value_and_grads(lambda *x: flash_attention(*(t.transpose(1, 2) for t in x), batch, None), inputs)
    assert all(torch.equal(one, other) for one, other in zip(found, plain, strict=True))
    (bias,) = shared.kept()
    assert shared.of(batch, dtype) is bias
    assert shared.of(packed(2, 13), dtype) is not bias


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh"])
def test_the_gated_activation_gives_the_same_bits_and_keeps_gate_and_up(name: str, dtype: torch.dtype) -> None:
    inputs = [torch.randn(7, 11, generator=torch.Generator().manual_seed(n)).to(dtype) for n in range(2)]
    act = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}[name]
    found, kept = value_and_grads(activate(name, True), inputs)
    plain, more = value_and_grads(lambda gate, up: act(gate) * up, inputs)
    assert all(torch.equal(one, other) for one, other in zip(found, plain, strict=True))
    assert (kept, more) == (2 * 77 * dtype.itemsize, 3 * 77 * dtype.itemsize)
    alone, _ = value_and_grads(activate(name, False), inputs[:1])
    assert all(torch.equal(one, other) for one, other in zip(alone, value_and_grads(act, inputs[:1])[0], strict=True))
