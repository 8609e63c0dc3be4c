"""Ulysses: heads are dealt over U ranks for as long as attention takes, so each of them has all tokens of its heads.

Before attention q, k and v travel in one all-to-all: [B, H, n, d] of all heads here becomes [B, H/U, U·n, d]; after it
the output travels back in a second one. The backward mirrors both. Rank u gets query heads [u·H/U, (u+1)·H/U) and the
kv heads they read. Where query heads that share a kv head go to several ranks, that head goes to each of them, and the
owner of its tokens sums the gradients: a rank gets H/U / c kv heads, c = gcd(H/K, H/U) query heads for each. With U a
divisor of K that is K/U, and nothing is sent twice.

Legend: B rows, H query and K kv heads before dealing (of a tensor rank), n tokens before (of a context rank).
Sent per rank: (U-1)/U · B·n·d·(2H + 2H/c) elements forward, as many backward. Source: DeepSpeed Ulysses,
arXiv 2309.14509; with a ring around it: arXiv 2405.07719. Read next: `ring.py`, `apply.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from heptad.axes.context.merge import wide
from heptad.config.context import sent_kv_heads
from heptad.mesh.collectives import Group, all_to_all


def dealt_kv_heads(heads: int, kv_heads: int, ranks: int) -> tuple[int, ...]:
    """Which kv head each kv head after dealing is, rank after rank; `ranks` divides their number, and `heads`.

    On a rank as many query heads read each of them, in order, so there again kv head i belongs to a run of them.
    """
    assert heads % kv_heads == 0 and heads % ranks == 0, (heads, kv_heads, ranks)
    readers = heads // sent_kv_heads(heads, kv_heads, ranks)
    return tuple(first // (heads // kv_heads) for first in range(0, heads, readers))


class _ToHeads(torch.autograd.Function):
    """q [B, H, n, d], k and v [B, K, n, d] -> q [B, H/U, U·n, d], kv [2, B, K', U·n, d]. Saves nothing."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: Group) -> tuple[Tensor, Tensor]:
        ctx.group, ctx.kv_heads = group, k.shape[1]
        dealt = dealt_kv_heads(q.shape[1], k.shape[1], group.size)
        copies = len(dealt) > k.shape[1]
        index = torch.tensor(dealt, device=k.device) if copies else None
        parts = [q, *(x if index is None else x.index_select(1, index) for x in (k, v))]
        heads, kv_heads = q.shape[1] // group.size, len(dealt) // group.size
        came = _exchange([_by_rank(part, 1, group.size) for part in parts], group)  # [U, B, heads + 2·kv_heads, n, d]
        mine, keys, values = came.split([heads, kv_heads, kv_heads], 2)
        return _in_order(mine), torch.stack((_in_order(keys), _in_order(values)))

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dkv: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        group, heads = ctx.group, dq.shape[1]
        came = _exchange([_by_rank(part, 2, group.size) for part in (dq, *dkv)], group)
        dq, dk, dv = (
            part.transpose(0, 1).flatten(1, 2) for part in came.split([heads, dkv.shape[2], dkv.shape[2]], 2)
        )  # [B, U·heads, n, d]
        dealt = dealt_kv_heads(dq.shape[1], ctx.kv_heads, group.size)
        return dq, _summed(dk, dealt, ctx.kv_heads), _summed(dv, dealt, ctx.kv_heads), None


class _ToTokens(torch.autograd.Function):
    """out [B, H/U, U·n, d] -> [B, H, n, d]. Saves nothing."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, group: Group) -> Tensor:
        ctx.group = group
        came = _exchange([_by_rank(out, 2, group.size)], group)  # [U, B, H/U, n, d]
        return came.permute(1, 3, 0, 2, 4).flatten(2, 3).transpose(1, 2)  # as the projection reads it: [B, n, H, d]

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None]:
        return _in_order(_exchange([_by_rank(dout, 1, ctx.group.size)], ctx.group)), None


def _by_rank(x: Tensor, dim: int, ranks: int) -> Tensor:
    """x [B, heads, tokens, d] -> [U, B, …]: heads (dim 1) or tokens (dim 2) in `ranks` equal parts."""
    return x.unflatten(dim, (ranks, -1)).movedim(dim, 0)


def _in_order(x: Tensor) -> Tensor:
    """Parts [U, B, heads, n, d] of the tokens -> [B, heads, U·n, d]."""
    return x.permute(1, 2, 0, 3, 4).flatten(2, 3)


def _exchange(parts: list[Tensor], group: Group) -> Tensor:
    """Parts [U, B, heads, n, d], joined along heads, slice i to rank i -> the same shape, slice i from rank i."""
    going = torch.cat(parts, 2)
    came = torch.empty_like(going)
    all_to_all(came, going, group, group.ledger.phase).wait()
    return came


def _summed(grad: Tensor, dealt: tuple[int, ...], kv_heads: int) -> Tensor:
    """grad [B, len(dealt), n, d] of copies -> [B, K, n, d], summed in at least fp32."""
    if len(dealt) == kv_heads:
        return grad
    total = grad.new_zeros(grad.shape[0], kv_heads, *grad.shape[2:], dtype=wide(grad.dtype))
    return total.index_add_(1, torch.tensor(dealt, device=grad.device), grad.to(total.dtype)).to(grad.dtype)


def to_heads(q: Tensor, k: Tensor, v: Tensor, group: Group) -> tuple[Tensor, Tensor]:
    """All heads of own tokens -> own heads of all tokens: q [B, H/U, U·n, d], kv [2, B, K', U·n, d], contiguous."""
    found: tuple[Tensor, Tensor] = _ToHeads.apply(q, k, v, group)
    return found


def to_tokens(out: Tensor, group: Group) -> Tensor:
    """The way back of the output: [B, H/U, U·n, d] -> [B, H, n, d]."""
    found: Tensor = _ToTokens.apply(out, group)
    return found
