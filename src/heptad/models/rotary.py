"""Rotary positions (Su et al., arXiv 2104.09864): each pair of features of a head turns by position × frequency.

The pairs are (i, i + d/2), HuggingFace's half rotation. Angles are computed in float64 and rounded once; the rotation
runs in at least fp32. One table a batch serves every block (it is kept until another batch comes).
Read next: `attention.py`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from heptad.config.schema import RopeScaling


def frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> list[float]:
    """The d/2 angular frequencies, radians a position, after scaling."""
    plain = [theta ** (-2 * i / head_dim) for i in range(head_dim // 2)]
    if scaling is None:
        return plain
    if scaling.kind == "llama3":
        return [_llama3(frequency, scaling) for frequency in plain]
    return _yarn(plain, head_dim, theta, scaling)


def amplitude(scaling: RopeScaling | None) -> float:
    """The factor on cos and sin: 1, or YaRN's 0.1 ln(factor) + 1 (its §3.4) unless the job gives one."""
    if scaling is None or scaling.kind != "yarn":
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    return 0.1 * math.log(scaling.factor) + 1 if scaling.factor > 1 else 1.0


def _llama3(frequency: float, scaling: RopeScaling) -> float:
    """Llama 3.1's code: long waves are stretched by `factor`, short ones kept, those between are blended."""
    turns = scaling.original_max_positions * frequency / (2 * math.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = min(max(kept, 0.0), 1.0)
    return (1 - kept) * frequency / scaling.factor + kept * frequency


def _yarn(plain: list[float], head_dim: int, theta: float, scaling: RopeScaling) -> list[float]:
    """YaRN's ramp over the feature index (arXiv 2309.00071, §3.2), bounds rounded outwards as in the authors' code."""

    def feature(turns: float) -> float:
        """Index of the feature that turns this often within the trained length."""
        return head_dim * math.log(scaling.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(feature(scaling.beta_fast)), 0)
    high: float = min(math.ceil(feature(scaling.beta_slow)), head_dim - 1)
    if low == high:
        high += 0.001
    scaled = []
    for i, frequency in enumerate(plain):
        stretched = min(max((i - low) / (high - low), 0.0), 1.0)
        scaled.append(frequency / scaling.factor * stretched + frequency * (1 - stretched))
    return scaled


class Rotary:
    """cos and sin for a batch's positions, shared by all blocks of a model."""

    def __init__(self, head_dim: int, theta: float, scaling: RopeScaling | None) -> None:
        self.frequencies = frequencies(head_dim, theta, scaling)
        self.amplitude = amplitude(scaling)
        self._last: tuple[Tensor, torch.dtype, Tensor, Tensor] | None = None

    def table(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """positions [B, L] -> cos, signed sin [B, L, 1, d], fp64 for fp64 and fp32 for all else.

        Both halves are spelt out and the sine of the first is negative, so a rotation is two whole-width products.
        """
        wide = dtype if dtype == torch.float64 else torch.float32
        # identity, not equality: a batch is never changed in place, and the kept reference rules out a reused address
        if self._last is None or self._last[0] is not positions or self._last[1] != wide:
            steps = torch.tensor(self.frequencies, dtype=torch.float64, device=positions.device)
            angles = positions.to(torch.float64)[..., None, None] * steps
            cos, sin = angles.cos() * self.amplitude, angles.sin() * self.amplitude
            self._last = (positions, wide, torch.cat([cos, cos], -1).to(wide), torch.cat([-sin, sin], -1).to(wide))
        return self._last[2], self._last[3]

    def kept(self) -> tuple[Tensor, ...]:
        """The tables held for the next block; every block's graph refers to these."""
        return () if self._last is None else self._last[2:]


class _Rotate(torch.autograd.Function):
    """A rotation; its backward is the rotation back, so only cos and sin are kept. One call turns queries and keys."""

    @staticmethod
    def forward(ctx: Any, cos: Tensor, sin: Tensor, *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(cos, sin)
        return tuple(_rotated(x, cos, sin) for x in xs)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        back = -sin
        return None, None, *(_rotated(dy, cos, back) for dy in dys)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    wide = x.to(cos.dtype)
    swapped = wide.roll(x.shape[-1] // 2, -1)  # (second half, first half)
    return swapped.mul_(sin).addcmul_(wide, cos).to(x.dtype)


def rotate(cos: Tensor, sin: Tensor, *xs: Tensor) -> tuple[Tensor, ...]:
    """Each x [B, L, H, d] with cos and signed sin [B, L, 1, d] from `Rotary.table`; in their dtype, returned in x's."""
    out: tuple[Tensor, ...] = _Rotate.apply(cos, sin, *xs)
    return out
