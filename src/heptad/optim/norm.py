"""The gradient norm over every axis, and clipping by it.

Each rank takes the norm of what it holds, sums over the ranks between which a parameter is split (one all-reduce of
one fp64 number for each distinct set of ranks, phase "norm"), and adds the sets: dense parameters and experts, cut over
the same ranks in another order, share one. A parameter that is whole on every rank is
added once and never reduced; what several ranks of a group hold (each tensor rank a norm's weight, two a kv head) is
added by its owner. So replication never inflates the norm; a tied parameter has one shard. Sums of squares run in the
gradient's dtype over at most `CHUNK` elements on CPU (whose kernel adds naively: 2e-4 off over 20 M elements in
fp32, 1.4e-9 with chunks, at no cost) and in fp64 from there. Nothing is read on the host: the caller decides through
`mesh/host.py`. Read next: `train/step.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor import Shard as ShardedDim

from heptad.axes.data.shard import Shard
from heptad.mesh.collectives import Group, all_reduce

CHUNK = 1 << 15


def total_norm(shards: Sequence[Shard], p: float = 2.0, pipeline: Group | None = None) -> Tensor:
    """p-norm of the whole gradient held as `shards` (p = 2 or inf): a 0-d fp64 tensor, equal on all ranks."""
    trainable = [shard for shard in shards if shard.spec.trainable]
    parts = [(_counted(shard), () if shard.group is None else (shard.group,)) for shard in trainable]
    if pipeline is None or pipeline.size == 1:
        return _norm(parts, p)
    own = _norm(parts, p) if parts else torch.zeros((), dtype=torch.float64, device=shards[0].master.device)
    total = own.square() if p == 2.0 else own
    all_reduce(total, pipeline, "norm", "sum" if p == 2.0 else "max").wait()
    return total.sqrt() if p == 2.0 else total


def _counted(shard: Shard) -> Tensor:
    """The gradient on its owner, none of it elsewhere: all ranks of a group take part in its all-reduce."""
    return shard.gradient() if shard.owner and shard.counted else shard.gradient()[:0]


def grad_norm(
    tensors: Sequence[Tensor | DTensor], group_of: Callable[[DeviceMesh, int], Group], p: float = 2.0
) -> Tensor:
    """p-norm of plain tensors (whole on every rank) and DTensors of any mixture of meshes: a 0-d fp64 tensor.

    `group_of` gives the group along one dim of a mesh. A mesh dim that shards the tensor is summed over, one that
    replicates it is not. A Partial placement is no gradient yet: refused by assertion.
    """
    parts: list[tuple[Tensor, tuple[Group, ...]]] = []
    for tensor in tensors:
        if not isinstance(tensor, DTensor):
            parts.append((tensor, ()))
            continue
        assert not any(isinstance(place, Partial) for place in tensor.placements), "reduce partial gradients first"
        split = [dim for dim, place in enumerate(tensor.placements) if isinstance(place, ShardedDim)]
        parts.append((tensor.to_local(), tuple(group_of(tensor.device_mesh, dim) for dim in split)))
    return _norm(parts, p)


def _norm(parts: Sequence[tuple[Tensor, tuple[Group, ...]]], p: float) -> Tensor:
    """Sum (max for inf) over the parts of one set of groups, over the ranks of each group, then over the sets."""
    assert p == 2.0 or p == math.inf, p
    by_ranks: dict[tuple[frozenset[int], ...], dict[tuple[str, ...], tuple[tuple[Group, ...], list[Tensor]]]] = {}
    for tensor, groups in parts:
        same = by_ranks.setdefault(tuple(frozenset(group.ranks) for group in groups), {})
        same.setdefault(tuple(group.axis for group in groups), (groups, []))[1].append(tensor)
    assert by_ranks, "there is no gradient to take the norm of"
    sums = []
    for same in by_ranks.values():
        groups, _ = same[min(same)]  # the same one on every rank, whichever tensor it has first
        local = _local([tensor for _, tensors in same.values() for tensor in tensors], p)
        for group in groups:
            all_reduce(local, group, "norm", "sum" if p == 2.0 else "max").wait()
        sums.append(local)
    joined = torch.stack(sums)
    return joined.sum().sqrt() if p == 2.0 else joined.max()


def _local(tensors: Sequence[Tensor], p: float) -> Tensor:
    """Sum of squares (or largest magnitude) of this rank's elements, 0-d fp64; 0 when it holds none."""
    with torch.no_grad():
        chunks = [chunk for tensor in tensors if tensor.numel() for chunk in _chunks(tensor)]
        if not chunks:
            return torch.zeros((), dtype=torch.float64, device=tensors[0].device)
        if p == math.inf:
            return torch.stack([largest.double() for largest in torch._foreach_norm(chunks, math.inf)]).max()
        return torch.stack(torch._foreach_norm(chunks, 2.0)).double().square().sum()


def _chunks(tensor: Tensor) -> Sequence[Tensor]:
    if tensor.device.type != "cpu" or tensor.numel() <= CHUNK:
        return (tensor,)
    return tensor.reshape(-1).split(CHUNK)


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """min(1, max_norm / norm), 0-d fp64; 1 for a zero norm, exactly 0.2 for norm 5 and limit 1."""
    return (max_norm / norm).clamp(max=1.0)


def clip_(shards: Sequence[Shard], max_norm: float, norm: Tensor) -> Tensor:
    """Scale every gradient so that the whole has at most `max_norm`; `norm` is from before. Returns the factor."""
    factor = clip_factor(norm, max_norm)
    with torch.no_grad():
        grads = [shard.gradient() for shard in shards if shard.spec.trainable]
        for dtype in {grad.dtype for grad in grads}:
            torch._foreach_mul_([grad for grad in grads if grad.dtype == dtype], factor.to(dtype))
    return factor
