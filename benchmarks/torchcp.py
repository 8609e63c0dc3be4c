"""Ring attention of torch's experimental context parallel: what its users call, and its ring with the CPU's kernel.

`torch.distributed.tensor.experimental.context_parallel` replaces scaled dot product attention of three CUDA kernels
(flash, memory-efficient, cuDNN) by a ring; `refusal` tries it on CPU ranks and returns what torch says. Its ring is
a template over the kernel, so `TorchRing` hands it the CPU's: the same orders and messages as on CUDA, without
DTensor's dispatch, which costs it nothing here. Private functions of torch 2.13: the line says so.
Its load balance is the zigzag order, so both sides hold the same tokens. Read next: `attention.py`, `context.py`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from benchmarks.attention import Case, Side
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

METHODS = ("allgather", "alltoall")
"""How torch moves keys and values: all at once (its default), or hop by hop."""


def refusal(rank: int, length: int = 64) -> str | None:
    """What keeps torch's context parallel from running forward and backward on these ranks, or None."""
    # here and below: two seconds of imports that no other line needs
    from torch.distributed.tensor.experimental import context_parallel

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    q, k, v, dout = Case(length).tensors()
    buffers = [q, k, v, dout]
    try:
        with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 4, no_restore_buffers=set(buffers)):
            leaves = [x.requires_grad_() for x in (q, k, v)]
            out = F.scaled_dot_product_attention(*leaves, is_causal=True)
            torch.autograd.grad(out, leaves, dout)
    except (NotImplementedError, RuntimeError) as problem:
        return f"{type(problem).__name__}: {str(problem).splitlines()[0]}"
    return None


class _TorchRing(torch.autograd.Function):
    """torch's two templates as one function of q, k, v."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup) -> Tensor:
        from torch.distributed.tensor.experimental._context_parallel import _attention

        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        given = dict(query=q, key=k, value=v, is_causal=True, dropout_p=0.0)
        out, lse = _attention._templated_ring_attention(group, 2, kernel, **given)
        ctx.group = group
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        from torch.distributed.tensor.experimental._context_parallel import _attention

        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        q, k, v, out, lse = ctx.saved_tensors
        given = dict(query=q, key=k, value=v, out=out, logsumexp=lse, is_causal=True, dropout_p=0.0)
        dq, dk, dv = _attention._templated_ring_attention_backward(
            ctx.group, 2, kernel, grad_out=dout, grad_out_name="grad_out", **given
        )
        return dq, dk, dv, None


class TorchRing(Side):
    """torch's ring on the tokens a zigzag ring rank holds."""

    def __init__(self, rank: int, case: Case, method: str) -> None:
        assert case.length % (2 * dist.get_world_size()) == 0 and not case.documents
        super().__init__(rank, case, method)
        group = self.mesh.group("cp").pg
        assert group is not None
        self.group = group

    def forward(self) -> Tensor:
        """See `Side`."""
        from torch.distributed.tensor.experimental._attention import set_rotate_method

        set_rotate_method(self.name)  # torch's global option; the backward reads it again
        found: Tensor = _TorchRing.apply(*self.leaves, self.group)
        return found
