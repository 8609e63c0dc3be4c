"""Core attention as a layout with C context ranks rounds it: each part of the queries against each part of the keys.

For the bound in bf16 (`judge.py`): context ranks do more than reorder sums. A query's output is made of parts, each
over some of the keys and rounded to bf16, merged by log-sum-exp; the gradient of a query, key or value is a sum of such
parts. Here both happen too, by plain autograd on formed scores, so as right as a figure in bf16 with C parts can be,
without any of the code under test. Read next: `reference.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from heptad.models.attention import Attention
from heptad.models.batch import Batch, visible
from heptad.models.build import Model
from heptad.models.dropout import Dropout
from heptad.models.mla import LatentAttention
from heptad.models.scores import repeated


@contextmanager
def partial_keys(model: Model, number: int, offset: int, window: int | None) -> Iterator[None]:
    """Every block's core attention in `number` parts; `offset`: tokens by which the cuts are moved."""

    def core(q: Tensor, k: Tensor, v: Tensor, batch: Batch, dropout: Dropout | None) -> Tensor:
        return attention(q, k, v, batch, dropout, number, offset, window)

    blocks = [module for module in model.module.modules() if isinstance(module, (Attention, LatentAttention))]
    before = [block.core for block in blocks]
    try:
        for block in blocks:
            block.core = core
        yield
    finally:
        for block, right in zip(blocks, before, strict=True):
            block.core = right


def attention(
    q: Tensor, k: Tensor, v: Tensor, batch: Batch, dropout: Dropout | None, number: int, offset: int, window: int | None
) -> Tensor:
    """See `models.attention.Core`. Token t is in part (t + offset) · number // L, modulo `number`."""
    length, mask = q.shape[2], visible(batch.documents, window)
    part = ((torch.arange(length) + offset) * number // length) % number
    places = [found for at in range(number) if len(found := (part == at).nonzero().flatten())]
    out = v.new_empty(*q.shape[:-1], v.shape[-1])
    for queries in places:
        seen = [_part(q, k, v, mask, queries, keys, batch, dropout) for keys in places]
        merged = torch.stack([lse for _, lse in seen]).logsumexp(0)  # [B, H, n]
        total = torch.stack([some.to(lse.dtype) * (lse - merged).exp().unsqueeze(-1) for some, lse in seen]).sum(0)
        out = out.index_copy(2, queries, total.to(q.dtype))
    return out


def _part(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    queries: Tensor,
    keys: Tensor,
    batch: Batch,
    dropout: Dropout | None,
) -> tuple[Tensor, Tensor]:
    """Output in q's dtype [B, H, n, d], log-sum-exp in at least fp32 [B, H, n], of these queries over these keys."""
    heads, wide = q.shape[1], torch.promote_types(q.dtype, torch.float32)
    wide_q, wide_k, wide_v = (x.to(wide) for x in (q[:, :, queries], k[:, :, keys], v[:, :, keys]))
    wide_k, wide_v = repeated(wide_k, heads), repeated(wide_v, heads)
    hidden = ~mask[:, :, queries][..., keys]
    scores = (wide_q @ wide_k.transpose(-2, -1) / math.sqrt(q.shape[-1])).masked_fill(hidden, -1e30)
    lse = scores.logsumexp(-1)
    probabilities = (scores - lse.unsqueeze(-1)).exp().masked_fill(hidden, 0)
    if dropout is not None:
        tensors, drop = dropout.attention_map(heads, batch.index[:, queries], batch.index[:, keys], batch.step)
        probabilities = drop(probabilities, *tensors)
    return (probabilities @ wide_v).to(q.dtype), lse
