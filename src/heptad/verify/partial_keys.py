"""Core attention as a layout with C context ranks rounds it: each part of the queries against each part of the keys.

For the bound in bf16 (`judge.py`): context ranks do more than reorder sums. A query's output is made of parts, each
over some of the keys and rounded to bf16, merged by log-sum-exp; the gradient of a query, key or value is a sum of such
parts. What each score's gradient is less by, Σ over all keys of a query, no part can know: it is taken from the merged
output, which is rounded (dout · out, as in FlashAttention-2). All this happens here too, by plain autograd on formed
scores, so as right as a figure in bf16 with C parts can be, without any of the code under test. Where the model forms
its scores itself, products with queries, keys and values are rounded as its own are. Read next: `reference.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from heptad.config.recompute import forms_scores
from heptad.config.schema import ModelSection
from heptad.models.attention import Attention
from heptad.models.batch import Batch, visible
from heptad.models.build import Model
from heptad.models.dropout import Dropout
from heptad.models.mla import LatentAttention
from heptad.models.scores import repeated


@contextmanager
def partial_keys(model: Model, number: int, offset: int, section: ModelSection) -> Iterator[None]:
    """Every block's core attention in `number` parts; `offset`: tokens by which the cuts are moved."""
    window, formed = section.window, forms_scores(section)

    def core(q: Tensor, k: Tensor, v: Tensor, batch: Batch, dropout: Dropout | None) -> Tensor:
        return attention(q, k, v, batch, dropout, number, offset, window, formed)

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
    q: Tensor,
    k: Tensor,
    v: Tensor,
    batch: Batch,
    dropout: Dropout | None,
    number: int,
    offset: int,
    window: int | None,
    formed: bool = False,
) -> Tensor:
    """See `models.attention.Core`. Token t is in part (t + offset) · number // L, modulo `number`. formed: products are
    in q's dtype, else in at least fp32."""
    length, mask = q.shape[2], visible(batch.documents, window)
    part = ((torch.arange(length) + offset) * number // length) % number
    places = [found for at in range(number) if len(found := (part == at).nonzero().flatten())]
    out = v.new_empty(*q.shape[:-1], v.shape[-1])
    wide = torch.promote_types(q.dtype, torch.float32)
    inside = q.dtype if formed else wide

    def some_keys(x: Tensor, keys: Tensor) -> Tensor:
        return repeated(x[:, :, keys].to(inside), q.shape[1])

    for queries in places:
        pairs = [(keys, mask[:, :, queries][..., keys]) for keys in places]
        scores = [_scores(q[:, :, queries].to(inside), some_keys(k, keys), there) for keys, there in pairs]
        lse = torch.stack([some.logsumexp(-1) for some in scores]).logsumexp(0)  # [B, H, n]
        total = torch.zeros_like(out[:, :, queries], dtype=wide)
        for (keys, there), some in zip(pairs, scores, strict=True):
            own = some.detach().logsumexp(-1, keepdim=True)  # of this part, which is rounded by itself
            probabilities = (some - own).exp().masked_fill(~there, 0)
            if dropout is not None:
                tensors, drop = dropout.attention_map(
                    q.shape[1], batch.index[:, queries], batch.index[:, keys], batch.step
                )
                probabilities = drop(probabilities, *tensors)
            part_out = (probabilities.to(q.dtype).to(inside) @ some_keys(v, keys)).to(q.dtype)
            total = total + part_out.to(wide) * (own - lse.detach().unsqueeze(-1)).exp()
        whole = total.detach().to(q.dtype).to(wide)
        out = out.index_copy(2, queries, (total - (lse - lse.detach()).unsqueeze(-1) * whole).to(q.dtype))
    return out


def _scores(q: Tensor, k: Tensor, seen: Tensor) -> Tensor:
    """q kᵀ / √d in at least fp32 [B, H, n, m], hardly anything where `seen` [B, 1, n, m] is False."""
    formed = (q @ k.transpose(-2, -1)).to(torch.promote_types(q.dtype, torch.float32)) / math.sqrt(q.shape[-1])
    return formed.masked_fill(~seen, -1e30)
