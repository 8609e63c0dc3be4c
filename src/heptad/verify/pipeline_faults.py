"""Faults of the pipeline axis: copies whose gradients part, and what arrives at a stage is not what it should be.

Read next: `fault.py` (what a fault is), `faults.py` (all of them), `models/share.py` (who holds copies),
`axes/pipeline/transport.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from heptad.axes.pipeline.cost import messages
from heptad.axes.program import stages_of
from heptad.config.schema import Job
from heptad.mesh.collectives import Group
from heptad.models.batch import Batch
from heptad.models.build import build
from heptad.models.share import Share, shares
from heptad.models.spec import ParamSpec
from heptad.schedule.action import Action, Kind
from heptad.schedule.expand import Stages
from heptad.train import step as step_module
from heptad.train.step import Trainer
from heptad.verify.fault import Fault, FaultKind, anything, engine_of

# Where faults live

ONE_STAGE = "there is no pipeline (layout.pp = 1)"


def _stages(job: Job) -> Stages:
    found = stages_of(job, build(job).unit_specs)
    assert found is not None
    return found


def _shares(job: Job) -> tuple[Share, ...]:
    model = build(job)
    return shares(_stages(job).held_by_all(), model.unit_specs, model.specs)


def _where(rule: Callable[[Job], bool], why: str) -> Callable[[Job], tuple[str, ...] | str]:
    """On the pipeline axis, where `rule` holds of the job; else `why` not."""

    def home(job: Job) -> tuple[str, ...] | str:
        if job.layout.pp == 1:
            return ONE_STAGE
        return ("pp",) if rule(job) else why

    return home


def _twins(job: Job) -> bool:
    return len(_stages(job).where) == 2


def _tied_copies(job: Job) -> bool:
    """Whether the tied table lies on two ranks because it is tied: its stages do, and not every one has a twin."""
    borrowed = {name for unit in build(job).unit_specs for name in unit.borrowed}
    return not _twins(job) and any(share.groups() for share in _shares(job) if borrowed & share.holders.keys())


def _copied(job: Job, spec: ParamSpec) -> bool:
    return (
        job.layout.pp > 1
        and anything(job, spec)
        and any(len(share.holders.get(spec.name, ())) > 1 for share in _shares(job))
    )


def _several(job: Job) -> bool:
    """Whether the last stage runs two micro-batches on one rank; with two directions each rank has half of them."""
    return _stages(job).schedule.num_microbatches // len(_stages(job).where) > 1


def _sends_down(job: Job) -> bool:
    model = build(job)
    last = job.layout.pp - 1
    return any(item.phase == "backward" for item in messages(_stages(job), last, model.unit_specs, model.specs, 1))


# What they do


def _copy_left_out(fault: Fault, trainer: Trainer) -> None:
    """The aimed gradient is not summed over the ranks of the pipeline that hold the parameter."""
    for members, group, _ in engine_of(trainer)._parts:
        if group.axis == "pp":
            members[:] = [shard for shard in members if shard.spec.name != fault.param]


def _copies_counted(fault: Fault, trainer: Trainer) -> None:
    right = vars(step_module)["total_norm"]  # maybe wrong already: two faults

    def repeated(shards: Any, p: float = 2.0, pipeline: Group | None = None) -> Tensor:
        with torch.no_grad():
            found: Tensor = right([replace(shard, counted=True) for shard in shards], p, pipeline)
            return found

    setattr(step_module, "total_norm", repeated)  # noqa: B010


def _swapped_microbatches(fault: Fault, trainer: Trainer) -> None:
    """The last unit is given the labels of the other of its first two micro-batches."""
    executor, last = trainer.parallel.executor, len(trainer.parallel.model.units) - 1
    run, forward = executor.run, executor.forward
    pair: list[Batch] = []

    def begun(program: Any, batches: Sequence[Batch], *args: Any, **options: Any) -> list[Tensor]:
        pair[:] = batches[:2]
        return run(program, batches, *args, **options)

    def swapped(unit: int, inputs: Tensor | None, batch: Batch, *args: Any, **options: Any) -> Any:
        if unit == last and any(batch is one for one in pair):
            batch = pair[batch is pair[0] and len(pair) - 1]
        return forward(unit, inputs, batch, *args, **options)

    setattr(executor, "run", begun)  # noqa: B010
    setattr(executor, "forward", swapped)  # noqa: B010


def _around(fault: Fault, trainer: Trainer, wrap: Callable[[Callable[[Action, Any], None]], Any]) -> None:
    """On the last rank along the pipeline, in what it receives and sends."""
    transport = trainer.parallel.transport
    if transport is not None and fault.last_rank(trainer):
        setattr(transport, "act", wrap(transport.act))  # noqa: B010


def _stale_activation(fault: Fault, trainer: Trainer) -> None:
    before: dict[int, Tensor] = {}

    def wrap(act: Callable[[Action, Any], None]) -> Callable[[Action, Any], None]:
        def stale(action: Action, at: Any) -> None:
            act(action, at)
            if action.kind is Kind.WAIT_RECEIVE:
                arrived = at.boundaries[action.index - 1, action.microbatch]
                own = arrived.detach().clone()
                if action.index in before:
                    arrived.data.copy_(before[action.index])
                before[action.index] = own

        return stale

    _around(fault, trainer, wrap)


def _dropped_grad(fault: Fault, trainer: Trainer) -> None:
    def wrap(act: Callable[[Action, Any], None]) -> Callable[[Action, Any], None]:
        def dropped(action: Action, at: Any) -> None:
            if action.kind is Kind.SEND_GRAD and action.microbatch == 0:
                at.grads[action.index - 1, 0].zero_()
            act(action, at)

        return dropped

    _around(fault, trainer, wrap)


ONE_MICROBATCH = "each rank of the last stage has one micro-batch a step (train.global_batch)"
PIPELINE: dict[str, FaultKind] = {
    "tied_not_summed": FaultKind(
        "the gradients of a tied table's copies on the first and on the last stage are not summed",
        _where(_tied_copies, "no table is on two ranks because it is tied (model.tied, layout.schedule)"),
        _copy_left_out,
        _copied,
    ),
    "twin_not_summed": FaultKind(
        "the gradient of a parameter whose stage runs on two ranks is not summed over them",
        _where(_twins, "each stage is on one rank (layout.schedule = dualpipe has each on two)"),
        _copy_left_out,
        _copied,
    ),
    "copies_counted": FaultKind(
        "what several stages hold counts several times in the gradient norm",
        _where(
            lambda job: any(share.groups() for share in _shares(job)),
            "every parameter is on one rank of the pipeline (model.tied, layout.schedule)",
        ),
        _copies_counted,
        _copied,
    ),
    "swapped_microbatches": FaultKind(
        "the last stage meets the activations of one micro-batch with the labels of another",
        _where(_several, ONE_MICROBATCH),
        _swapped_microbatches,
    ),
    "stale_activation": FaultKind(
        "a stage computes with the activations that it received for the micro-batch before",
        _where(_several, ONE_MICROBATCH),
        _stale_activation,
    ),
    "dropped_grad": FaultKind(
        "the gradient that a stage sends down for one micro-batch is zero",
        _where(_sends_down, "no gradient goes down from the last rank: nothing is trained below (model.frozen)"),
        _dropped_grad,
    ),
}
