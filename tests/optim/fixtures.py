"""Flat shards of a few odd-sized parameters, cut as a bucket would cut them, for any number of ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from heptad.axes.data.buckets import BucketSpec, Slot, ranges_of
from heptad.axes.data.shard import Shard
from heptad.config.schema import OptimizerSection
from heptad.mesh.collectives import Group
from heptad.models.spec import Init, ParamSpec, Role

SHAPES: tuple[tuple[str, tuple[int, ...], Role], ...] = (
    ("embed.weight", (13, 7), "embedding"),
    ("q.weight", (11, 7), "matrix"),
    ("q.bias", (11,), "bias"),
    ("norm.weight", (7,), "norm"),
    ("up.weight", (5, 17), "matrix"),
    ("down.weight", (3, 3), "matrix"),
    ("head.weight", (13, 7), "head"),
)


def specs() -> list[ParamSpec]:
    return [ParamSpec(name, shape, tuple("x" * len(shape)), role, Init("normal", 0.02)) for name, shape, role in SHAPES]


def values(seed: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """One whole tensor a parameter, keyed by seed."""
    made = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=made, dtype=torch.float64).to(dtype) for name, shape, _ in SHAPES}


def cut(whole: dict[str, Tensor], group: Group | None = None, grad_dtype: torch.dtype | None = None) -> list[Shard]:
    """Shards of `whole` on this rank of `group` (all of it without one); gradients are zero."""
    slots, offset = [], 0
    for spec in specs():
        slots.append(Slot(spec, offset))
        offset += spec.numel
    size, index = (1, 0) if group is None else (group.size, group.index)
    bucket = BucketSpec(0, tuple(slots), -(-offset // size) * size, True, num_shards=size)
    shards = []
    for slot in slots:
        ranges = ranges_of(bucket, slot)
        start, stop = ranges[index]
        master = whole[slot.spec.name].reshape(-1)[start:stop].clone()
        grad = torch.zeros_like(master, dtype=grad_dtype or master.dtype)
        shards.append(Shard(slot.spec, start, stop, master, grad, group, () if group is None else ranges))
    return shards


def set_grads(shards: Sequence[Shard], whole: dict[str, Tensor]) -> None:
    for shard in shards:
        shard.gradient().copy_(whole[shard.spec.name].reshape(-1)[shard.start : shard.stop])


def masters(shards: Sequence[Shard]) -> dict[str, Tensor]:
    return {shard.spec.name: shard.master.clone() for shard in shards}


def section(**options: object) -> OptimizerSection:
    return OptimizerSection.model_validate(options)
