"""Faults of the data axis: reductions, gathers, the denominator, accumulation, the gradient norm over shards.

Read next: `fault.py` (what a fault is), `faults.py` (all of them), `axes/data/engine.py` (what they break).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from heptad.axes.data.bucket import Bucket, GradState
from heptad.axes.program import microbatches_of
from heptad.config.schema import Job
from heptad.mesh.collectives import Group
from heptad.models.batch import Batch
from heptad.models.taps import GradSink
from heptad.schedule.action import Action, Kind
from heptad.train import step as step_module
from heptad.train.step import Trainer
from heptad.verify.fault import Act, Fault, FaultKind, anything, engine_of, heptad_engine

DATA_AXES = ("dp_shard", "dp_replicate")


# Where faults live


def _one_data_axis(job: Job) -> tuple[str, ...] | str:
    found = [axis for axis in DATA_AXES if getattr(job.layout, axis) > 1]
    return tuple(found[:1]) or "there is one data rank (layout.dp_shard = layout.dp_replicate = 1)"


def _reduction(job: Job) -> tuple[str, ...] | str:
    """Stage 0 reduces over all data ranks at once, the others over the shards (or, with one shard, the replicas)."""
    if job.layout.zero == 0:
        found = tuple(axis for axis in DATA_AXES if getattr(job.layout, axis) > 1)
        return found or "there is one data rank (layout.dp_shard = layout.dp_replicate = 1)"
    return _one_data_axis(job)


def _replicas(job: Job) -> tuple[str, ...] | str:
    if job.layout.dp_replicate == 1:
        return "there are no replicas of a shard (layout.dp_replicate = 1)"
    if job.layout.zero == 0:
        return "stage 0 sums over all ranks in one all-reduce (layout.zero = 0); missing_reduction is its fault"
    return ("dp_replicate",)


def _shards(job: Job) -> tuple[str, ...] | str:
    if job.layout.dp_shard == 1:
        return "nothing is cut (layout.dp_shard = 1)"
    return ("dp_shard",) if job.layout.zero else "stage 0 cuts nothing (layout.zero = 0)"


def _accumulation(job: Job) -> tuple[str, ...] | str:
    data_ranks = job.layout.dp_replicate * job.layout.dp_shard
    one = job.train.global_batch == data_ranks * job.train.micro_batch
    return "each rank has one micro-batch a step (train.global_batch)" if one else ("accumulation",)


# What they do


def _around(trainer: Trainer, wrap: Callable[[Act], Act]) -> None:
    setattr(trainer.engine, "act", wrap(trainer.engine.act))  # noqa: B010


def _bucket(fault: Fault, trainer: Trainer) -> Bucket | None:
    """The bucket with the parameter aimed at; None where other stages of a pipeline hold it."""
    return next((bucket for bucket in engine_of(trainer).buckets if fault.param in bucket.params), None)


def _alone(group: Group) -> Group:
    """A group of this rank only: collectives do nothing."""
    return Group(group.axis, (group.ranks[group.index],), 0, None, group.ledger)


def _scale(fault: Fault, trainer: Trainer, everything: bool) -> None:
    engine = engine_of(trainer)
    if not fault.last_rank(trainer):
        return

    def wrap(act: Act) -> Act:
        def scaled(action: Action, phase: str) -> None:
            bucket = engine.buckets[action.index]
            if action.kind is Kind.REDUCE and bucket.grad_state is GradState.OPEN:
                if everything:
                    bucket.grad_full.mul_(2)
                elif fault.param in bucket.grad_views:
                    bucket.grad_views[fault.param].mul_(2)
            act(action, phase)

        return scaled

    _around(trainer, wrap)


def _missing_reduction(fault: Fault, trainer: Trainer) -> None:
    chosen = _bucket(fault, trainer)
    if chosen is None:
        return
    place, first, last = chosen.place, chosen.first, chosen.first + chosen.shard_numel
    alone = replace(place, sharded=False, replica_group=_alone(place.replica_group))
    silent = Kind.REDUCE if not place.sharded or place.shard_group.size > 1 else Kind.ALL_REDUCE

    def wrap(act: Act) -> Act:
        def unreduced(action: Action, phase: str) -> None:
            if action.index != chosen.spec.index:
                return act(action, phase)
            if action.kind is silent:
                chosen.place = alone
                act(action, phase)
                chosen.place = place
                return None
            if action.kind is Kind.WAIT_REDUCE and silent is Kind.REDUCE and place.sharded and place.free_grads:
                own, add = chosen.grad_full[first:last].clone(), chosen.accumulated
                act(action, phase)
                chosen.grad_shard.add_(own) if add else chosen.grad_shard.copy_(own)
                return None
            return act(action, phase)

        return unreduced

    _around(trainer, wrap)


def _replica_not_summed(fault: Fault, trainer: Trainer) -> None:
    chosen = _bucket(fault, trainer)
    if chosen is None:
        return
    place = chosen.place
    alone = replace(place, replica_group=_alone(place.replica_group))

    def wrap(act: Act) -> Act:
        def unsummed(action: Action, phase: str) -> None:
            skip = action.kind is Kind.ALL_REDUCE and action.index == chosen.spec.index
            chosen.place = alone if skip else place
            act(action, phase)
            chosen.place = place

        return unsummed

    _around(trainer, wrap)


def _stale_gather(fault: Fault, trainer: Trainer) -> None:
    chosen = _bucket(fault, trainer)
    if chosen is None or not chosen.place.sharded:
        return
    first, last = chosen.first, chosen.first + chosen.shard_numel
    kept: dict[str, Tensor] = {}

    def wrap(act: Act) -> Act:
        def stale(action: Action, phase: str) -> None:
            act(action, phase)
            if action.kind is Kind.WAIT_GATHER and action.index == chosen.spec.index:
                old = kept.setdefault("first step", chosen.full.data.clone())
                chosen.full.data[:first] = old[:first]
                chosen.full.data[last:] = old[last:]

        return stale

    _around(trainer, wrap)


def _wrong_denominator(fault: Fault, trainer: Trainer) -> None:
    if not fault.last_rank(trainer):
        return
    right = trainer.count_targets

    def local(batches: list[Batch]) -> Callable[[], int]:
        everyone = right(batches)
        return lambda: min(everyone(), max(sum(batch.num_targets() for batch in batches), 1))

    setattr(trainer, "count_targets", local)  # noqa: B010


def _dropped_microbatch(fault: Fault, trainer: Trainer) -> None:
    units = trainer.parallel.model.unit_specs
    chosen = next(at for at, unit in enumerate(units) if fault.param in unit.params)
    executor = trainer.parallel.executor
    right, last = executor.sink, microbatches_of(trainer.job) - 1

    def dropping(unit: int, microbatch: int) -> GradSink:
        return _Nowhere() if unit == chosen and microbatch == last > 0 else right(unit, microbatch)

    setattr(executor, "sink", dropping)  # noqa: B010


class _Nowhere:
    """A sink that forgets what it is given."""

    def add_matmul(self, param: nn.Parameter, a: Tensor, b: Tensor) -> None:
        """Forgotten."""

    def add_rows(self, param: nn.Parameter, rows: Tensor, values: Tensor) -> None:
        """Forgotten."""

    def add_groups(self, param: nn.Parameter, a: Tensor, b: Tensor, counts: Sequence[int]) -> None:
        """Forgotten."""

    def add(self, param: nn.Parameter, grad: Tensor) -> None:
        """Forgotten."""


def _norm_local(fault: Fault, trainer: Trainer) -> None:
    right = vars(step_module)["total_norm"]  # maybe wrong already: two faults

    def local(shards: Any, p: float = 2.0, pipeline: Group | None = None) -> Tensor:
        with torch.no_grad():
            found: Tensor = right([replace(shard, group=None) for shard in shards], p, pipeline)
            return found

    setattr(step_module, "total_norm", local)  # noqa: B010


DATA: dict[str, FaultKind] = {
    "rank_scale": FaultKind(
        "one data rank's gradients are doubled before they are summed",
        heptad_engine(_one_data_axis),
        lambda fault, trainer: _scale(fault, trainer, everything=True),
    ),
    "missing_reduction": FaultKind(
        "one bucket's gradients are not summed over ranks", heptad_engine(_reduction), _missing_reduction, anything
    ),
    "wrong_denominator": FaultKind(
        "one data rank divides by its own count of targets", _one_data_axis, _wrong_denominator
    ),
    "dropped_microbatch": FaultKind(
        "the last micro-batch's weight gradients of one unit are not added",
        heptad_engine(_accumulation),
        _dropped_microbatch,
        anything,
    ),
    "replica_not_summed": FaultKind(
        "one bucket's gradients are not summed over the replicas of a shard",
        heptad_engine(_replicas),
        _replica_not_summed,
        anything,
    ),
    "stale_gather": FaultKind(
        "one bucket keeps the parameters that other ranks had before the first update",
        heptad_engine(_shards),
        _stale_gather,
        anything,
        second=True,
    ),
    "norm_local": FaultKind("the gradient norm is not summed over the shards", _shards, _norm_local),
    "param": FaultKind(
        "one data rank's gradient of one parameter (param:NAME, param:random) is doubled",
        heptad_engine(_one_data_axis),
        lambda fault, trainer: _scale(fault, trainer, everything=False),
        anything,
    ),
}
