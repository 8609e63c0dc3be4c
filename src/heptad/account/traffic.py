"""What one rank sends in a whole training step: the data axis, and the small collectives around it. No torch.

`step_traffic` is a formula over the job and its parameters; the ledger counts; `verify` and the tests assert that they
are equal, phase by phase:

| phase | what | bytes of the full buffer |
|---|---|---|
| count | targets of the global batch, before the first backward | 8 (one int64) |
| forward, backward | gathers, reductions: `axes/data/cost.py` | buckets |
| loss | sum of the losses, and whether a rank asks to stop | 16 (two fp64) |
| forward, backward | the tensor axis's regions: `axes/tensor/cost.py` | the stream |
| shared | gradients that are a part only on each tensor rank | norms, shared kv heads |
| norm | sum of squares over the ranks between which parameters are cut | 8 (one fp64) |
| update | Muon assembles matrices that are cut: `optim/cost.py` | padded matrices |

A step that is skipped sends no "update" (and a non-finite one an extra "check"): neither is predicted.
"""

from __future__ import annotations

from collections.abc import Sequence

from heptad.axes.data import cost
from heptad.axes.data.buckets import BucketSpec, plan_buckets, ranges_of, tiles_of, unit_uses
from heptad.axes.data.stages import LOSS_AXES, holder_axes, replica_axes, shard_axes
from heptad.axes.tensor import cost as tensor
from heptad.config.schema import Job
from heptad.mesh.layout import Layout
from heptad.models.chunk import chunk_tokens
from heptad.models.cut import Cut
from heptad.models.cut import cuts as cuts_of
from heptad.models.spec import ParamSpec, UnitSpec
from heptad.optim.cost import muon_traffic, norm_traffic
from heptad.optim.roles import kind_of
from heptad.precision.dtypes import Dtypes, dtypes_of
from heptad.schedule.action import Segments
from heptad.trace import Transfer
from heptad.units import BYTES_PER_ELEMENT, sent_bytes

COUNT_BYTES, LOSS_BYTES = 8, 16


def step_traffic(
    job: Job,
    units: Sequence[UnitSpec],
    specs: Sequence[ParamSpec],
    recompute: Segments = (),
    device_type: str = "cpu",
) -> list[Transfer]:
    """Every transfer of one rank in one applied step of a resolved job; `recompute`: what runs forward again."""
    layout, zero = Layout.of(job.layout), job.layout.zero
    shards = cost.axis_sizes(layout, shard_axes(zero))
    dtypes = dtypes_of(job.precision, device_type)
    reduce_bytes = BYTES_PER_ELEMENT[dtypes.reduce]
    microbatches = job.train.global_batch // (layout.data_ranks * job.train.micro_batch)
    holders = cost.axis_sizes(layout, holder_axes(zero))
    found = once_a_step(layout) + (norm_traffic(*holders) if holders[1] > 1 else [])
    if job.layout.engine == "fsdp2":
        replicas = cost.axis_sizes(layout, replica_axes(zero))
        sizes = (BYTES_PER_ELEMENT[dtypes.params], reduce_bytes)
        return found + cost.fsdp2_traffic(units, specs, shards, replicas, microbatches, *sizes)
    buckets, held = buckets_of(job, units, specs, device_type)
    found += tensor.traffic(units, specs, _stream(job, dtypes), microbatches, recompute)
    found += cost.parts_traffic(buckets, held[0], shards[1], layout.degree("tp"), reduce_bytes)
    found += cost.traffic(
        buckets,
        unit_uses(units, buckets),
        zero,
        shards,
        cost.axis_sizes(layout, replica_axes(zero)),
        microbatches,
        BYTES_PER_ELEMENT[dtypes.params],
        reduce_bytes,
        recompute,
    )
    tiles = [
        tiles_of(ranges_of(bucket, slot, shards[1]), [cuts[slot.spec.name] for cuts in held])
        for bucket in buckets
        for slot in bucket.slots
        if slot.spec.trainable and kind_of(job.optimizer, slot.spec) == "muon"
    ]
    return found + muon_traffic(tiles, holders[0], BYTES_PER_ELEMENT[dtypes.master])


def buckets_of(
    job: Job, units: Sequence[UnitSpec], specs: Sequence[ParamSpec], device_type: str = "cpu"
) -> tuple[tuple[BucketSpec, ...], tuple[dict[str, Cut], ...]]:
    """The buckets of every rank, in local shapes, and what each tensor rank holds of each parameter."""
    layout = Layout.of(job.layout)
    held = cuts_of(specs, job.model, layout.degree("tp"), job.layout.sequence_parallel)
    local = [held[0][spec.name].local for spec in specs]
    num_shards = layout.degree(*shard_axes(job.layout.zero))
    reduce_bytes = BYTES_PER_ELEMENT[dtypes_of(job.precision, device_type).reduce]
    return plan_buckets(units, local, num_shards, job.layout.bucket_mb, reduce_bytes), held


def _stream(job: Job, dtypes: Dtypes) -> tensor.Sizes:
    """Sizes of what the tensor axis sends."""
    layout, model, tokens = job.layout, job.model, job.train.micro_batch * job.data.seq_len
    wide = 8 if dtypes.params == "fp64" else 4
    rows = -(-model.vocab // layout.tp)
    return tensor.Sizes(
        layout.tp,
        tokens,
        model.width,
        BYTES_PER_ELEMENT[dtypes.params],
        wide,
        layout.sequence_parallel,
        layout.keep_gathered,
        -(-tokens // chunk_tokens(job.train.loss_chunk, tokens, rows, wide)),
    )


def once_a_step(layout: Layout) -> list[Transfer]:
    """The all-reduces of the count of targets and of the loss. Over all ranks: of those that read the same tokens one
    counts, but each must know.
    """
    axis, num_ranks = cost.axis_sizes(layout, LOSS_AXES)
    if num_ranks == 1:
        return []
    sizes = (("count", COUNT_BYTES), ("loss", LOSS_BYTES))
    return [Transfer("all_reduce", axis, phase, sent_bytes("all_reduce", size, num_ranks)) for phase, size in sizes]
