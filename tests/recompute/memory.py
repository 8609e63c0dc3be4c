"""Live bytes of real runs, action by action, on forked ranks: what `recompute/cost.py` and `peak.py` must equal."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from heptad.axes.apply import Parallel, apply
from heptad.axes.context.take import take
from heptad.axes.expert import flow
from heptad.axes.program import microbatches_of
from heptad.config.schema import Job
from heptad.mesh import collectives
from heptad.models.batch import Batch
from heptad.models.resolve import resolve
from heptad.models.router import routers
from heptad.precision.dtypes import dtypes_of
from heptad.recompute.cost import Sizes
from heptad.recompute.expert_cost import Dispatched
from heptad.recompute.peak import alive
from heptad.recompute.policy import chosen
from heptad.schedule.action import Action, Kind
from heptad.schedule.executor import _Step
from heptad.verify.meter import MemoryMeter

SIZES = dict(layers=2, width=10, heads=4, kv_heads=2, head_dim=6, mlp_width=23, vocab=37, max_positions=7)
GPT = dict(
    norm="layer", mlp="plain", activation="gelu", positions="learned", qkv_bias=True, mlp_bias=True,
    attention_bias=True, kv_heads=4,
)  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {"gpt": GPT, "llama": {}, "qwen": dict(qk_norm=True, tied=True)}
STREAMS: dict[str, dict[str, Any]] = {
    "whole": {},
    "cut": dict(sequence_parallel=True),
    "kept": dict(sequence_parallel=True, keep_gathered=True),
}


def memory_job(
    model: dict[str, Any],
    params: str = "fp32",
    recompute: dict[str, Any] | None = None,
    loss_chunk: Any = "auto",
    batch: int = 2,
    length: int = 7,
    microbatches: int = 1,
    **layout: Any,
) -> Job:
    """Micro-batches of `batch` sequences; parameters and gradients resident (stage 0)."""
    return resolve(
        Job.model_validate({
            "model": {**SIZES, **model},
            "layout": {"zero": 0, "bucket_mb": 0.0, **layout},
            "precision": {"params": params},
            "recompute": recompute or {},
            "optimizer": {"name": "sgd", "schedule": "constant"},
            "data": {"seq_len": length},
            "train": {
                "global_batch": batch * microbatches, "micro_batch": batch, "steps": 1, "loss_chunk": loss_chunk,
            },
        })
    )  # fmt: skip


def memory_batch(job: Job, documents: bool, data_rank: int = 0) -> Batch:
    """All tokens are targets; with `documents` the last sequence holds two. Each data rank has its own."""
    shape = (job.train.micro_batch, job.data.seq_len)
    generator = torch.Generator().manual_seed(1 + data_rank)
    ids, labels = (torch.randint(job.model.vocab, shape, generator=generator) for _ in range(2))
    parts = torch.zeros(shape, dtype=torch.int64)
    if documents:
        parts[-1, 3:] = 1
    positions = torch.arange(shape[1]).repeat(shape[0], 1) - 3 * parts
    return Batch(ids, labels, positions, parts, torch.arange(ids.numel()).view(shape), 1)


def inputs_of(parallel: Parallel, batch: Batch) -> list[Tensor]:
    """What is alive before the step: parameters, gradients, the batch."""
    buckets = [t for b in parallel.engine.buckets for t in (b.full, b.master, b.grad_full, b.grad_shard)]
    found = [batch.ids, batch.labels, batch.positions, batch.documents, batch.index, batch.mask, batch.numbers]
    return [*buckets, *(tensor for tensor in found if tensor is not None)]


class Watch(MemoryMeter):
    """Looks only when it is asked to: the peak inside an action is not wanted here."""

    def sample(self) -> int:
        """Nothing."""
        return 0


@dataclass(frozen=True)
class Found:
    """Of one step on one rank: each compute action, the live bytes after it beyond those before the step, predicted."""

    actions: list[str]
    measured: list[int]
    predicted: list[int]


def predicted(parallel: Parallel, sizes: Sizes) -> list[int]:
    """Bytes alive after each compute action of a step, by `peak.alive`."""
    section = parallel.job.recompute
    kinds = [unit.kind for unit in parallel.model.unit_specs]
    selective = chosen(section.mode, section.layers, kinds) if section.mode == "selective" else ()
    return [
        num_bytes
        for _, num_bytes in alive(sizes, parallel.program(microbatches_of(parallel.job)), parallel.recompute, selective)
    ]


def step_bytes(rank: int, job: Job, documents: bool) -> Found:
    """One step, measured action by action. Gradients are summed in place: an exchange of two ranks has a buffer."""
    with mock.patch.object(collectives, "EXCHANGE_BYTES", 0):
        return _step_bytes(rank, job, documents)


def _step_bytes(rank: int, job: Job, documents: bool) -> Found:
    parallel = apply(job, rank, torch.device("cpu"))
    parallel.model.module.train()
    parallel.engine.begin_step()
    coords = parallel.mesh.layout.coords(rank)
    batch = take(memory_batch(job, documents, parallel.mesh.layout.data_rank(rank)), job.layout, coords["cp"])
    spread = _dispatched(parallel, batch) if job.layout.ep * job.layout.etp > 1 else None
    wanted = predicted(parallel, Sizes.of(job, documents, index=coords["tp"], dispatched=spread))
    meter = Watch(inputs_of(parallel, batch))
    before, actions, seen, compute = meter.current_bytes(), [], [], _Step.compute

    def sampled(step: _Step, action: Action) -> None:
        compute(step, action)
        actions.append(str(action))
        seen.append(settled(meter, before, wanted[len(seen)]) if seen == wanted[: len(seen)] else -1)

    with mock.patch.object(_Step, "compute", sampled), meter:
        parallel.executor.run(
            parallel.program(microbatches_of(parallel.job)), [batch] * microbatches_of(job), update=lambda _: None
        )
    return Found(actions, seen, wanted)


def _dispatched(parallel: Parallel, batch: Batch) -> Dispatched:
    """Where the tokens of the model's one mixture go: a step is run before. All ranks are one block."""
    job = parallel.job
    (router,) = routers(parallel.model.module).values()
    router.choices = {}
    number = microbatches_of(job)
    parallel.executor.run(parallel.program(number), [batch] * number, update=lambda _: None)
    parallel.engine.begin_step()
    (own,), router.choices = router.choices.values(), None
    every: list[Any] = [None] * parallel.mesh.layout.world
    dist.all_gather_object(every, own.numpy())
    sizes = flow.Sizes.of(job, dtypes_of(job.precision, "cpu"))
    return flow.dispatched(sizes, flow.flow_of(sizes, every), parallel.mesh.rank)


def settled(meter: MemoryMeter, before: int, wanted: int) -> int:
    """Live bytes; while they are too many, for a second: gloo's thread lets go of a buffer just after its wait."""
    end = time.monotonic() + 1.0
    while (now := meter.current_bytes() - before) > wanted and time.monotonic() < end:
        time.sleep(0.001)
    return now


def many(rank: int, cases: list[tuple[Job, bool]]) -> list[Found]:
    """`step_bytes` of each (job, documents)."""
    return [step_bytes(rank, job, documents) for job, documents in cases]


def saved_bytes(rank: int, job: Job, documents: bool, unit: int) -> int:
    """Bytes that autograd is given to save in the forward of `unit`, once a storage, without parameters and batch."""
    parallel = apply(job, rank, torch.device("cpu"))
    parallel.model.module.train()
    batch = memory_batch(job, documents)
    there = {tensor.untyped_storage()._cdata for tensor in inputs_of(parallel, batch)}
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage()._cdata] = tensor
        return tensor

    step = _Step(parallel.executor, (), [batch], lambda _: 1.0, False, None)
    for at in range(unit + 1):
        saved.clear()
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            step.compute(Action(Kind.FORWARD, at, 0))
    return sum(tensor.untyped_storage().nbytes() for key, tensor in saved.items() if key not in there)
