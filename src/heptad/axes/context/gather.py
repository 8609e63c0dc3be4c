"""All keys and values gathered, own queries against all of them: one collective in place of R-1 hops.

Forward: an all-gather of keys and values; a rank's own block is computed meanwhile. Backward: the same all-gather again
(kept would be O(L) a layer), and a reduce-scatter of their gradients in at least fp32. While one layer runs, keys,
values and their gradients are whole: O(L), as in Llama 3; saved between forward and backward is O(L/C).

Legend as in `ring.py`. Sent per rank: (C-1)·2·B·n·K·d elements forward, twice that backward, as much as the ring.
Source: Llama 3, arXiv 2407.21783, §3.3.2. Read next: `local.py`, `apply.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from heptad.axes.context.local import Local
from heptad.axes.context.merge import Partial, wide
from heptad.mesh.collectives import Group, Work, all_gather, reduce_scatter


class _GatherAttention(torch.autograd.Function):
    """Saves q, kv, out and lse."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, kv: Tensor, local: Local, group: Group) -> Tensor:
        total = Partial(q)
        every, work = _gathered(kv, group)
        local.forward(q, kv, group.index, total)
        work.wait()
        for source in _others(group):
            local.forward(q, every[source], source, total)
        work.wait_sent()
        out = total.out.to(q.dtype)
        ctx.local, ctx.group = local, group
        ctx.save_for_backward(q, kv, out, total.lse)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor, None, None]:
        q, kv, out, lse = ctx.saved_tensors
        local, group = ctx.local, ctx.group
        saved = dout, q, out, lse
        every, work = _gathered(kv, group)
        dq = torch.zeros_like(q, dtype=wide(q.dtype), memory_format=torch.contiguous_format)
        grads = torch.zeros_like(every, dtype=wide(kv.dtype))
        local.backward(saved, kv, group.index, local.blocks(group.index), dq, grads[group.index])
        work.wait()
        for source in _others(group):
            local.backward(saved, every[source], source, local.blocks(source), dq, grads[source])
        work.wait_sent()
        own = torch.empty_like(kv, dtype=grads.dtype)
        work = reduce_scatter(own.view(-1), grads.view(-1), group, group.ledger.phase)
        work.complete()
        return dq.to(q.dtype), own.to(kv.dtype), None, None


def _gathered(kv: Tensor, group: Group) -> tuple[Tensor, Work]:
    """[C, 2, B, K, n, d], valid after the work's wait."""
    every = kv.new_empty(group.size, *kv.shape)
    return every, all_gather(every.view(-1), kv.view(-1), group, group.ledger.phase)


def _others(group: Group) -> list[int]:
    return [source for source in range(group.size) if source != group.index]


def gather_attention(q: Tensor, kv: Tensor, local: Local, group: Group) -> Tensor:
    """q [B, H, n, d], kv [2, B, K, n, d] contiguous -> [B, H, n, d], softmax over the keys of all ranks of `group`."""
    out: Tensor = _GatherAttention.apply(q, kv, local, group)
    return out
