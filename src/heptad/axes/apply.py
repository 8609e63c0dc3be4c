"""The one place where axes meet: from a job to what one rank runs.

Order, and why: the model on the meta device; groups (collective, so every rank makes them alike); the pipeline (which
units are here); the expert axis (how tokens get to experts); the tensor axis (where the stream is cut) and what of each
parameter is here, dense or an expert's; the context axis (which core attention has, on the heads that are left); then
the data axis, since it owns the storage of every parameter as the other axes have cut it; recompute last, which wraps
what there is.
Read next: `program.py` (what a rank does, as data), `axes/data/engine.py`, `schedule/executor.py`, `train/step.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from heptad.axes.context.apply import cut_attention
from heptad.axes.context.kernels import block_kernels
from heptad.axes.data.engine import DataEngine
from heptad.axes.data.shard import Holders, Owners
from heptad.axes.data.stages import (
    LOSS_AXES,
    ROUTED_AXES,
    holder_axes,
    matrix_axes,
    replica_axes,
    shard_axes,
    teams,
)
from heptad.axes.expert.apply import cut_experts
from heptad.axes.expert.sequences import cut_sequences
from heptad.axes.pipeline.transport import Transport
from heptad.axes.program import recomputed, stages_of, step_program
from heptad.axes.tensor.apply import cut_model
from heptad.config.context import degrees
from heptad.config.recompute import keeps_scores
from heptad.config.schema import Job
from heptad.mesh.collectives import Group
from heptad.mesh.device import Mesh
from heptad.mesh.layout import EXPERT_AXES, Layout
from heptad.mesh.regions import Stream
from heptad.models.batch import Batch
from heptad.models.build import Model, build
from heptad.models.cut import Cut, Family, Summed, family_cuts, family_of
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


def wanted_groups(zero: int, families: Sequence[Family]) -> list[tuple[str, ...]]:
    """Axes a job needs groups along."""
    kinds = (shard_axes, replica_axes, holder_axes, matrix_axes)
    of_family = [axes(zero, family) for family in families for axes in kinds]
    routed = [ROUTED_AXES, EXPERT_AXES] if "expert" in families else []
    return [LOSS_AXES, *of_family, ("cp",), ("tp",), ("pp",), *routed]


def families_of(model: Model) -> tuple[Family, ...]:
    """Dense parameters, and experts where there are some."""
    return ("dense", "expert") if any(family_of(spec) == "expert" for spec in model.specs) else ("dense",)


def _owners(job: Job, mesh: Mesh, model: Model, stages: Stages | None) -> Owners:
    """Tensor axis and expert axes: seams of the model set, who holds what of each parameter, along the pipeline too."""
    section, group = job.layout, mesh.group("tp")
    held = family_cuts(model.specs, job.model, section)
    places = {**mesh.layout.coords(mesh.rank), **mesh.layout.expert_coords(mesh.rank)}
    at: dict[Family, int] = {"dense": places["tp"], "expert": places["ep"] * section.etp + places["etp"]}
    found = {family: _holders(section.zero, mesh, family, held[family], at[family]) for family in families_of(model)}
    cut_model(model, group, section.sequence_parallel, section.keep_gathered, held["dense"][group.index])
    sums: dict[Summed, Group] = {"tensor": group}
    copies = max((cut.copies for cut in held["dense"][0].values() if cut.summed == "copies"), default=1)
    if copies > 1:
        sums["copies"] = mesh.neighbours("tp", copies)
    every = range(len(model.units))
    along = shares([every] if stages is None else stages.held_by_all(), model.unit_specs, model.specs)
    ranks = sorted({ranks for share in along for ranks in share.groups()})
    groups = {among: mesh.places("pp", among) for among in ranks}  # collective: all of them, on every rank
    own = along[mesh.layout.coords(mesh.rank)["pp"]]
    shared = {among: made for among, made in groups.items() if made is not None and among in own.groups()}
    return Owners(found, sums, own, shared)


def _holders(zero: int, mesh: Mesh, family: Family, cuts: Sequence[dict[str, Cut]], index: int) -> Holders:
    shards, replicas, group = (mesh.group(*axes(zero, family)) for axes in (shard_axes, replica_axes, holder_axes))
    team = mesh.group(*matrix_axes(zero, family))
    return Holders(shards, replicas, group, cuts, index, team, teams(mesh.layout, zero, family))


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


def _routing(job: Job, mesh: Mesh, model: Model) -> None:
    """What routers know of sequences that are cut, over context ranks and over tensor ranks."""
    if "expert" not in families_of(model):
        return
    stream = Stream(mesh.group("tp"), job.layout.sequence_parallel)
    cut_sequences(model, stream, mesh.group(*ROUTED_AXES))


def _transport(job: Job, mesh: Mesh, engine: DataEngine, stages: Stages, dtype: torch.dtype) -> Transport:
    layout, width = job.layout, job.model.width

    def shape_of(batch: Batch) -> torch.Size:
        if layout.sequence_parallel:
            return torch.Size((-(-batch.ids.numel() // layout.tp), width))
        return torch.Size((*batch.ids.shape, width))

    up, down = mesh.another("pp"), mesh.another("pp")  # their tags are no numbers of collectives
    return Transport(up, down, stages, engine.uses, shape_of, dtype, mesh.device)


def apply(job: Job, rank: int, device: torch.device, model: Model | None = None) -> Parallel:
    """Build rank `rank` of a resolved job. Collective over all ranks; `model` (on meta) instead of the job's own."""
    layout, zero = Layout.of(job.layout), job.layout.zero
    model = build(job) if model is None else model
    mesh = Mesh(layout, rank, wanted_groups(zero, families_of(model)), device)
    policy = Policy.of(job.precision, device.type)
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
        owners = _owners(job, mesh, model, stages)
        _context(job, mesh, model, policy)
        _routing(job, mesh, model)
        seed, bucket_mb = job.train.seed, job.layout.bucket_mb
        engine = DataEngine(model, zero, owners, policy, device, bucket_mb, seed)
        if stages is not None:
            transport = _transport(job, mesh, engine, stages, policy.params)
    model.place(device, policy.master)
    recompute = recomputed(job, model.unit_specs, stages)
    if job.recompute.mode == "selective":
        kinds = [unit.kind for unit in model.unit_specs]
        drop_parts(model, keeps_scores(job.model, job.layout), chosen("selective", job.recompute.layers, kinds))
    backward_from = next((i for i, use in enumerate(engine.uses) if use.backward), len(engine.uses))
    mover = Mover(model, device) if job.offload.activations == "cpu" else None
    executor = Executor(model, engine, backward_from, rank, mesh.ledger, recompute, mover, transport)
    return Parallel(job, mesh, model, policy, engine, executor, recompute, stages, transport)
