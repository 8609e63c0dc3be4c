"""The one place where axes meet: from a job to what one rank runs.

Order, and why: groups first (collective, so every rank makes them alike); the model on the meta device; the tensor axis
(what of each parameter is here, where the stream is cut); then the data axis, last of all, since it owns the storage of
every parameter as the other axes have cut it.
Read next: `axes/data/engine.py`, `schedule/executor.py`, `train/step.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from heptad.axes.data.engine import DataEngine
from heptad.axes.data.shard import Holders
from heptad.axes.data.stages import LOSS_AXES, data_rule, holder_axes, replica_axes, shard_axes
from heptad.axes.tensor.apply import cut_model
from heptad.config.schema import Job
from heptad.mesh.collectives import Group
from heptad.mesh.device import Mesh
from heptad.mesh.layout import Layout
from heptad.models.build import Model, build
from heptad.models.cut import Summed, cuts
from heptad.models.spec import UnitSpec
from heptad.precision.policy import Policy
from heptad.recompute.offload import Mover
from heptad.recompute.policy import check_moves, chosen, segments
from heptad.recompute.selective import drop_parts
from heptad.schedule.action import Program, Segments, UnitUse, forward_only, gradient_accumulation
from heptad.schedule.check import check
from heptad.schedule.executor import Executor
from heptad.schedule.lower import lower

if TYPE_CHECKING:
    from heptad.axes.data.fsdp2 import Fsdp2Engine


@dataclass(frozen=True)
class Parallel:
    """What one rank holds of a job: groups, model, engine, executor."""

    job: Job
    mesh: Mesh
    model: Model
    policy: Policy
    engine: DataEngine | Fsdp2Engine
    executor: Executor
    recompute: Segments

    def program(self, microbatches: int, train: bool = True) -> Program:
        """The checked program of a step (or an evaluation) of `microbatches` micro-batches."""
        return step_program(self.job, self.engine.uses, microbatches, self.recompute, train)


def microbatches_of(job: Job) -> int:
    """Micro-batches a data rank runs in one step."""
    return job.train.global_batch // (Layout.of(job.layout).data_ranks * job.train.micro_batch)


def step_program(
    job: Job, uses: tuple[UnitUse, ...], microbatches: int, recompute: Segments, train: bool = True
) -> Program:
    """Generate, lower and check; raises ScheduleError if the result were wrong."""
    rule = data_rule(job.layout)
    compute = gradient_accumulation(uses, microbatches, recompute) if train else forward_only(uses, microbatches)
    offload = job.offload.activations == "cpu"
    program = lower(compute, uses, rule, train, recompute, offload)
    if offload and train:
        check_moves(program, job.layout)
    check(program, uses, rule, recompute if train else ())
    return program


def recomputed(job: Job, units: Sequence[UnitSpec]) -> Segments:
    """Units whose forward runs again in the backward, in segments. Raises ConfigError for a policy that cannot work."""
    section = job.recompute
    return segments(section.mode, section.segment, section.layers, [unit.kind for unit in units])


def wanted_groups(zero: int) -> list[tuple[str, ...]]:
    """Axes a job needs groups along."""
    return [LOSS_AXES, shard_axes(zero), replica_axes(zero), holder_axes(zero), ("tp",)]


def _tensor(job: Job, mesh: Mesh, model: Model) -> Holders:
    """The tensor axis: seams of the model set, and who holds what of each parameter."""
    section, group = job.layout, mesh.group("tp")
    held = cuts(model.specs, job.model, group.size, section.sequence_parallel)
    cut_model(model, group, section.sequence_parallel, section.keep_gathered, held[group.index])
    sums: dict[Summed, Group] = {"tensor": group}
    copies = max((cut.copies for cut in held[0].values() if cut.summed == "copies"), default=1)
    if copies > 1:
        sums["copies"] = mesh.neighbours("tp", copies)
    return Holders(mesh.group(*holder_axes(section.zero)), held, group.index, sums)


def apply(job: Job, rank: int, device: torch.device, model: Model | None = None) -> Parallel:
    """Build rank `rank` of a resolved job. Collective over all ranks; `model` (on meta) instead of the job's own."""
    layout, zero = Layout.of(job.layout), job.layout.zero
    mesh = Mesh(layout, rank, wanted_groups(zero), device)
    policy = Policy.of(job.precision, device.type)
    model = build(job) if model is None else model
    if job.train.compile:
        from heptad.models.compiled import compile_model  # torch's compiler takes seconds to load

        compile_model(model.module, job.model.activation)
    if job.layout.engine == "fsdp2":
        from heptad.axes.data.fsdp2 import Fsdp2Engine  # a second of imports that only this engine needs

        engine: DataEngine | Fsdp2Engine = Fsdp2Engine(model, mesh, policy, job.train.seed)
    else:
        shards, replicas = mesh.group(*shard_axes(zero)), mesh.group(*replica_axes(zero))
        holders = _tensor(job, mesh, model)
        seed, bucket_mb = job.train.seed, job.layout.bucket_mb
        engine = DataEngine(model, zero, shards, replicas, holders, policy, device, bucket_mb, seed)
    recompute = recomputed(job, model.unit_specs)
    if job.recompute.mode == "selective":
        kinds = [unit.kind for unit in model.unit_specs]
        drop_parts(model, job.model, chosen("selective", job.recompute.layers, kinds))
    backward_from = next((i for i, use in enumerate(engine.uses) if use.backward), len(engine.uses))
    mover = Mover(model, device) if job.offload.activations == "cpu" else None
    executor = Executor(model, engine, backward_from, recompute, rank, mesh.ledger, mover)
    return Parallel(job, mesh, model, policy, engine, executor, recompute)
