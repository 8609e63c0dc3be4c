"""The one place where axes meet: from a job to what one rank runs.

Order, and why: groups first (collective, so every rank makes them alike); the model on the meta device; the pipeline
(which units are here); the tensor axis (what of each parameter is here, where the stream is cut); the context axis
(which core attention has, on the heads that are left); the expert axis (how tokens get to experts); then the data axis,
since it owns the storage of every parameter as the other axes have cut it; recompute last, which wraps what there is.
Read next: `program.py` (what a rank does, as data), `axes/data/engine.py`, `schedule/executor.py`, `train/step.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from heptad.axes.context.apply import cut_attention
from heptad.axes.context.kernels import block_kernels
from heptad.axes.data.engine import DataEngine
from heptad.axes.data.shard import Holders
from heptad.axes.data.stages import LOSS_AXES, holder_axes, replica_axes, shard_axes
from heptad.axes.expert.apply import cut_experts
from heptad.axes.pipeline.transport import Transport
from heptad.axes.program import recomputed, stages_of, step_program
from heptad.axes.tensor.apply import cut_model
from heptad.config.context import degrees
from heptad.config.recompute import keeps_scores
from heptad.config.schema import Job
from heptad.mesh.collectives import Group
from heptad.mesh.device import Mesh
from heptad.mesh.layout import Layout
from heptad.models.batch import Batch
from heptad.models.build import Model, build
from heptad.models.cut import Summed, cuts
from heptad.models.share import shares
from heptad.precision.policy import Policy
from heptad.recompute.offload import Mover
from heptad.recompute.policy import chosen
from heptad.recompute.selective import drop_parts
from heptad.schedule.action import Program, Segments
from heptad.schedule.executor import Executor
from heptad.schedule.expand import Stages

if TYPE_CHECKING:
    from heptad.axes.data.fsdp2 import Fsdp2Engine


@dataclass(frozen=True)
class Parallel:
    """What one rank holds of a job: groups, model, engine, executor; `stages`: where there is a pipeline."""

    job: Job
    mesh: Mesh
    model: Model
    policy: Policy
    engine: DataEngine | Fsdp2Engine
    executor: Executor
    recompute: Segments
    stages: Stages | None
    transport: Transport | None

    def program(self, microbatches: int, train: bool = True) -> Program:
        """The checked program of a step (or an evaluation) of `microbatches` micro-batches."""
        place = self.mesh.layout.coords(self.mesh.rank)["pp"]
        return step_program(self.job, self.engine.uses, microbatches, self.recompute, train, self.stages, place)


def wanted_groups(zero: int) -> list[tuple[str, ...]]:
    """Axes a job needs groups along."""
    return [LOSS_AXES, shard_axes(zero), replica_axes(zero), holder_axes(zero), ("cp",), ("tp",), ("pp",)]


def _holders(job: Job, mesh: Mesh, model: Model, stages: Stages | None) -> Holders:
    """The tensor axis: seams of the model set, and who holds what of each parameter, along the pipeline too."""
    section, group = job.layout, mesh.group("tp")
    held = cuts(model.specs, job.model, group.size, section.sequence_parallel)
    cut_model(model, group, section.sequence_parallel, section.keep_gathered, held[group.index])
    sums: dict[Summed, Group] = {"tensor": group}
    copies = max((cut.copies for cut in held[0].values() if cut.summed == "copies"), default=1)
    if copies > 1:
        sums["copies"] = mesh.neighbours("tp", copies)
    every = range(len(model.units))
    along = shares([every] if stages is None else stages.held_by_all(), model.unit_specs, model.specs)
    ranks = sorted({ranks for share in along for ranks in share.groups()})
    groups = {places: mesh.places("pp", places) for places in ranks}  # collective: all of them, on every rank
    own = along[mesh.layout.coords(mesh.rank)["pp"]]
    shared = {places: found for places, found in groups.items() if found is not None and places in own.groups()}
    return Holders(mesh.group(*holder_axes(section.zero)), held, group.index, sums, own, shared)


def _context(job: Job, mesh: Mesh, model: Model, policy: Policy) -> None:
    """The context axis: core attention of every block, over the ring and over the neighbours that deal heads."""
    section = job.layout
    if section.cp == 1:
        return
    _, dealt = degrees(section)
    ring, ulysses = mesh.strided("cp", dealt), mesh.neighbours("cp", dealt)
    kernels = block_kernels(job.model, mesh.device, policy.params)
    cut_attention(model, ring, ulysses, section.context == "gather", job.model, kernels)


def _experts(job: Job, mesh: Mesh, model: Model) -> None:
    """The expert axis: the dispatch of every mixture, in one level or two, with communication of its own."""
    if job.model.experts is None:
        return
    inner = job.layout.ep_inner
    across, etp = mesh.strided("ep", inner), mesh.neighbours("etp", job.layout.etp)
    if inner == 1:
        cut_experts(model, across, etp)
    else:
        cut_experts(model, mesh.neighbours("ep", inner), etp, across)


def _transport(job: Job, mesh: Mesh, engine: DataEngine, stages: Stages, dtype: torch.dtype) -> Transport:
    layout, width = job.layout, job.model.width

    def shape_of(batch: Batch) -> torch.Size:
        if layout.sequence_parallel:
            return torch.Size((-(-batch.ids.numel() // layout.tp), width))
        return torch.Size((*batch.ids.shape, width))

    up, down = mesh.group("pp"), mesh.another("pp")
    return Transport(up, down, stages, engine.uses, shape_of, dtype, mesh.device)


def apply(job: Job, rank: int, device: torch.device, model: Model | None = None) -> Parallel:
    """Build rank `rank` of a resolved job. Collective over all ranks; `model` (on meta) instead of the job's own."""
    layout, zero = Layout.of(job.layout), job.layout.zero
    mesh = Mesh(layout, rank, wanted_groups(zero), device)
    policy = Policy.of(job.precision, device.type)
    model = build(job) if model is None else model
    if job.train.compile:
        from heptad.models.compiled import compile_model  # torch's compiler takes seconds to load

        compile_model(model.module, job.model.activation)
    stages = stages_of(job, model.unit_specs)
    _experts(job, mesh, model)
    transport = None
    if job.layout.engine == "fsdp2":
        from heptad.axes.data.fsdp2 import Fsdp2Engine  # a second of imports that only this engine needs

        engine: DataEngine | Fsdp2Engine = Fsdp2Engine(model, mesh, policy, job.train.seed)
    else:
        shards, replicas = mesh.group(*shard_axes(zero)), mesh.group(*replica_axes(zero))
        holders = _holders(job, mesh, model, stages)
        _context(job, mesh, model, policy)
        seed, bucket_mb = job.train.seed, job.layout.bucket_mb
        engine = DataEngine(model, zero, shards, replicas, holders, policy, device, bucket_mb, seed)
        if stages is not None:
            transport = _transport(job, mesh, engine, stages, policy.params)
    model.place(device, policy.master)
    recompute = recomputed(job, model.unit_specs, stages)
    if job.recompute.mode == "selective":
        kinds = [unit.kind for unit in model.unit_specs]
        drop_parts(model, keeps_scores(job.model, job.layout), chosen("selective", job.recompute.layers, kinds))
    backward_from = next((i for i, use in enumerate(engine.uses) if use.backward), len(engine.uses))
    mover = Mover(model, device) if job.offload.activations == "cpu" else None
    executor = Executor(model, engine, backward_from, recompute, rank, mesh.ledger, mover, transport)
    return Parallel(job, mesh, model, policy, engine, executor, recompute, stages, transport)
