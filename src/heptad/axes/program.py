"""From a job to the program of each rank, as data: which stage is where, what is recomputed, every action. No torch.

Predictions and the running side start from the same values: `account/traffic.py` counts what a rank sends, `apply.py`
hands the program to an executor. Read next: `schedule/expand.py`, `schedule/lower.py`, `apply.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from heptad.axes.data.buckets import plan_buckets, unit_uses
from heptad.axes.data.stages import data_rule, shard_counts
from heptad.axes.pipeline.balance import balanced, from_sizes, unit_costs
from heptad.axes.pipeline.generate import claimed_live, generate
from heptad.config.schema import Job
from heptad.mesh.layout import Layout
from heptad.models.cut import family_cuts, local_specs
from heptad.models.share import shares
from heptad.models.spec import ParamSpec, UnitSpec, param_specs, unit_specs
from heptad.precision.dtypes import dtypes_of
from heptad.recompute.policy import check_moves, segments
from heptad.schedule.action import Action, Kind, Program, Segments, UnitUse, forward_only, gradient_accumulation
from heptad.schedule.check import check
from heptad.schedule.expand import Stages, Work, evaluation, expand
from heptad.schedule.lower import lower
from heptad.schedule.pipeline_check import check_schedule
from heptad.units import BYTES_PER_ELEMENT


def microbatches_of(job: Job) -> int:
    """Micro-batches a data rank runs in one step."""
    return job.train.global_batch // (Layout.of(job.layout).data_ranks * job.train.micro_batch)


def stages_of(job: Job, units: Sequence[UnitSpec]) -> Stages | None:
    """The schedule of a step and the units of each stage; None without a pipeline. Raises ConfigError."""
    section = job.layout
    if section.pp == 1:
        return None
    schedule = generate(section.schedule, section.pp, section.vpp, microbatches_of(job))
    check_schedule(schedule, claimed_live(section.schedule, section.pp, section.vpp, microbatches_of(job)))
    giving = tuple(index for index, unit in enumerate(units) if section.ep > 1 and _routes(unit))
    if section.layers_per_stage:
        return Stages.of(schedule, from_sizes(section.layers_per_stage), giving)
    return Stages.of(schedule, balanced(unit_costs(job.model, job.data.seq_len), schedule.num_stages), giving)


def _routes(unit: UnitSpec) -> bool:
    """Whether it has routed experts, so that it waits for other ranks where those have some of them."""
    return any(".experts." in name for name in unit.params)


def step_program(
    job: Job,
    uses: tuple[UnitUse, ...],
    microbatches: int,
    recompute: Segments,
    train: bool = True,
    stages: Stages | None = None,
    place: int = 0,
) -> Program:
    """Generate, lower and check; raises ScheduleError if the result were wrong. `place`: along the pipeline."""
    rule = data_rule(job.layout)
    if stages is None:
        compute = gradient_accumulation(uses, microbatches, recompute) if train else forward_only(uses, microbatches)
        work = Work.of(compute)
    else:
        work = expand(stages, place, uses, recompute) if train else evaluation(stages, place, uses, microbatches)
    offload = job.offload.activations == "cpu"
    program = lower(work, uses, rule, train, recompute, offload)
    if offload and train:
        check_moves((*program, *_moves_elsewhere(program, uses, job, recompute, stages)), job.layout)
    check(program, uses, rule, recompute if train else (), work=None if stages is None else work.pairs)
    return program


def programs_of(job: Job, units: Sequence[UnitSpec], specs: Sequence[ParamSpec]) -> tuple[Stages | None, list[Program]]:
    """The stages, and the checked program of each rank of the pipeline, without a process group. Raises ConfigError."""
    stages, layout = stages_of(job, units), job.layout
    held, counts = family_cuts(specs, job.model, layout), shard_counts(Layout.of(layout), layout.zero)
    reduce_bytes = BYTES_PER_ELEMENT[dtypes_of(job.precision, "cpu").reduce]
    recompute, programs = recomputed(job, units, stages), []
    every = [range(len(units))] if stages is None else stages.held_by_all()
    for place, share in enumerate(shares(every, units, specs)):
        buckets = plan_buckets(units, local_specs(held, share.specs), counts, layout.bucket_mb, reduce_bytes, share)
        uses = unit_uses(units, buckets, specs, share)
        programs.append(step_program(job, uses, microbatches_of(job), recompute, True, stages, place))
    return stages, programs


def check_program(job: Job) -> None:
    """Raise ConfigError for what only the program of a resolved job shows: offload that moves nothing. (A class of
    one's own shows its units once it is built.)"""
    if job.model.class_ is None and job.offload.activations != "none":
        programs_of(job, unit_specs(job.model), param_specs(job.model))


def _moves_elsewhere(
    program: Program, uses: tuple[UnitUse, ...], job: Job, recompute: Segments, stages: Stages | None
) -> Program:
    """Of a pipeline, where nothing moves on one rank: what other ranks move (a last stage has no time to)."""
    if stages is None or any(action.kind is Kind.OUT and action.index > 0 for action in program):
        return ()
    rule, found = data_rule(job.layout), list[Action]()
    for place in range(stages.schedule.num_ranks):
        found += lower(expand(stages, place, uses, recompute), uses, rule, True, recompute, offload=True)
    return tuple(found)


def recomputed(job: Job, units: Sequence[UnitSpec], stages: Stages | None = None) -> Segments:
    """Units whose forward runs again in the backward, in segments, none of which reaches over two stages.

    Raises ConfigError for a policy that cannot work.
    """
    section = job.recompute
    found = segments(section.mode, section.segment, section.layers, [unit.kind for unit in units])
    if stages is None:
        return found
    parts = (tuple(unit for unit in segment if unit in stage) for segment in found for stage in stages.units)
    return tuple(part for part in parts if part)
