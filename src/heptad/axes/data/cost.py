"""What the data axis sends and holds, from the job's facts alone. Pure, no torch.

`traffic` counts uses of buckets by formula, not by walking the program, so it can disagree with `schedule/lower.py`
and with the ledger; tests and `verify` assert that it does not. Under a pipeline how often a bucket is gathered depends
on the order of the schedule's actions, so there `program_traffic` walks the program. Sources: ring formulas,
`units.sent_bytes`; bytes a parameter, ZeRO, arXiv 1910.02054, §3 and §5.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from heptad.axes.data.buckets import BucketSpec, part_width, parts_of
from heptad.axes.data.stages import replica_axes, shard_axes
from heptad.mesh.layout import Layout
from heptad.models.cut import FAMILIES, Cut, Family, Summed
from heptad.models.spec import ParamSpec, UnitSpec
from heptad.schedule.action import Kind, Program, Segments, UnitUse, backward_order
from heptad.schedule.lower import phases
from heptad.trace import Transfer
from heptad.units import sent_bytes


@dataclass(frozen=True, slots=True)
class Ranks:
    """(axis, number of ranks) that the buckets of one family are cut over, and copied over."""

    shards: tuple[str, int]
    replicas: tuple[str, int]


Families = Mapping[Family, Ranks]


def families(layout: Layout, zero: int) -> Families:
    """Of both families under stage `zero`."""
    return {
        family: Ranks(axis_sizes(layout, shard_axes(zero, family)), axis_sizes(layout, replica_axes(zero, family)))
        for family in FAMILIES
    }


def traffic(
    buckets: Sequence[BucketSpec],
    uses: Sequence[UnitUse],
    zero: int,
    ranks: Families,
    microbatches: int,
    param_bytes: int,
    reduce_bytes: int,
    recompute: Segments = (),
    reduce: str = "microbatch",
) -> list[Transfer]:
    """One training step of one rank. reduce: how often stages 2 and 3 reduce a gradient (`stages.reductions`).

    param_bytes, reduce_bytes: bytes of an element when gathered and when reduced.
    """
    found: list[Transfer] = []

    for bucket in buckets:
        params, grads = bucket.numel * param_bytes, bucket.numel * reduce_bytes
        shards, replicas = ranks[bucket.family].shards, ranks[bucket.family].replicas
        if zero > 0:
            forward, backward = gathers(uses, bucket.index, zero, microbatches, recompute)
            found.append(_repeat("all_gather", shards, "forward", params, forward))
            found.append(_repeat("all_gather", shards, "backward", params, backward))
        if bucket.trainable and any(bucket.index in use.writes for use in uses):
            if zero == 0:
                found.append(_repeat("all_reduce", replicas, "backward", grads, 1))
            else:
                times = 1 if zero == 1 or reduce == "step" else microbatches
                found.append(_repeat("reduce_scatter", shards, "backward", grads, times))
                found.append(_repeat("all_reduce", replicas, "backward", grads // shards[1], 1))
    return [transfer for transfer in found if transfer.count]


def program_traffic(
    buckets: Sequence[BucketSpec],
    program: Program,
    zero: int,
    ranks: Families,
    param_bytes: int,
    reduce_bytes: int,
) -> list[Transfer]:
    """The same for a rank that runs `program`: its gathers and reductions, one by one."""
    found: list[Transfer] = []
    for action, phase in zip(program, phases(program), strict=True):
        if action.kind not in (Kind.GATHER, Kind.REDUCE, Kind.ALL_REDUCE):
            continue
        bucket = buckets[action.index]
        own, grads = ranks[bucket.family], bucket.numel * reduce_bytes
        if action.kind is Kind.GATHER:
            found.append(_repeat("all_gather", own.shards, phase, bucket.numel * param_bytes, 1))
        elif action.kind is Kind.REDUCE:
            op, axis = ("reduce_scatter", own.shards) if zero > 0 else ("all_reduce", own.replicas)
            found.append(_repeat(op, axis, "backward", grads, 1))
        else:
            found.append(_repeat("all_reduce", own.replicas, "backward", grads // own.shards[1], 1))
    return [transfer for transfer in found if transfer.count]


def fsdp2_traffic(
    units: Sequence[UnitSpec],
    specs: Sequence[ParamSpec],
    shards: tuple[str, int],
    replicas: tuple[str, int],
    microbatches: int,
    param_bytes: int,
    reduce_bytes: int,
    recompute: Segments = (),
) -> list[Transfer]:
    """The same for `engine = "fsdp2"`: a gather a unit each way, a reduce-scatter and (HSDP) an all-reduce, each time.

    A unit that runs forward again is gathered for that too: its hooks do not know of the backward that follows. It cuts
    dim 0 of every parameter into equal parts, so rows are padded to a multiple of the shards.
    """
    by_name = {spec.name: spec for spec in specs}
    found: list[Transfer] = []
    trainable_below, again = False, {unit for segment in recompute for unit in segment}
    for at, unit in enumerate(units):
        own = [by_name[name] for name in unit.params]
        padded = [-(-spec.shape[0] // shards[1]) * shards[1] * (spec.numel // spec.shape[0]) for spec in own]
        params = sum(padded) * param_bytes
        grads = sum(n for n, spec in zip(padded, own, strict=True) if spec.trainable) * reduce_bytes
        trainable_below = trainable_below or grads > 0
        back = microbatches * trainable_below * (1 + (at in again))
        found.append(_repeat("all_gather", shards, "forward", params, microbatches))
        found.append(_repeat("all_gather", shards, "backward", params, back))
        found.append(_repeat("reduce_scatter", shards, "backward", grads, microbatches * (grads > 0)))
        found.append(_repeat("all_reduce", replicas, "backward", grads // shards[1], microbatches * (grads > 0)))
    return [transfer for transfer in found if transfer.count]


def fsdp2_ranges(spec: ParamSpec, shards: int) -> tuple[tuple[int, int], ...]:
    """Flat range [start, stop) of whole rows that each shard has of a parameter under `engine = "fsdp2"`."""
    rows, row = -(-spec.shape[0] // shards), spec.numel // spec.shape[0]
    return tuple(pairwise(min(at * rows, spec.shape[0]) * row for at in range(shards + 1)))


def _repeat(op: str, axis: tuple[str, int], phase: str, full_bytes: int, count: int) -> Transfer:
    """`count` collectives on `axis` (name, ranks); none on one rank."""
    count = count if axis[1] > 1 else 0
    return Transfer(op, axis[0], phase, count * sent_bytes(op, full_bytes, axis[1]), count)


def gathers(uses: Sequence[UnitUse], bucket: int, zero: int, microbatches: int, recompute: Segments) -> tuple[int, int]:
    """How often a bucket is gathered in the forward and in the backward of a step.

    Stages 1, 2: once. Stage 3: once for each stretch of neighbouring units that read it, each way; the stretch that
    runs over the turn (last unit forward, first action backward) is one, and so is one over the border of two
    micro-batches. A segment of recomputed units reads all its buckets again twice: up, then down.
    """
    reads_forward = [bucket in use.forward for use in uses]
    if not any(reads_forward):
        return 0, 0
    if zero < 3:
        return 1, 0
    backward: list[bool] = []
    for again, down in backward_order(uses, recompute):
        backward += [reads_forward[unit] for unit in again]
        backward += [bucket in uses[unit].backward_reads for unit in down]
    turn = bool(backward) and reads_forward[-1] and backward[0]
    border = (backward[-1] if backward else reads_forward[-1]) and reads_forward[0]
    stretches_forward, stretches_backward = _stretches(reads_forward), _stretches(backward)
    return (
        microbatches * stretches_forward - (microbatches - 1) * border,
        microbatches * (stretches_backward - turn),
    )


def _stretches(reads: Iterable[bool]) -> int:
    """Number of maximal runs of True."""
    count, before = 0, False
    for now in reads:
        count, before = count + (now and not before), now
    return count


def parts_traffic(buckets: Sequence[BucketSpec], cuts: Mapping[str, Cut], tp: int, reduce_bytes: int) -> list[Transfer]:
    """Once a step: dense gradients that are only a part on each tensor rank, one all-reduce a group of ranks."""
    copies = max((cut.copies for cut in cuts.values() if cut.summed == "copies"), default=1)
    kinds: tuple[tuple[Summed, int], ...] = (("tensor", tp), ("copies", copies))
    widths = [(part_width(buckets, parts_of(cuts, kind)), ranks) for kind, ranks in kinds]
    return [
        Transfer("all_reduce", "tp", "shared", sent_bytes("all_reduce", width * reduce_bytes, ranks))
        for width, ranks in widths
        if width and ranks > 1
    ]


def memory(
    buckets: Sequence[BucketSpec], zero: int, param_bytes: int, reduce_bytes: int, master_bytes: int
) -> dict[str, int]:
    """Resident bytes of one rank between steps, by kind; gathered parameters and open gradients come on top.

    "params": the computing copy where it stays resident; "master": the optimizer's copy where it is another one;
    "grads": what stays allocated. Optimizer state is the optimizer's own (`optim/cost.py`).
    """
    kinds = {"params": 0, "master": 0, "grads": 0}
    for bucket in buckets:
        shard = bucket.numel // bucket.num_shards
        stored = master_bytes if bucket.trainable else param_bytes
        if zero < 3:
            kinds["params"] += bucket.numel * param_bytes
        if zero == 3 or stored != param_bytes:
            kinds["master"] += shard * stored
        if bucket.trainable:
            kinds["grads"] += (bucket.numel if zero < 2 else shard) * reduce_bytes
    return kinds


def axis_sizes(layout: Layout, axes: tuple[str, ...]) -> tuple[str, int]:
    """(name as the ledger writes it, number of ranks) of the group along `axes`."""
    return layout.group_name(axes), layout.degree(*axes)
