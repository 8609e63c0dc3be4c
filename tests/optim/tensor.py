"""Shards of a tiny decoder as ranks of a data axis and a tensor axis hold them: cut by rows first, then flat."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from heptad.axes.data.buckets import Slot, _bucket, ranges_of
from heptad.axes.data.shard import Shard
from heptad.config.schema import ModelSection
from heptad.mesh.collectives import Group
from heptad.mesh.ledger import Ledger
from heptad.models.cut import Cut, cuts
from heptad.models.spec import ParamSpec, param_specs

SECTION = ModelSection(
    layers=1, width=10, heads=4, kv_heads=2, head_dim=6, mlp_width=23, vocab=11, mlp_bias=True, qk_norm=True
)
"""At 4 tensor ranks: two hold each kv head, the vocabulary has a padded row, the MLP one too."""


def specs() -> tuple[ParamSpec, ...]:
    return param_specs(SECTION)


def values(seed: int) -> dict[str, Tensor]:
    """One whole fp64 tensor a parameter, keyed by seed."""
    made = torch.Generator().manual_seed(seed)
    return {spec.name: torch.randn(spec.shape, generator=made, dtype=torch.float64) for spec in specs()}


def world_group(rank: int, size: int) -> Group:
    """All ranks, data axis outermost."""
    import torch.distributed as dist

    return Group("dp_shard*tp", tuple(range(size)), rank, dist.group.WORLD if size > 1 else None, Ledger())


def held_ranges(dp: int, tp: int) -> dict[str, list[tuple[Cut, int, int]]]:
    """Parameter -> for each rank (data outermost) its cut and the range [start, stop) it holds of the whole tensor."""
    by_rank = cuts(specs(), SECTION, tp, True)
    found: dict[str, list[tuple[Cut, int, int]]] = {spec.name: [] for spec in specs()}
    buckets = [_bucket(0, [cut.local for cut in held.values()], dp, True) for held in by_rank]
    for data in range(dp):
        for held, bucket in zip(by_rank, buckets, strict=True):
            for slot in bucket.slots:
                found[slot.spec.name].append(_range(held[slot.spec.name], ranges_of(bucket, slot)[data], slot))
    return found


def _range(cut: Cut, local: tuple[int, int], slot: Slot) -> tuple[Cut, int, int]:
    start, stop = (min(cut.start + at, cut.stop) for at in local)  # padding lies behind what is real
    return cut, start, stop


def shards_of(whole: dict[str, Tensor], group: Group, dp: int, tp: int) -> list[Shard]:
    """This rank's shards of `whole`, with zero gradients; 1 × 1 without a group, as an engine gives them."""
    shards = []
    for spec in specs():
        held = held_ranges(dp, tp)[spec.name]
        cut, start, stop = held[group.index]
        ranges = tuple((a, b) if other.owner else (a, a) for other, a, b in held)
        master = whole[spec.name].reshape(-1)[start:stop].clone()
        several = group if group.size > 1 else None
        grad = torch.zeros_like(master)
        shards.append(Shard(spec, start, stop, master, grad, several, ranges if several else (), owner=cut.owner))
    return shards


def set_grads(shards: Sequence[Shard], whole: dict[str, Tensor]) -> None:
    for shard in shards:
        shard.gradient().copy_(whole[shard.spec.name].reshape(-1)[shard.start : shard.stop])
