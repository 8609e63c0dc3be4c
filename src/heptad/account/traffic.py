"""What one rank sends in a whole training step: the data axis, and the small collectives around it. No torch.

`step_traffic` is a formula over the job and its parameters; the ledger counts; `verify` and the tests assert that they
are equal, phase by phase:

| phase | what | bytes of the full buffer |
|---|---|---|
| count | targets of the global batch, before the first backward | 8 (one int64) |
| forward, backward | gathers, reductions: `axes/data/cost.py` | buckets |
| loss | sum of the losses, and whether a rank asks to stop | 16 (two fp64); routers' losses: 32 |
| forward, backward | the tensor axis's regions: `axes/tensor/cost.py` | the stream |
| forward, backward | keys and values, or heads, of the context axis: `axes/context/cost.py` | K/V, or q, k, v |
| forward, backward | what routers know of sequences that are cut: `routing.py` | counts, choices |
| forward, backward | rows to experts and back, given the routing or expected: `axes/expert/cost.py` | rows |
| forward, backward | outputs of stages and their gradients: `axes/pipeline/cost.py` | the stream |
| shared | gradients that are a part only on each tensor rank | norms, shared kv heads |
| shared | gradients of what several stages hold | tied tables; DualPipe: all |
| norm | sum of squares over the ranks between which parameters are cut, then over the pipeline | 8 (one fp64) |
| router | tokens of each expert and dropped choices, of each block with experts | 8·(E + 1) a block |
| update | Muon assembles matrices that are cut: `optim/cost.py` | padded matrices |

A step that is skipped sends no "update" (and a non-finite one an extra "check"): neither is predicted. An asynchronous
pipeline (PipeDream) updates M times a step: "shared" of tensor ranks, "norm" but over the pipeline, and "update" come
once an update, and "count" is M integers; a micro-batch without a target, which updates nothing, sends no "update".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from heptad.account import routing
from heptad.axes.context import cost as context
from heptad.axes.data import cost
from heptad.axes.data.buckets import BucketSpec, part_width, plan_buckets, ranges_of, tiles_of, unit_uses
from heptad.axes.data.stages import LOSS_AXES, data_rule, holder_axes, matrix_axes, reductions, shard_counts, teams
from heptad.axes.expert import cost as expert
from heptad.axes.expert.flow import Routed
from heptad.axes.expert.flow import Sizes as ExpertSizes
from heptad.axes.pipeline import cost as pipeline
from heptad.axes.program import microbatches_of, stages_of
from heptad.axes.tensor import cost as tensor
from heptad.config.schema import Job
from heptad.mesh.layout import Layout
from heptad.models.chunk import chunk_tokens
from heptad.models.cut import FAMILIES, Cuts, family_cuts, local_specs
from heptad.models.share import Share, shares, whole
from heptad.models.spec import ParamSpec, UnitSpec
from heptad.optim.cost import matrices, muon_traffic, norm_traffic
from heptad.optim.roles import kind_of
from heptad.precision.dtypes import Dtypes, dtypes_of
from heptad.schedule.action import Segments
from heptad.schedule.expand import Stages, expand
from heptad.schedule.lower import lower
from heptad.trace import Transfer
from heptad.units import BYTES_PER_ELEMENT, sent_bytes

COUNT_BYTES, LOSS_BYTES = 8, 16


def step_traffic(
    job: Job,
    units: Sequence[UnitSpec],
    specs: Sequence[ParamSpec],
    recompute: Segments = (),
    device_type: str = "cpu",
    place: int = 0,
    without_target: int = 0,
    routed: Routed | None = None,
) -> list[Transfer]:
    """Every transfer of one rank in one applied step of a resolved job.

    units, specs: of the whole model. recompute: what runs forward again. place: the rank's along the pipeline, on which
    what it sends depends; along the other axes all ranks send as much. without_target: micro-batches, over all data
    ranks, that have no target (only of an asynchronous pipeline does it matter). routed: where tokens went, on which
    what a rank sends to experts depends; None: expected, of even choices.
    """
    layout, zero = Layout.of(job.layout), job.layout.zero
    ranks = cost.families(layout, zero)
    dtypes = dtypes_of(job.precision, device_type)
    reduce_bytes = BYTES_PER_ELEMENT[dtypes.reduce]
    microbatches = microbatches_of(job)
    if job.layout.engine == "fsdp2":
        return _fsdp2(job, units, specs, recompute, ranks["dense"], dtypes)
    stages = stages_of(job, units)
    held = _Held.of(job, units, specs, stages, place, device_type)
    updates = stages.schedule.num_microbatches if stages is not None and stages.schedule.asynchronous else 1
    found = once_a_step(job, updates) + held.norm(updates) + _loads(job, specs)
    runs = (microbatches,) * len(units) if stages is None else pipeline.unit_runs(stages, place)
    stream = _stream(job, dtypes)
    found += tensor.traffic(units, specs, stream, runs, recompute)
    found += _to_experts(job, units, specs, dtypes, runs, recompute, routed)
    if layout.degree("cp") > 1:
        found += context.traffic(units, specs, context.Sizes.of(job, dtypes), runs, recompute)
    found += routing.traffic(job, units, specs, runs, recompute)
    found += updates * cost.parts_traffic(held.buckets, held.cuts["dense"][0], layout.degree("tp"), reduce_bytes)
    widths = (BYTES_PER_ELEMENT[dtypes.params], reduce_bytes)
    uses = unit_uses(units, held.buckets, specs, held.share)
    if stages is None:
        reduce = reductions(job.layout)
        found += cost.traffic(held.buckets, uses, zero, ranks, microbatches, *widths, recompute, reduce)
    else:
        program = lower(expand(stages, place, uses, recompute), uses, data_rule(job.layout), recompute=recompute)
        found += cost.program_traffic(held.buckets, program, zero, ranks, *widths)
        sent = stream.stream_bytes // (stream.tp if stream.sequence else 1)
        found += pipeline.messages(stages, place, units, specs, sent)
        copies = {places: part_width(held.buckets, held.share.shared(places)) for places in held.share.groups()}
        found += pipeline.copies_traffic(held.share, copies, reduce_bytes)
    return found + (updates - without_target) * held.muon(BYTES_PER_ELEMENT[dtypes.master])


def _fsdp2(
    job: Job,
    units: Sequence[UnitSpec],
    specs: Sequence[ParamSpec],
    recompute: Segments,
    ranks: cost.Ranks,
    dtypes: Dtypes,
) -> list[Transfer]:
    """Under `engine = "fsdp2"`, which knows one family of parameters."""
    axis, num_shards = ranks.shards
    found = once_a_step(job) + (norm_traffic(axis, num_shards) if num_shards > 1 else []) + _loads(job, specs)
    sizes = BYTES_PER_ELEMENT[dtypes.params], BYTES_PER_ELEMENT[dtypes.reduce]
    found += cost.fsdp2_traffic(units, specs, ranks.shards, ranks.replicas, microbatches_of(job), *sizes, recompute)
    moved = [spec for spec in specs if spec.trainable and kind_of(job.optimizer, spec) == "muon"]
    tiles = [matrix for spec in moved for matrix in matrices(spec, [cost.fsdp2_ranges(spec, num_shards)])]
    return found + muon_traffic(tiles, axis, BYTES_PER_ELEMENT[dtypes.master])


@dataclass(frozen=True, slots=True)
class _Held:
    """What a rank holds: its buckets in local shapes, each rank's part of every parameter, its stages' share."""

    job: Job
    buckets: tuple[BucketSpec, ...]
    cuts: Cuts
    share: Share

    @classmethod
    def of(
        cls,
        job: Job,
        units: Sequence[UnitSpec],
        specs: Sequence[ParamSpec],
        stages: Stages | None,
        place: int,
        device_type: str,
    ) -> _Held:
        held = family_cuts(specs, job.model, job.layout)
        share = whole(units, specs) if stages is None else shares(stages.held_by_all(), units, specs)[place]
        counts = shard_counts(Layout.of(job.layout), job.layout.zero)
        reduce_bytes = BYTES_PER_ELEMENT[dtypes_of(job.precision, device_type).reduce]
        local = local_specs(held, share.specs)
        return cls(job, plan_buckets(units, local, counts, job.layout.bucket_mb, reduce_bytes, share), held, share)

    def norm(self, updates: int) -> list[Transfer]:
        """Over the ranks between which this rank's parameters are cut, if it trains any, each update; then over the
        pipeline. Families that the same ranks hold share a sum, under the axis whose name comes first."""
        layout, pp = Layout.of(self.job.layout), self.job.layout.pp
        sums: dict[frozenset[int], tuple[str, int]] = {}
        for family in {bucket.family for bucket in self.buckets if bucket.trainable}:
            axes = holder_axes(self.job.layout.zero, family)
            named = cost.axis_sizes(layout, axes)
            ranks = frozenset(layout.group_of(0, axes))  # where two axes have one group in common, they have all
            sums[ranks] = min(sums.get(ranks, named), named)
        found = [item for named in sums.values() if named[1] > 1 for item in norm_traffic(*named)]
        return updates * found + (norm_traffic("pp", pp) if pp > 1 else [])

    def muon(self, master_bytes: int) -> list[Transfer]:
        """Matrices that are assembled for their update."""
        layout, zero = Layout.of(self.job.layout), self.job.layout.zero
        found = []
        for family in FAMILIES:
            own = teams(layout, zero, family)
            tiles = []
            for bucket in self.buckets:
                for slot in bucket.slots if bucket.trainable and bucket.family == family else ():
                    held = [cuts[slot.spec.name] for cuts in self.cuts[family]]
                    if kind_of(self.job.optimizer, held[0].spec) == "muon":
                        ranges = ranges_of(bucket, slot)
                        runs = [tiles_of(ranges, held, run) for run in range(len(held[0].runs))]
                        tiles += matrices(held[0].spec, runs, own)
            axis = layout.group_name(matrix_axes(zero, family))
            found += muon_traffic(tiles, axis, master_bytes, own)
        return found


def buckets_of(
    job: Job, units: Sequence[UnitSpec], specs: Sequence[ParamSpec], device_type: str = "cpu", place: int = 0
) -> tuple[tuple[BucketSpec, ...], Cuts]:
    """The buckets of every rank at `place` along the pipeline, in local shapes, and what each rank holds of each
    parameter."""
    held = _Held.of(job, units, specs, stages_of(job, units), place, device_type)
    return held.buckets, held.cuts


def _stream(job: Job, dtypes: Dtypes) -> tensor.Sizes:
    """Sizes of what the tensor axis sends."""
    layout, model = job.layout, job.model
    tokens = job.train.micro_batch * -(-job.data.seq_len // layout.cp)
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


def once_a_step(job: Job, counts: int = 1) -> list[Transfer]:
    """The all-reduces of the counts of targets and of the loss. Over all ranks: of those that read the same tokens one
    counts, but each must know.
    """
    axis, num_ranks = cost.axis_sizes(Layout.of(job.layout), LOSS_AXES)
    if num_ranks == 1:
        return []
    loss_bytes = LOSS_BYTES * (2 if routing.adds_losses(job.model) else 1)
    sizes = (("count", counts * COUNT_BYTES), ("loss", loss_bytes))
    return [Transfer("all_reduce", axis, phase, sent_bytes("all_reduce", size, num_ranks)) for phase, size in sizes]


def _to_experts(
    job: Job,
    units: Sequence[UnitSpec],
    specs: Sequence[ParamSpec],
    dtypes: Dtypes,
    runs: Sequence[int],
    recompute: Segments,
    routed: Routed | None,
) -> list[Transfer]:
    """The expert axis."""
    layout = job.layout
    if layout.ep * layout.etp == 1:
        return []
    sizes = ExpertSizes.of(job, dtypes)
    if routed is not None:
        return expert.traffic(units, specs, sizes, routed, recompute)
    tokens = -(-job.train.micro_batch * -(-job.data.seq_len // layout.cp) // layout.tp)
    return expert.expected_traffic(units, specs, sizes, tokens, runs, recompute)


def _loads(job: Job, specs: Sequence[ParamSpec]) -> list[Transfer]:
    """The all-reduce of the experts' loads, over all ranks."""
    axis, num_ranks = cost.axis_sizes(Layout.of(job.layout), LOSS_AXES)
    size = sum(COUNT_BYTES * (spec.shape[0] + 1) for spec in specs if spec.name.endswith(expert.GATE))
    if num_ranks == 1 or not size:
        return []
    return [Transfer("all_reduce", axis, "router", sent_bytes("all_reduce", size, num_ranks))]
