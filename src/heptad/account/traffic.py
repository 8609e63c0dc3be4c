"""What one rank sends in a whole training step: the data axis, and the small collectives around it. No torch.

`step_traffic` is a formula over the job and its parameters; the ledger counts; `verify` and the tests assert that they
are equal, phase by phase:

| phase | what | bytes of the full buffer |
|---|---|---|
| count | targets of the global batch, before the first backward | 8 (one int64) |
| forward, backward | gathers, reductions: `axes/data/cost.py` | buckets |
| loss | sum of the losses, and whether a rank asks to stop | 16 (two fp64) |
| norm | sum of squares over the ranks between which parameters are cut | 8 (one fp64) |
| update | Muon assembles matrices that are cut: `optim/cost.py` | padded matrices |

A step that is skipped sends no "update" (and a non-finite one an extra "check"): neither is predicted.
"""

from __future__ import annotations

from collections.abc import Sequence

from heptad.axes.data import cost
from heptad.axes.data.buckets import plan_buckets, ranges_of, unit_uses
from heptad.axes.data.stages import LOSS_AXES, replica_axes, shard_axes
from heptad.config.schema import Job
from heptad.mesh.layout import Layout
from heptad.models.spec import ParamSpec, UnitSpec
from heptad.optim.cost import muon_traffic, norm_traffic
from heptad.optim.roles import kind_of
from heptad.precision.dtypes import dtypes_of
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
    found = once_a_step(layout) + (norm_traffic(*shards) if shards[1] > 1 else [])
    if job.layout.engine == "fsdp2":
        replicas = cost.axis_sizes(layout, replica_axes(zero))
        sizes = (BYTES_PER_ELEMENT[dtypes.params], reduce_bytes)
        return found + cost.fsdp2_traffic(units, specs, shards, replicas, microbatches, *sizes)
    buckets = plan_buckets(units, specs, shards[1], job.layout.bucket_mb, reduce_bytes)
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
    cuts = [
        ranges_of(bucket, slot, shards[1])
        for bucket in buckets
        for slot in bucket.slots
        if slot.spec.trainable and kind_of(job.optimizer, slot.spec) == "muon"
    ]
    return found + muon_traffic(cuts, shards[0], BYTES_PER_ELEMENT[dtypes.master])


def once_a_step(layout: Layout) -> list[Transfer]:
    """The all-reduces of the count of targets and of the loss, over every rank that reads other tokens."""
    axis, num_ranks = cost.axis_sizes(layout, LOSS_AXES)
    if num_ranks == 1:
        return []
    sizes = (("count", COUNT_BYTES), ("loss", LOSS_BYTES))
    return [Transfer("all_reduce", axis, phase, sent_bytes("all_reduce", size, num_ranks)) for phase, size in sizes]
