"""Live bytes of real runs, action by action, on forked ranks: what `recompute/cost.py` and `peak.py` must equal."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from heptad.axes.apply import Parallel, apply
from heptad.axes.context.take import take
from heptad.axes.expert import flow
from heptad.axes.program import microbatches_of
from heptad.config.schema import Job
from heptad.launch.forked import forked
from heptad.mesh import collectives
from heptad.mesh.meter import MemoryMeter
from heptad.models.batch import Batch
from heptad.models.resolve import resolve
from heptad.models.router import Router, routers
from heptad.precision.dtypes import dtypes_of
from heptad.recompute.peak import alive
from heptad.recompute.policy import chosen
from heptad.recompute.sizes import Dispatched, Sizes
from heptad.schedule.action import Action, Kind
from heptad.schedule.compute import Step
from heptad.units import BYTES_PER_ELEMENT

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
MODES: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": dict(mode="selective"),
    "full": dict(mode="full"),
    "segment": dict(mode="full", segment=2),
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
            "optimizer": {"name": "sgd", "schedule": "constant", "clip_norm": "none"},
            "data": {"seq_len": length},
            "train": {
                "global_batch": batch * microbatches, "micro_batch": batch, "steps": 1, "loss_chunk": loss_chunk,
            },
        })
    )  # fmt: skip


def memory_batch(job: Job, documents: bool, number: int = 0) -> Batch:
    """All tokens are targets; with `documents` the last sequence holds two. Each `number` has its own."""
    shape = (job.train.micro_batch, job.data.seq_len)
    generator = torch.Generator().manual_seed(1 + number)
    ids, labels = (torch.randint(job.model.vocab, shape, generator=generator) for _ in range(2))
    parts = torch.zeros(shape, dtype=torch.int64)
    if documents:
        parts[-1, 3:] = 1
    positions = torch.arange(shape[1]).repeat(shape[0], 1) - 3 * parts
    return Batch(ids, labels, positions, parts, torch.arange(ids.numel()).view(shape), 1)


def inputs_of(parallel: Parallel, *batches: Batch) -> list[Tensor]:
    """What is alive before the step: parameters, gradients, routers' biases, the batches."""
    found = [t for b in parallel.engine.buckets for t in (b.full, b.master, b.grad_full, b.grad_shard)]
    found += [router.bias for router in routers(parallel.model.module).values()]
    for batch in batches:
        found += [batch.ids, batch.labels, batch.positions, batch.documents, batch.index, batch.mask, batch.numbers]
        found += [batch.real, batch.lengths]
        for ids, further in batch.further:
            found += [ids, further.labels, further.real, further.lengths]
    return [tensor for tensor in found if tensor is not None]


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


def predicted(parallel: Parallel, sizes: Sequence[Sizes]) -> list[int]:
    """Bytes alive after each compute action of a step, by `peak.alive`."""
    section = parallel.job.recompute
    kinds = [unit.kind for unit in parallel.model.unit_specs]
    selective = chosen(section.mode, section.layers, kinds) if section.mode == "selective" else ()
    program, job = parallel.program(len(sizes)), parallel.job
    versions = None
    if job.layout.schedule == "pipedream":
        element = BYTES_PER_ELEMENT[dtypes_of(job.precision, "cpu").params]
        versions = sum(bucket.spec.numel * element for bucket in parallel.engine.buckets if bucket.spec.trainable)
    return [num_bytes for _, num_bytes in alive(sizes, program, parallel.recompute, selective, versions)]


def step_bytes(rank: int, job: Job, documents: bool) -> Found:
    """One step, measured action by action. Gradients are summed in place: an exchange of two ranks has a buffer."""
    with mock.patch.object(collectives, "EXCHANGE_BYTES", 0):
        return _step_bytes(rank, job, documents)


def _step_bytes(rank: int, job: Job, documents: bool) -> Found:
    parallel = apply(job, rank, torch.device("cpu"))
    parallel.model.module.train()
    parallel.engine.begin_step()
    coords, number = parallel.mesh.layout.coords(rank), microbatches_of(job)
    first = parallel.mesh.layout.data_rank(rank) * number
    whole = [memory_batch(job, documents, first + microbatch) for microbatch in range(number)]
    batches = [take(batch, job.layout, coords["cp"], job.model.mtp_depth) for batch in whole]
    routing = _routing(parallel, batches) if job.model.experts is not None else [{}] * number
    wanted = predicted(parallel, [Sizes.of(job, documents, index=coords["tp"], routing=one) for one in routing])
    meter = Watch(inputs_of(parallel, *batches))
    before, actions, seen, compute = meter.current_bytes(), [], [], Step.compute

    def sampled(step: Step, action: Action) -> None:
        compute(step, action)
        actions.append(str(action))
        seen.append(settled(meter, before, wanted[len(seen)]) if seen == wanted[: len(seen)] else -1)

    with mock.patch.object(Step, "compute", sampled), meter:
        run(parallel, batches)
    return Found(actions, seen, wanted)


def run(parallel: Parallel, batches: Sequence[Batch]) -> None:
    """One step without an optimizer: updates change nothing."""
    program = parallel.program(len(batches))
    parallel.executor.run(program, batches, update=lambda _: None, update_stage=lambda _: parallel.engine.refresh())


def _routing(parallel: Parallel, batches: Sequence[Batch]) -> list[dict[int, Dispatched]]:
    """Of each micro-batch, where the rows of every mixture go: a step is run before. All ranks of a stage are one
    block of the mesh.
    """
    job, found = parallel.job, routers(parallel.model.module)
    for router in found.values():
        router.choices = {}
    run(parallel, batches)
    parallel.engine.begin_step()
    own = {name: [item.numpy() for item in _in_order(router, batches)] for name, router in found.items()}
    for router in found.values():
        router.choices = None
    every: list[Any] = [own]
    if dist.is_initialized():
        every = [None] * parallel.mesh.layout.world
        dist.all_gather_object(every, own)
    sizes = flow.Sizes.of(job, dtypes_of(job.precision, "cpu"))
    first = parallel.mesh.rank // sizes.ranks * sizes.ranks
    block = every[first : first + sizes.ranks]
    return [
        {
            _mixture(name, job.model.layers): flow.dispatched(
                sizes, flow.flow_of(sizes, [one[name][number] for one in block]), parallel.mesh.rank - first
            )
            for name, chosen in own.items()
            if chosen
        }
        for number in range(len(batches))
    ]


def _in_order(router: Router, batches: Sequence[Batch]) -> list[Tensor]:
    """What a router chose, by micro-batch; nothing on other stages."""
    assert router.choices is not None
    return [router.choices[id(batch.ids)] for batch in batches] if router.choices else []


def _mixture(name: str, layers: int) -> int:
    """Its number, from its router's name."""
    number = int(name.split(".mlp")[0].removesuffix(".block").rsplit(".", 1)[1])
    return number + layers if name.startswith("head.") else number


def settled(meter: MemoryMeter, before: int, wanted: int) -> int:
    """Live bytes; while they are too many, for a second: gloo's thread lets go of a buffer just after its wait."""
    end = time.monotonic() + 1.0
    while (now := meter.current_bytes() - before) > wanted and time.monotonic() < end:
        time.sleep(0.001)
    return now


def many(rank: int, cases: list[tuple[Job, bool]]) -> list[Found]:
    """`step_bytes` of each (job, documents)."""
    return [step_bytes(rank, job, documents) for job, documents in cases]


Case = tuple[dict[str, Any], dict[str, Any]]
"""Fields of the model; of `memory_job`."""


def assert_predicted(ranks: int, cases: Mapping[str, Case], other: bool = False) -> None:
    """Every rank's live bytes after every action of a step. Every second case has documents; `other`: the others."""
    jobs = [memory_job(model, **job) for model, job in cases.values()]
    for rank in forked(ranks, many, [(job, number % 2 != other) for number, job in enumerate(jobs)], timeout_s=900):
        for name, one in zip(cases, rank, strict=True):
            assert one.measured == one.predicted, (name, one.actions)


BOTH = pytest.mark.parametrize("other", [False, pytest.param(True, marks=pytest.mark.slow)])
"""Documents in every second case, and in the others."""


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

    step = Step(parallel.executor, (), [batch], lambda _: 1.0, False, None)
    for at in range(unit + 1):
        saved.clear()
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            step.compute(Action(Kind.FORWARD, at, 0))
    return sum(tensor.untyped_storage().nbytes() for key, tensor in saved.items() if key not in there)
