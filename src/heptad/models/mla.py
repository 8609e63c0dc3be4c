"""Multi-head latent attention (MLA): queries, keys and values come out of small latents; DeepSeek-V2, arXiv 2405.04434.

x -> latent of queries -> norm -> queries; x -> latent of keys and values -> norm -> keys without position, and values,
of every head; beside that latent one key for all heads carries the rotary position. A head's query and key are
[without position, rotated], qk_nope_head_dim + qk_rope_head_dim wide, its value v_head_dim: the fused kernels want one
width, so values are padded with zeros and the output is cut again. YaRN's amplitude stands at the scores and not at the
rotation, as in DeepSeek's code: (0.1 ln(factor) + 1)², on both parts of a head.

Latents are the stream's: each is made, and normalised, of the tokens that the stream has here, and what a tensor rank's
heads read of all tokens is the latents, r + c + p features a token in place of D (`Stream`). Weights before them are
whole on every rank, those behind are cut by heads.

The core is the same seam as in `attention.py`. Legend: B sequences, L tokens, D width, H heads;
r, c latents of queries and of keys and values, p features with position.
Read next: `attention.py`, `rotary.py`, `spec.py` (its parameters).
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from heptad.config.recompute import forms_scores
from heptad.config.schema import ModelSection
from heptad.mesh.regions import SINGLE, Stream
from heptad.models.attention import Core, MaskBias, flash_attention, linear_of, math_attention, norm_of
from heptad.models.batch import Batch
from heptad.models.columns import columns, normed_columns
from heptad.models.dropout import Dropout
from heptad.models.parallel import RowLinear
from heptad.models.rotary import Rotary, amplitude, rotate


class LatentAttention(nn.Module):
    """Norm, attention and projection, the residual not. `section` is complete (`spec.complete`)."""

    stream: Stream = SINGLE

    def __init__(
        self, section: ModelSection, rotary: Rotary | None, mask_bias: MaskBias, dropout: Dropout | None
    ) -> None:
        super().__init__()
        nope, rope, value = section.qk_nope_head_dim, section.qk_rope_head_dim, section.v_head_dim
        rank, q_rank = section.kv_lora_rank, section.q_lora_rank
        assert nope is not None and rope is not None and value is not None and rank is not None and rotary is not None
        self.nope, self.rope, self.value, self.rank = nope, rope, value, rank
        self.rotary, self.dropout, self.mask_bias = rotary, dropout, mask_bias
        self.score_scale = amplitude(section.rope_scaling) ** 2
        formed = forms_scores(section)
        self.padding = 0 if formed else nope + rope - value
        self.core: Core = partial(math_attention if formed else flash_attention, bias=mask_bias)
        width, queries = section.width, section.heads * (nope + rope)
        self.norm = norm_of(section, width)
        if q_rank is None:
            self.q = linear_of("q", width, queries, section.qkv_bias)
        else:
            self.q_a = linear_of("q_a", width, q_rank, section.qkv_bias)
        self.kv_a = linear_of("kv_a", width, rank + rope, section.qkv_bias)
        self.q_norm = None if q_rank is None else norm_of(section, q_rank)
        self.q_b = None if q_rank is None else linear_of("q_b", q_rank, queries, bias=False)
        self.kv_norm = norm_of(section, rank)
        self.kv_b = linear_of("kv_b", rank, section.heads * (nope + value), bias=False)
        self.out = RowLinear("out", section.heads * value, width, section.attention_bias)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """[B, L, D] -> [B, L, D]."""
        q, k, v = self.projected(x, batch)
        dropout = self.dropout if self.training else None
        mixed = self.core(q, k, F.pad(v, (0, self.padding)) if self.padding else v, batch, dropout)  # [B, H, L, d]
        out: Tensor = self.out(mixed[..., : self.value].transpose(1, 2).flatten(2))  # [B, L, H·v] -> the stream
        return out

    def projected(self, x: Tensor, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """The stream x [B, L, D] -> q and k [B, H, L, nope + rope], v [B, H, L, value]."""
        num_tokens = batch.ids.numel()
        if self.q_norm is not None and self.q_b is not None:
            made, latent = normed_columns(self.norm, x, (self.q_a, self.kv_a), SINGLE, num_tokens)
            (q,) = columns(self.q_norm(made), (self.q_b,), self.stream, num_tokens)
        else:
            y = self.norm(x)
            (q,) = columns(y, (self.q,), self.stream, num_tokens)
            latent = self.kv_a(y)
        q = q.view(*batch.ids.shape, -1, self.nope + self.rope)  # [B, L, H, nope + rope]
        latent, key = latent.split([self.rank, self.rope], dim=-1)
        (keys_values,) = columns(self.kv_norm(latent), (self.kv_b,), self.stream, num_tokens)
        key = self.stream.enter(key, num_tokens).view(*batch.ids.shape, 1, self.rope)
        keys_values = keys_values.view(*batch.ids.shape, -1, self.nope + self.value)
        k, v = keys_values.split([self.nope, self.value], dim=-1)
        q, turned = q.split([self.nope, self.rope], dim=-1)
        cos, sin = self.rotary.table(batch.positions, q.dtype)
        turned, key = rotate(cos, sin, turned, key)  # [B, L, H, rope], [B, L, 1, rope]
        q = torch.cat([q, turned], dim=-1)
        if self.score_scale != 1.0:
            q = q * self.score_scale
        k = torch.cat([k, key.expand(-1, -1, k.shape[2], -1)], dim=-1)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
