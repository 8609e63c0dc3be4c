"""Matrix products of groups of rows, each group with a matrix of its own: what routed experts compute.

Rows are sorted by group; `counts[e]` of them belong to matrix e, and a group may be empty. On CUDA in bf16, where rows
are multiples of 16 bytes, one `F.grouped_mm` does all groups; elsewhere a loop does (torch 2.13's refuses float64 and
odd widths, and on a CPU it is no faster). Never called with autograd on: `experts.py` has its own backward.

Legend: M rows, E matrices, I inputs, O outputs. Read next: `experts.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

ALIGNMENT = 8
"""Elements of bf16 in 16 bytes."""


def slices(counts: Sequence[int]) -> Iterator[slice]:
    """Rows of each group."""
    for stop, count in zip(accumulate(counts), counts, strict=True):
        yield slice(stop - count, stop)


def _fused(*tensors: Tensor) -> bool:
    """Whether torch's grouped kernel takes these, by device, dtype and the widths of their rows."""
    return all(
        tensor.is_cuda and tensor.dtype == torch.bfloat16 and all(size % ALIGNMENT == 0 for size in tensor.shape[-2:])
        for tensor in tensors
    )


def _ends(counts: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(list(accumulate(counts)), dtype=torch.int32, device=device)


def grouped(x: Tensor, weights: Tensor, counts: Sequence[int]) -> Tensor:
    """x [M, I], weights [E, I, O] (any strides) -> [M, O]: row m times the matrix of its group."""
    if _fused(x[:0], weights) and x.shape[0]:
        return F.grouped_mm(x, weights, offs=_ends(counts, x.device))
    out = x.new_empty(x.shape[0], weights.shape[-1])
    for weight, rows in zip(weights, slices(counts), strict=True):
        torch.mm(x[rows], weight, out=out[rows])
    return out


def add_outer_(out: Tensor, a: Tensor, b: Tensor, counts: Sequence[int], fresh: bool) -> None:
    """out [E, P, Q] += aₑᵀ bₑ, of a [M, P] and b [M, Q]; fresh: `out` holds nothing yet and is written."""
    if _fused(a[:0], b[:0]) and a.shape[0]:
        product = F.grouped_mm(a.t(), b, offs=_ends(counts, a.device))
        out.copy_(product) if fresh else out.add_(product)
        return
    for grad, rows in zip(out, slices(counts), strict=True):
        left, right = a[rows].t(), b[rows]
        if grad.dtype != a.dtype:
            product = left @ right
            grad.copy_(product) if fresh else grad.add_(product)
        elif fresh:
            torch.mm(left, right, out=grad)
        elif left.shape[1]:
            grad.addmm_(left, right)
