"""Dropout whose mask is a function of (seed, site, step, the token's global index, feature): C-022.

Each row (a token, or a query and a key) is hashed with 64 bits, each feature once, and the pair by one 32-bit round
(MurmurHash3's finaliser), so an element costs a few integer operations and no state. Any layout drops the same elements
and running the forward again drops them again. Read next: `keyed.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from heptad.models.keyed import GOLDEN, key_of, mix_, wrapped


def dropped(x: Tensor, left: Tensor, right: Tensor, threshold: int, factor: float) -> Tensor:
    """factor · x where the hash of the int32 words `left ^ right` (x's shape) reaches `threshold`, else 0."""
    return _scaled_where(factor, x, _finalise_(left ^ right) >= threshold)


@dataclass(frozen=True, slots=True)
class Dropout:
    """Drops with probability `rate` at one `site` of the model ("blocks.3.mlp"); scales what stays by 1/(1-rate)."""

    rate: float
    seed: int
    site: str
    first_head: int = 0
    """Number, in the whole model, of the first head whose probabilities are given."""
    drop: Callable[..., Tensor] = dropped
    """A seam: (x, left, right, threshold, factor) -> x's shape, as `dropped`."""

    def features(self, x: Tensor, index: Tensor, step: int) -> Tensor:
        """x [..., D]; index [...] int64, the tokens' global numbers. Same shape and dtype."""
        columns = self._words(torch.arange(x.shape[-1], device=x.device), step, "column")
        rows = self._words(index, step, "row")
        return self._drop(x, rows.unsqueeze(-1), columns)

    def attention(self, probabilities: Tensor, queries: Tensor, keys: Tensor, step: int) -> Tensor:
        """probabilities [B, H, Lq, Lk]; queries [B, Lq] and keys [B, Lk] int64, the tokens' global numbers."""
        tensors, drop = self.attention_map(probabilities.shape[1], queries, keys, step)
        return drop(probabilities, *tensors)

    def attention_map(
        self, heads: int, queries: Tensor, keys: Tensor, step: int
    ) -> tuple[tuple[Tensor, ...], Callable[..., Tensor]]:
        """Tensors t and a function: f(x, *t) drops elements of x [B, heads, Lq, Lk]. It is its own transpose.

        t is what a backward must keep: one byte an element, or with a seam of one's own the words.
        """
        first, threshold, factor = self.first_head, *self._numbers()
        numbers = self._words(torch.arange(first, first + heads, device=queries.device), step, "head")
        pairs = self._words(queries, step, "query").unsqueeze(-1) ^ self._words(keys, step, "key").unsqueeze(-2)
        # finalised twice, or (q, k) and (q', k') with equal xor would agree in every head
        left, right = _finalise_(pairs).unsqueeze(1), numbers.view(1, -1, 1, 1)
        if self.drop is dropped:
            return (_finalise_(left ^ right) >= threshold,), partial(_scaled_where, factor)
        return (left, right), self._drop

    def _words(self, index: Tensor, step: int, what: str) -> Tensor:
        """int32 words keyed by (seed, site, what, step, index)."""
        key = wrapped(key_of(self.seed, f"{self.site}/{what}") + step * GOLDEN)
        return (mix_(index * GOLDEN + key) >> 32).to(torch.int32)

    def _drop(self, x: Tensor, left: Tensor, right: Tensor) -> Tensor:
        return self.drop(x, left, right, *self._numbers())

    def _numbers(self) -> tuple[int, float]:
        """The least hash that stays, and what it is scaled by."""
        return round(self.rate * 2**32) - 2**31, 1 / (1 - self.rate)


def noise(size: float, seed: int, site: str, index: Tensor, step: int, like: Tensor) -> Tensor:
    """Factors [N, D] uniform in [1 - size, 1 + size), of `like`'s dtype, for the tokens `index` [N]: keyed as drops."""
    words = Dropout(0.0, seed, site)
    columns = words._words(torch.arange(like.shape[-1], device=like.device), step, "column")
    hashed = _finalise_(words._words(index, step, "row").unsqueeze(-1) ^ columns)
    return (1 + hashed.to(torch.float64) * (size * 2.0**-31)).to(like.dtype)


def _scaled_where(factor: float, x: Tensor, kept: Tensor) -> Tensor:
    return torch.where(kept, x * factor, 0)


def _finalise_(x: Tensor) -> Tensor:
    """MurmurHash3's 32-bit finaliser on int32 `x`, in place (shifts are made logical by the masks)."""
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(0x85EBCA6B - (1 << 32))
    x.bitwise_xor_((x >> 13).bitwise_and_(0x7FFFF)).mul_(0xC2B2AE35 - (1 << 32))
    return x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))
