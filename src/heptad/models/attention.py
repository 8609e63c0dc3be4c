"""Attention of one block: projections, optional norm of queries and keys, rotary positions, core attention, projection.

The core is a seam: `Attention.core` is a plain function attribute that an axis may replace; `stream` is the other one
(`mesh/regions.py`). Documents are isolated by the batch's mask, which is made with the batch (`batch.py`); positions
restart as well, and both are needed (C-127). A sliding window (`model.window`) narrows that mask.

Legend: B sequences, L tokens, D width, H query heads and K key/value heads on this rank, d head_dim.
Cost of SDPA ("flash") beside the projections: 4·B·H·L²·d FLOPs forward, no memory of L² but a mask, where documents or
a window need one. "math" forms the scores, B·H·L² elements, as attention dropout needs it. Read next: `scores.py`,
`rotary.py`, `dropout.py`, `parallel.py`, `decoder.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from heptad.config.recompute import forms_scores
from heptad.config.schema import ModelSection
from heptad.mesh.regions import SINGLE, Stream
from heptad.models.batch import Batch, visible
from heptad.models.columns import normed_columns
from heptad.models.dropout import Dropout
from heptad.models.layers import Linear
from heptad.models.norms import LayerNorm, Norm, RMSNorm
from heptad.models.parallel import RowLinear
from heptad.models.rotary import Rotary, rotate
from heptad.models.scores import repeated, scores, softmax_of, values

Core = Callable[[Tensor, Tensor, Tensor, Batch, "Dropout | None"], Tensor]
"""(q [B, H, L, d], k [B, K, L, d], v [B, K, L, d], batch, dropout) -> [B, H, L, d]; dropout None: drop nothing."""


class MaskBias:
    """What a model's queries see where plain causal attention is not enough, made once for all its blocks.

    window: a query sees itself and the `window` - 1 tokens before it, inside its document; None: all before it. Costs
    B·L·L elements until another batch comes; L·L under a window alone, which then serves every batch of that length.
    """

    def __init__(self, window: int | None = None) -> None:
        self.window = window
        self._last: tuple[Tensor | None, Tensor] | None = None

    def of(self, batch: Batch, dtype: torch.dtype) -> Tensor | None:
        """[B or 1, 1, L, L] to add to scores: 0 where the query sees the key, else -inf. None: plain causal."""
        return None if batch.mask is None and self.window is None else self._made(batch, dtype)

    def seen(self, batch: Batch) -> Tensor:
        """bool [B or 1, 1, L, L], True where the query sees the key."""
        if self.window is None:
            return visible(batch.documents) if batch.mask is None else batch.mask
        return self._made(batch, torch.bool)

    def kept(self) -> tuple[Tensor, ...]:
        """The one held for the next block."""
        return () if self._last is None else self._last[1:]

    def _made(self, batch: Batch, dtype: torch.dtype) -> Tensor:
        length, device = batch.ids.shape[1], batch.ids.device
        if self._last is not None:
            source, made = self._last
            if source is batch.mask and (made.shape[-1], made.dtype, made.device) == (length, dtype, device):
                return made
        with torch.no_grad():
            made = self._sees(batch)
            if dtype != torch.bool:
                made = torch.zeros(made.shape, dtype=dtype, device=device).masked_fill_(~made, -math.inf)
        self._last = (batch.mask, made)
        return made

    def _sees(self, batch: Batch) -> Tensor:
        if self.window is None:
            assert batch.mask is not None
            return batch.mask
        return visible(batch.documents if batch.mask is not None else batch.documents[:1], self.window)


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, batch: Batch, dropout: Dropout | None, bias: MaskBias | None = None
) -> Tensor:
    """Causal attention within documents (and `bias`'s window), softmax(q kᵀ / √d) v, by torch's fused kernel.

    Same dtype in and out.
    """
    assert dropout is None, "the fused kernel draws its own dropout: model.attention = flash refuses it"
    mask = batch.mask if bias is None else bias.of(batch, q.dtype)
    if mask is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=k.shape[1] < q.shape[1])
    if k.shape[1] < q.shape[1]:  # with a mask, CUDA's fused kernels know no groups and the rest would form the scores
        k, v = repeated(k, q.shape[1]), repeated(v, q.shape[1])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def math_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    batch: Batch,
    dropout: Dropout | None,
    bias: MaskBias | None = None,
    softmax: Callable[[Tensor, Tensor, float], Tensor] = softmax_of,
) -> Tensor:
    """The same with the scores formed, so that dropout can act on them."""
    mask = (MaskBias() if bias is None else bias).seen(batch)
    probabilities = softmax(scores(q, k), mask, math.sqrt(q.shape[-1]))  # [B, H, L, L]
    if dropout is None:
        return values(probabilities, v)
    tensors, drop = dropout.attention_map(q.shape[1], batch.index, batch.index, batch.step)
    return values(probabilities, v, drop, tensors)


def norm_of(section: ModelSection, width: int) -> Norm:
    """The model's kind of norm over `width` features."""
    kind = RMSNorm if section.norm == "rms" else LayerNorm
    return kind(width, eps=section.norm_eps)


def linear_of(role: str, fan_in: int, fan_out: int, bias: bool) -> Linear:
    """A linear that knows its role."""
    linear = Linear(fan_in, fan_out, bias=bias)
    linear.role = role
    return linear


class Attention(nn.Module):
    """Norm, attention and projection, the residual not. `section` is complete (`spec.complete`)."""

    stream: Stream = SINGLE

    def __init__(
        self, section: ModelSection, rotary: Rotary | None, mask_bias: MaskBias, dropout: Dropout | None
    ) -> None:
        super().__init__()
        assert section.head_dim is not None and section.kv_heads is not None
        width, d = section.width, section.head_dim
        self.head_dim, self.rotary, self.dropout = d, rotary, dropout
        self.mask_bias = mask_bias
        self.core: Core = partial(math_attention if forms_scores(section) else flash_attention, bias=mask_bias)
        self.norm = norm_of(section, width)
        self.q = linear_of("q", width, section.heads * d, section.qkv_bias)
        self.k = linear_of("k", width, section.kv_heads * d, section.qkv_bias)
        self.v = linear_of("v", width, section.kv_heads * d, section.qkv_bias)
        self.q_norm = norm_of(section, d) if section.qk_norm else None
        self.k_norm = norm_of(section, d) if section.qk_norm else None
        self.out = RowLinear("out", section.heads * d, width, section.attention_bias)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """The stream -> the stream: [B, L, D], or this rank's [n, D] of it."""
        projected = normed_columns(self.norm, x, (self.q, self.k, self.v), self.stream, batch.ids.numel())
        q, k, v = (part.view(*batch.ids.shape, -1, self.head_dim) for part in projected)  # [B, L, H or K, d]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rotary is not None:
            cos, sin = self.rotary.table(batch.positions, q.dtype)
            q, k = rotate(cos, sin, q, k)
        dropout = self.dropout if self.training else None
        mixed = self.core(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), batch, dropout)  # [B, H, L, d]
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))  # [B, L, H·d] -> the stream
        return out
