"""The three steps of attention with its scores formed, each keeping the least that its backward needs.

Plain autograd would keep keys and values once for each query head of a group, the mask once a block, and the dropped
probabilities beside the probabilities. Here q, k, v, the probabilities and one byte an element for dropout are kept;
the rest is formed again, with the same operations in the same order: same bits, B·H·L² · 5 bytes in place of 9 in fp32
with dropout, 7 in bf16. Legend as in `attention.py`. Read next: `attention.py`, `recompute/cost.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Drop = Callable[..., Tensor]
"""(x [B, H, L, L], *tensors) -> x with some elements dropped, the others scaled: `Dropout.attention_map`."""


def repeated(x: Tensor, heads: int) -> Tensor:
    """x [B, K, L, d] -> a new tensor [B, H, L, d]: each kv head for each of its query heads."""
    return x.repeat_interleave(heads // x.shape[1], dim=1)


def _group_sum(x: Tensor, kv_heads: int) -> Tensor:
    """The gradient of `repeated`: [B, H, L, d] -> [B, K, L, d]."""
    return x.unflatten(1, (kv_heads, -1)).sum(2) if x.shape[1] > kv_heads else x


def masked_softmax(scores: Tensor, mask: Tensor, root: float) -> Tensor:
    """softmax(scores / root) over the last dim [B, H, L, L] where `mask` [B, 1, L, L] is True, in at least fp32."""
    wide = scores.to(torch.promote_types(scores.dtype, torch.float32)) / root
    return wide.masked_fill_(~mask, -math.inf).softmax(-1)


class _Scores(torch.autograd.Function):
    """Keeps q and k."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor) -> Tensor:
        ctx.save_for_backward(q, k)
        return q @ repeated(k, q.shape[1]).transpose(-2, -1)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        q, k = ctx.saved_tensors
        dk = (q.contiguous().transpose(-2, -1) @ dy).transpose(-2, -1)
        return dy @ repeated(k, q.shape[1]), _group_sum(dk, k.shape[1])


class _MaskedSoftmax(torch.autograd.Function):
    """Keeps its output, which is 0 where the mask is False, so that the gradient is too."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, mask: Tensor, root: float) -> Tensor:
        y = masked_softmax(scores, mask, root)
        ctx.root, ctx.dtype = root, scores.dtype
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        (y,) = ctx.saved_tensors
        return torch.ops.aten._softmax_backward_data(dy, y, -1, y.dtype).div_(ctx.root).to(ctx.dtype), None, None


class _Values(torch.autograd.Function):
    """drop(probabilities) v; keeps probabilities, v and drop's tensors."""

    @staticmethod
    def forward(ctx: Any, probabilities: Tensor, v: Tensor, drop: Drop, *tensors: Tensor) -> Tensor:
        ctx.drop = drop
        ctx.save_for_backward(probabilities, v, *tensors)
        return drop(probabilities, *tensors).to(v.dtype) @ repeated(v, probabilities.shape[1])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        probabilities, v, *tensors = ctx.saved_tensors
        dv = ctx.drop(probabilities, *tensors).to(v.dtype).transpose(-2, -1) @ dy
        dw = (dy @ repeated(v, dy.shape[1]).transpose(-2, -1)).to(probabilities.dtype)
        return ctx.drop(dw, *tensors), _group_sum(dv, v.shape[1]), None, *(None for _ in tensors)


def scores(q: Tensor, k: Tensor) -> Tensor:
    """q [B, H, L, d], k [B, K, L, d] -> q kᵀ [B, H, L, L]."""
    y: Tensor = _Scores.apply(q, k)
    return y


def softmax_of(scores: Tensor, mask: Tensor, root: float) -> Tensor:
    """`masked_softmax`, of which its output alone is kept."""
    y: Tensor = _MaskedSoftmax.apply(scores, mask, root)
    return y


def drop_none(probabilities: Tensor) -> Tensor:
    """What drops nothing."""
    return probabilities


def values(probabilities: Tensor, v: Tensor, drop: Drop = drop_none, tensors: Sequence[Tensor] = ()) -> Tensor:
    """drop(probabilities [B, H, L, L], *tensors) v [B, K, L, d] -> [B, H, L, d], in v's dtype."""
    y: Tensor = _Values.apply(probabilities, v, drop, *tensors)
    return y
