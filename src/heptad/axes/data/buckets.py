"""Which parameters share a bucket, and where each stands in it. Pure, no torch.

One unit a bucket; units smaller than `bucket_mb` join the next ones until they reach it. Frozen parameters have
buckets of their own, which are gathered but never reduced, and so have experts, which are cut over other ranks.
Offsets are multiples of 8 elements and shards too (16 bytes in bf16, what NCCL and tensor cores want); the padding this
costs is counted in `BucketSpec.numel`, and so in every prediction.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from heptad.models.cut import FAMILIES, Cut, Family, Summed, family_of
from heptad.models.share import Share
from heptad.models.spec import ParamSpec, UnitSpec
from heptad.schedule.action import UnitUse
from heptad.units import MB

ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class Slot:
    """Parameter `spec` at elements [offset, offset + spec.numel) of its bucket."""

    spec: ParamSpec
    offset: int


@dataclass(frozen=True, slots=True)
class BucketSpec:
    """`numel` elements including padding, a multiple of 8 × `num_shards`, the ranks its `family` is cut over."""

    index: int
    slots: tuple[Slot, ...]
    numel: int
    trainable: bool
    family: Family = "dense"
    num_shards: int = 1


def plan_buckets(
    units: Sequence[UnitSpec],
    specs: Sequence[ParamSpec],
    num_shards: Mapping[Family, int],
    bucket_mb: float,
    bytes_per_element: int,
    share: Share | None = None,
) -> tuple[BucketSpec, ...]:
    """Buckets in program order of their first unit. A parameter that two units own (one listed twice) has one slot.

    num_shards: ranks over which each family is cut.
    share: of a pipeline, only what this rank holds; parameters that other ranks hold too have buckets of their own,
    which are the same on each of them.
    """
    by_name = {spec.name: spec for spec in specs}
    buckets: list[BucketSpec] = []
    open_: dict[_Key, list[ParamSpec]] = {}
    seen: set[str] = set()

    def close(key: _Key) -> None:
        if members := open_.pop(key, []):
            buckets.append(_bucket(len(buckets), members, num_shards[key[1]], key[0], key[1]))

    for index, unit in enumerate(units):
        here = share is None or index in share.units
        for name in (*unit.params, *(unit.borrowed if share is not None else ())) if here else ():
            if name not in seen:
                seen.add(name)
                spec = by_name[name]
                key = spec.trainable, family_of(spec), () if share is None else share.holders[name]
                open_.setdefault(key, []).append(spec)
        for key, members in list(open_.items()):
            if sum(spec.numel for spec in members) * bytes_per_element >= bucket_mb * MB:
                close(key)
    for key in sorted(open_, key=lambda key: not key[0]):
        close(key)
    return tuple(buckets)


_Key = tuple[bool, Family, tuple[int, ...]]
"""What the parameters of one bucket have in common: trainable, family, holders along the pipeline."""


def _bucket(
    index: int, members: Sequence[ParamSpec], num_shards: int, trainable: bool, family: Family = "dense"
) -> BucketSpec:
    slots, offset = [], 0
    for spec in members:
        slots.append(Slot(spec, offset))
        offset += _round_up(spec.numel, ALIGNMENT)
    return BucketSpec(index, tuple(slots), _round_up(offset, ALIGNMENT * num_shards), trainable, family, num_shards)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def unit_uses(
    units: Sequence[UnitSpec],
    buckets: Sequence[BucketSpec],
    specs: Sequence[ParamSpec] = (),
    share: Share | None = None,
) -> tuple[UnitUse, ...]:
    """What each unit reads and writes, in buckets. A unit with nothing trainable in or below it has no backward.

    specs, share: of a pipeline, all parameters of the model, and which units are this rank's: others touch nothing.
    """
    home = {slot.spec.name: bucket for bucket in buckets for slot in bucket.slots}
    trained = {spec.name for spec in specs if spec.trainable}
    trained |= {name for name, bucket in home.items() if bucket.trainable}
    uses, trainable_below = [], False
    for index, unit in enumerate(units):
        names = (*unit.params, *unit.borrowed)
        trainable_below = trainable_below or any(name in trained for name in names)
        if share is not None and index not in share.units:
            uses.append(UnitUse(unit.name, (), (), (), trainable_below))
            continue
        writes = _indices(home[name] for name in names if home[name].trainable)
        reads = _indices(home[name] for name in unit.backward_reads)
        uses.append(UnitUse(unit.name, _indices(home[name] for name in names), reads, writes, trainable_below))
    return tuple(uses)


def _indices(buckets: object) -> tuple[int, ...]:
    return tuple(sorted({bucket.index for bucket in buckets}))  # type: ignore[attr-defined]


def ranges_of(bucket: BucketSpec, slot: Slot) -> tuple[tuple[int, int], ...]:
    """Flat range [start, stop) of the slot's parameter on each rank, the bucket being cut into equal shards."""
    length = bucket.numel // bucket.num_shards
    cuts = [min(max(rank * length - slot.offset, 0), slot.spec.numel) for rank in range(bucket.num_shards + 1)]
    return tuple(pairwise(cuts))


def tiles_of(ranges: Sequence[tuple[int, int]], held: Sequence[Cut], run: int = 0) -> tuple[tuple[int, int], ...]:
    """Of one parameter: the flat range of the whole tensor that each rank owns, data shards outermost, of its `run`.

    ranges: how the data axis cuts the local tensor; held: what the ranks hold of which each has such shards. A rank
    that is no owner has an empty range: the others, all their runs together, tile the tensor.
    """
    parts = [cut.runs[run].within(start, stop if cut.owner else start) for start, stop in ranges for cut in held]
    return tuple((part.whole, part.whole + part.numel) for part in parts)


def part_width(buckets: Sequence[BucketSpec], names: Collection[str]) -> int:
    """Elements one rank gives to a sum of the gradients of `names`: of each family the most that any data shard has of
    them, so that all give as many."""
    width = 0
    for family in FAMILIES:
        own = [bucket for bucket in buckets if bucket.family == family]
        slots = [(bucket, slot) for bucket in own for slot in bucket.slots]
        held = [
            [stop - start for start, stop in ranges_of(bucket, slot)]
            for bucket, slot in slots
            if slot.spec.trainable and slot.spec.name in names
        ]
        width += max((sum(rank) for rank in zip(*held, strict=True)), default=0)
    return width


def parts_of(cuts: Mapping[str, Cut], kind: Summed) -> frozenset[str]:
    """Parameters whose gradient on a tensor rank is a part of that kind."""
    return frozenset(name for name, cut in cuts.items() if cut.summed == kind)
