"""Attention of one block: projections, optional norm of queries and keys, rotary positions, core attention, projection.

The core is a seam: `Attention.core` is a plain function attribute that an axis may replace. Documents are isolated by
the batch's mask, which is made with the batch (`batch.py`); positions restart as well, and both are needed (C-127).

Legend: B sequences, L tokens, D width, H query heads, K key/value heads, d head_dim.
Cost of SDPA beside the projections: 4·B·H·L²·d FLOPs forward, no L² memory. With attention dropout the scores are
formed: B·H·L² elements. Read next: `rotary.py`, `dropout.py`, `decoder.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from heptad.config.schema import ModelSection
from heptad.models.batch import Batch, visible
from heptad.models.dropout import Dropout
from heptad.models.layers import LayerNorm, Linear, RMSNorm
from heptad.models.rotary import Rotary, rotate

Core = Callable[[Tensor, Tensor, Tensor, Batch, "Dropout | None"], Tensor]
"""(q [B, H, L, d], k [B, K, L, d], v [B, K, L, d], batch, dropout) -> [B, H, L, d]; dropout None: drop nothing."""


def core_attention(q: Tensor, k: Tensor, v: Tensor, batch: Batch, dropout: Dropout | None) -> Tensor:
    """Causal attention within documents, softmax(q kᵀ / √d) v. Same dtype in and out."""
    if dropout is not None:
        return _dropped_attention(q, k, v, batch, dropout)
    repeat = q.shape[1] // k.shape[1]
    if batch.mask is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=repeat > 1)
    if repeat > 1:  # with a mask, CUDA's fused kernels know no groups and the rest would form the scores
        k, v = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=batch.mask)


def _dropped_attention(q: Tensor, k: Tensor, v: Tensor, batch: Batch, dropout: Dropout) -> Tensor:
    repeat = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
    mask = visible(batch.documents) if batch.mask is None else batch.mask
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = (q @ k.transpose(-2, -1)).to(wide) / math.sqrt(q.shape[-1])  # [B, H, L, L]
    probabilities = scores.masked_fill(~mask, -math.inf).softmax(-1)
    return dropout.attention(probabilities, batch.index, batch.index, batch.step).to(v.dtype) @ v


def norm_of(section: ModelSection, width: int) -> RMSNorm | LayerNorm:
    """The model's kind of norm over `width` features."""
    kind = RMSNorm if section.norm == "rms" else LayerNorm
    return kind(width, eps=section.norm_eps)


def linear_of(role: str, fan_in: int, fan_out: int, bias: bool) -> Linear:
    """A linear that knows its role."""
    linear = Linear(fan_in, fan_out, bias=bias)
    linear.role = role
    return linear


class Attention(nn.Module):
    """x [B, L, D] -> [B, L, D], its norm included, the residual not. `section` is complete (`spec.complete`)."""

    def __init__(self, section: ModelSection, rotary: Rotary | None, dropout: Dropout | None) -> None:
        super().__init__()
        assert section.head_dim is not None and section.kv_heads is not None
        width, d = section.width, section.head_dim
        self.head_dim, self.rotary, self.dropout = d, rotary, dropout
        self.core: Core = core_attention
        self.norm = norm_of(section, width)
        self.q = linear_of("q", width, section.heads * d, section.qkv_bias)
        self.k = linear_of("k", width, section.kv_heads * d, section.qkv_bias)
        self.v = linear_of("v", width, section.kv_heads * d, section.qkv_bias)
        self.q_norm = norm_of(section, d) if section.qk_norm else None
        self.k_norm = norm_of(section, d) if section.qk_norm else None
        self.out = linear_of("out", section.heads * d, width, section.attention_bias)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """x [B, L, D] -> [B, L, D]."""
        x = self.norm(x)
        q, k, v = (linear(x).unflatten(-1, (-1, self.head_dim)) for linear in (self.q, self.k, self.v))  # [B, L, ·, d]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rotary is not None:
            cos, sin = self.rotary.table(batch.positions, q.dtype)
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        dropout = self.dropout if self.training else None
        mixed = self.core(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), batch, dropout)  # [B, H, L, d]
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))  # [B, L, H·d] -> [B, L, D]
        return out
