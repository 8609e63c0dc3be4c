"""Attention of one block of queries and keys, forward and backward, with the log-sum-exp that lets results be merged.

A block is everything its queries see of a set of keys, or a part of it; how parts become a whole is `merge.py`. Three
kinds of kernel, chosen once (`block_kernels`): torch's fused one for the CPU (any float type, grouped heads, masks),
the fused one for CUDA (half precision; what has a mask is at most TILE x TILE and goes to the formed scores), and
formed scores, a tile at a time: the float64 reference, and the only one that drops probabilities. Key/value heads are
never repeated in memory. A backward takes the *merged* output and log-sum-exp, so parts of it simply add.

Three facts of torch's CPU kernel (2.13), each with a test: of a query that sees no key it returns log-sum-exp 0, not
-inf; rows that are not contiguous in d are read wrongly, without an error; no keys at all crash the process.

Legend: B rows, H query and K kv heads here, n queries, m keys of the block, d head_dim.
Costs: 4·B·H·n·m·d FLOPs forward, halved in a triangle; formed scores keep B·H·TILE² elements for a moment.
Source: FlashAttention-2, arXiv 2307.08691 (the backward from the log-sum-exp). Read next: `merge.py`, `local.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from heptad.axes.context.blocks import TILE
from heptad.config.recompute import forms_scores
from heptad.config.schema import ModelSection

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_cuda_flash = torch.ops.aten._scaled_dot_product_flash_attention
_cuda_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_backward


@dataclass(frozen=True, slots=True)
class Seen:
    """Which keys a query of the block sees: all, those up to its own place (`causal`, n = m), or where `bias` is 0.

    bias: [n, m] in the dtype of the queries, 0 or -inf. drop: what drops elements of x [B, H, n, m], or None.
    """

    causal: bool = False
    bias: Tensor | None = None
    drop: Callable[[Tensor], Tensor] | None = None


class Kernels(Protocol):
    """tile: blocks may have at most this many queries and keys; None: any size."""

    tile: int | None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, seen: Seen) -> tuple[Tensor, Tensor]:
        """q [B, H, n, d], k and v [B, K, m, d] -> out [B, H, n, d], log-sum-exp [B, H, n] (-inf: sees no key)."""

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, seen: Seen
    ) -> tuple[Tensor, Tensor, Tensor]:
        """This block's part of dq, dk, dv; `out`, `lse` (finite), `dout` are of all keys that the queries see."""


def block_kernels(section: ModelSection, device: torch.device, dtype: torch.dtype) -> Kernels:
    """Those of a model's kind of attention on `device`, for tensors of `dtype`."""
    if forms_scores(section):
        return FormedScores()
    if device.type == "cpu":
        return CpuFlash()
    return CudaFlash() if dtype in (torch.bfloat16, torch.float16) else FormedScores()


def edge_bias(queries: int, keys: int, offset: int, like: Tensor) -> Tensor:
    """[queries, keys] in `like`'s dtype: 0 where query i sees key j, i - j < offset, else -inf."""
    assert queries <= TILE and keys <= TILE, (queries, keys)
    distance = torch.arange(queries, device=like.device).unsqueeze(1) - torch.arange(keys, device=like.device)
    return like.new_zeros(queries, keys).masked_fill_(distance >= offset, -math.inf)


def without_unseeing(lse: Tensor, bias: Tensor | None) -> Tensor:
    """torch's log-sum-exp [B, H, n] with -inf where a row of the mask hides every key."""
    return lse if bias is None else lse.masked_fill((bias == -math.inf).all(-1), -math.inf)


def _rows(x: Tensor) -> Tensor:
    """x with rows that are contiguous in d, as fused kernels take for granted."""
    return x if x.stride(-1) == 1 else x.contiguous()


class CpuFlash:
    """torch's fused kernel for the CPU; float64, float32, bfloat16."""

    tile: int | None = None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, seen: Seen) -> tuple[Tensor, Tensor]:
        """See `Kernels`."""
        assert seen.drop is None and q.shape[2] and k.shape[2], (q.shape, k.shape)
        out, lse = _flash(_rows(q), _rows(k), _rows(v), 0.0, seen.causal, attn_mask=seen.bias)
        return out, without_unseeing(lse, seen.bias)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, seen: Seen
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Kernels`."""
        ready = (_rows(x) for x in (dout, q, k, v, out))
        dq, dk, dv = _flash_backward(*ready, lse, 0.0, seen.causal, attn_mask=seen.bias)
        return dq, dk, dv


class FormedScores:
    """Plain: the block's scores are formed, the softmax is in at least fp32."""

    tile: int | None = TILE

    def forward(self, q: Tensor, k: Tensor, v: Tensor, seen: Seen) -> tuple[Tensor, Tensor]:
        """See `Kernels`."""
        scores = self._scores(q, k, seen)
        lse = scores.logsumexp(-1)  # [B, H, n]
        probabilities = (scores - lse.masked_fill(lse == -math.inf, 0).unsqueeze(-1)).exp_()
        kept = probabilities if seen.drop is None else seen.drop(probabilities)
        return (_by_group(kept.to(v.dtype), v) @ v).view(q.shape), lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, seen: Seen
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Kernels`."""
        probabilities = (self._scores(q, k, seen) - lse.unsqueeze(-1)).exp_()
        kept = probabilities if seen.drop is None else seen.drop(probabilities)
        grad = _by_group(dout, v)  # [B, K, H/K·n, d]
        dv = _by_group(kept.to(v.dtype), v).transpose(-2, -1) @ grad
        dw = (grad @ v.transpose(-2, -1)).view(probabilities.shape).to(probabilities.dtype)
        dw = dw if seen.drop is None else seen.drop(dw)
        delta = (dout.to(dw.dtype) * out.to(dw.dtype)).sum(-1, keepdim=True)
        ds = dw.sub_(delta).mul_(probabilities).div_(math.sqrt(q.shape[-1])).to(q.dtype)
        ds = _by_group(ds, k)  # [B, K, H/K·n, m]
        return (ds @ k).view(q.shape), ds.transpose(-2, -1) @ _by_group(q, k), dv

    def _scores(self, q: Tensor, k: Tensor, seen: Seen) -> Tensor:
        """q kᵀ / √d [B, H, n, m] in at least fp32, -inf where nothing is seen."""
        formed = (_by_group(q, k) @ k.transpose(-2, -1)).view(*q.shape[:3], k.shape[2])
        scores = formed.to(torch.promote_types(q.dtype, torch.float32)) / math.sqrt(q.shape[-1])
        if seen.causal:
            late = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu_(1)
            scores.masked_fill_(late, -math.inf)
        return scores if seen.bias is None else scores.add_(seen.bias)


def _by_group(x: Tensor, like: Tensor) -> Tensor:
    """x [B, H, n, e] -> [B, K, H/K·n, e], `like` having K heads: query heads that share keys lie behind each other."""
    return x.reshape(x.shape[0], like.shape[1], -1, x.shape[-1])


class CudaFlash:
    """torch's fused kernel for CUDA; half precision; head_dim is padded to a multiple of 8."""

    tile: int | None = None

    def __init__(self) -> None:
        self.masked = FormedScores()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, seen: Seen) -> tuple[Tensor, Tensor]:
        """See `Kernels`."""
        assert seen.drop is None
        if seen.bias is not None:
            return self.masked.forward(q, k, v, seen)
        padded, scale = (_padded(x) for x in (q, k, v)), 1 / math.sqrt(q.shape[-1])
        out, lse, *_ = _cuda_flash(*padded, 0.0, seen.causal, scale=scale)
        return out[..., : q.shape[-1]], lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, seen: Seen
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Kernels`."""
        if seen.bias is not None:
            return self.masked.backward(dout, q, k, v, out, lse, seen)
        d, padded = q.shape[-1], (_padded(x) for x in (dout, q, k, v, out))
        no_seed = torch.empty(0, dtype=torch.uint64, device=q.device)
        numbers = None, None, q.shape[2], k.shape[2], 0.0, seen.causal, no_seed, no_seed
        dq, dk, dv = _cuda_flash_backward(*padded, lse.contiguous(), *numbers, scale=1 / math.sqrt(d))
        return dq[..., :d], dk[..., :d], dv[..., :d]


def _padded(x: Tensor) -> Tensor:
    return _rows(F.pad(x, (0, -x.shape[-1] % 8)) if x.shape[-1] % 8 else x)
