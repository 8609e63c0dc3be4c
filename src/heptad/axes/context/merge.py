"""Partial results of attention, each over some of the keys, merged by their log-sum-exp.

With o_i the output over key set i alone and s_i its log-sum-exp, all keys together give s = log Σ exp s_i and
o = Σ exp(s_i - s) o_i. A set that a query does not see has s_i = -inf and changes nothing, to the bit. Kept in at
least fp32 however many parts come. Source: ring attention, arXiv 2310.01889; FlashAttention-2, arXiv 2307.08691.
Read next: `local.py`, `ring.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor


def wide(dtype: torch.dtype) -> torch.dtype:
    """What sums over blocks are kept in."""
    return torch.promote_types(dtype, torch.float32)


class Partial:
    """Output [B, H, n, d] and log-sum-exp [B, H, n] of queries over the keys seen so far; of none: 0 and -inf.

    The output lies in memory as the projection behind it reads it, [B, n, H, d]: what both keep is one storage.
    """

    def __init__(self, q: Tensor) -> None:
        rows, heads, tokens, d = q.shape
        self.out = q.new_zeros(rows, tokens, heads, d, dtype=wide(q.dtype)).transpose(1, 2)
        self.lse = torch.full(q.shape[:-1], -torch.inf, dtype=self.out.dtype, device=q.device)

    def add(self, rows: slice, queries: slice, out: Tensor, lse: Tensor) -> None:
        """Over further keys, for these rows and queries: out [rows, H, queries, d], lse [rows, H, queries]."""
        before, total = self.lse[rows, :, queries], self.out[rows, :, queries]
        share = torch.sigmoid(lse.to(before.dtype) - before).nan_to_num_(0)  # exp(lse - merged); -inf - -inf: no keys
        total.lerp_(out.to(total.dtype), share.unsqueeze(-1))
        before.copy_(torch.logaddexp(before, lse.to(before.dtype)))
