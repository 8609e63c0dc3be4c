"""Attention in parts is attention: what sets the bound of context ranks in bf16 computes the same function."""

from __future__ import annotations

import pytest
import torch
from tests.verify.layouts import layout_job

from heptad.models.attention import MaskBias, math_attention
from heptad.models.batch import Batch
from heptad.models.build import build
from heptad.models.dropout import Dropout
from heptad.verify.partial_keys import attention, partial_keys


def batch_of(length: int) -> Batch:
    documents = torch.stack([torch.zeros(length, dtype=torch.int64), (torch.arange(length) > 4) * 1])
    index = torch.arange(2 * length).view(2, length)
    return Batch(index, index, index % length, documents, index, step=3)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("rate", [0.0, 0.3])
@pytest.mark.parametrize(("number", "offset"), [(1, 0), (2, 0), (3, 4), (4, 11), (16, 1)])
def test_parts_of_queries_and_keys_give_the_whole(number: int, offset: int, rate: float, window: int | None) -> None:
    batch, generator = batch_of(11), torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(2, heads, 11, 6, dtype=torch.float64, generator=generator) for heads in (4, 2, 2))
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    dropout = Dropout(rate, 1, "blocks.0.attention") if rate else None
    found = attention(q, k, v, batch, dropout, number, offset, window)
    right = math_attention(q, k, v, batch, dropout, MaskBias(window))
    torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-12)
    weights = torch.randn(found.shape, dtype=torch.float64, generator=generator)
    grads = [torch.autograd.grad((out * weights).sum(), leaves) for out in (found, right)]
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


def test_the_models_own_core_comes_back() -> None:
    job = layout_job()
    model = build(job)
    before = [block.attention.core for block in model.units[1:-1]]  # type: ignore[union-attr]
    with partial_keys(model, 2, 0, job.model):
        assert not set(map(id, before)) & {id(block.attention.core) for block in model.units[1:-1]}  # type: ignore[union-attr]
    assert [block.attention.core for block in model.units[1:-1]] == before  # type: ignore[union-attr]
