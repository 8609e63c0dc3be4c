"""Faults of the expert axes and of routing over cut sequences, after bugs that were made in the field.

Gradients of experts that are as many times too large as there are expert ranks, parts of an expert that are not added,
rows that reach another expert than their own, a token's second expert on a node that is forgotten; and what routers
count by rank where a sequence, or the global batch, is meant. Read next: `fault.py` (what a fault is), `faults.py` (all
of them), `axes/expert/dispatch.py`, `models/router.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from heptad.axes.expert import dispatch, two_level
from heptad.axes.expert.sequences import CutSequences
from heptad.axes.expert.transfer import Trip
from heptad.config.experts import balances, updates_bias
from heptad.config.schema import Job
from heptad.mesh.collectives import Group
from heptad.models.batch import Batch
from heptad.models.cut import family_of
from heptad.models.router import routers
from heptad.models.spec import ParamSpec
from heptad.train import balance
from heptad.train.step import Trainer
from heptad.verify.fault import Fault, FaultKind, engine_of, heptad_engine
from heptad.verify.tensor_faults import left_out

# Where faults live


def _on(axis: str, rule: Callable[[Job], bool] = lambda job: True, why: str = "") -> Callable[[Job], Any]:
    """On `axis`, where `rule` holds of the job; else `why` not."""

    def home(job: Job) -> tuple[str, ...] | str:
        if job.model.experts is None:
            return "there are no experts (model.experts)"
        if getattr(job.layout, axis) == 1:
            return f"its axis has one rank (layout.{axis} = 1)"
        return (axis,) if rule(job) else why

    return home


def _of_sequences(rule: Callable[[Job], bool], why: str) -> Callable[[Job], tuple[str, ...] | str]:
    """On whichever axes cut the tokens of a sequence."""

    def home(job: Job) -> tuple[str, ...] | str:
        if job.model.experts is None:
            return "there are no experts (model.experts)"
        found = tuple(axis for axis in ("cp", "tp") if getattr(job.layout, axis) > 1)
        if not found:
            return "one rank routes a whole sequence (layout.cp = layout.tp = 1)"
        return found if rule(job) else why

    return home


def _batch_is_cut(job: Job) -> tuple[str, ...] | str:
    if not updates_bias(job.model):
        return "no load moves a bias (model.router, model.bias_update_speed)"
    found = tuple(axis for axis in ("dp_replicate", "dp_shard", "cp", "tp") if getattr(job.layout, axis) > 1)
    return found or "one rank routes the whole batch"


def _stack(job: Job, spec: ParamSpec) -> bool:
    return family_of(spec) == "expert"


def _gate(job: Job, spec: ParamSpec) -> bool:
    return spec.name.endswith(".router.gate.weight")


# What they do


def _times_ranks(fault: Fault, trainer: Trainer) -> None:
    engine = engine_of(trainer)
    right, times = engine.finish_grads, trainer.job.layout.ep

    def finish() -> None:
        first = not engine._summed
        right()
        for shard in engine.shards if first else ():
            if shard.grad is not None and family_of(shard.spec) == "expert":
                shard.grad.mul_(times)

    setattr(engine, "finish_grads", finish)  # noqa: B010


def _unsorted(fault: Fault, trainer: Trainer) -> None:
    """Rows stay in the order of the ranks that sent them, and are taken for sorted by expert."""
    for name in ("sort", "unsort"):
        setattr(dispatch.Ways, name, lambda ways, rows: rows)


def _part_alone(fault: Fault, trainer: Trainer) -> None:
    """The parts travel, and each rank keeps its own."""
    right = vars(dispatch)["reduce"]

    def reduce(group: Group, counts: Any) -> Trip:
        trip, first = right(group, counts), sum(counts[: group.index])
        there = trip.there

        def alone(rows: Tensor) -> Any:
            own = rows[first : first + counts[group.index]].clone()
            came, work = there(rows)
            work.complete()
            return came.copy_(own), type(work)()

        return Trip(alone, trip.back)

    setattr(dispatch, "reduce", reduce)  # noqa: B010


def _second_forgotten(fault: Fault, trainer: Trainer) -> None:
    """Of the choices that one token has on a node, the first is kept; as many rows travel between nodes."""
    right = vars(two_level)["Routing"]

    def first_alone(weights: Tensor, experts: Tensor, kept: Tensor | None) -> Any:
        if kept is not None and weights.is_floating_point():  # the other one says only which nodes
            kept = kept & (kept.cumsum(1) == 1)
        return right(weights, experts, kept)

    setattr(two_level, "Routing", first_alone)  # noqa: B010


def _every_router(trainer: Trainer, name: str, wrong: Callable[[CutSequences], Callable[..., Tensor]]) -> None:
    for router in routers(trainer.parallel.model.module).values():
        if isinstance(router.rows, CutSequences):
            setattr(router.rows, name, wrong(router.rows))


def _own_load(fault: Fault, trainer: Trainer) -> None:
    def wrong(rows: CutSequences) -> Callable[..., Tensor]:
        right, ranks = rows.summed, rows.group.size

        def summed(counts: Tensor) -> Tensor:
            own = counts * ranks
            right(counts)
            return own

        return summed

    _every_router(trainer, "summed", wrong)


def _own_places(fault: Fault, trainer: Trainer) -> None:
    def wrong(rows: CutSequences) -> Callable[..., Tensor]:
        right = rows.whole

        def whole(values: Tensor, batch: Batch) -> Tensor:
            every = right(values, batch)  # [B, L, K]
            place = torch.arange(every[..., 0].numel()).view(*every.shape[:2], 1)
            mine = rows.part(place, batch)[values[:, :1] >= 0]
            own = torch.full_like(every, -1)
            own.flatten(0, 1)[mine] = every.flatten(0, 1)[mine]
            return own

        return whole

    _every_router(trainer, "whole", wrong)


def _own_bias(fault: Fault, trainer: Trainer) -> None:
    right = vars(balance)["moved"]
    here = trainer.balance

    def moved(bias: Tensor, counts: Tensor, speed: float) -> Tensor:
        own = next(balance.summed(router, bias.device) for router in here.routers.values() if router.bias is bias)
        found: Tensor = right(bias, own[:-1], speed)
        return found

    setattr(balance, "moved", moved)  # noqa: B010


EXPERT: dict[str, FaultKind] = {
    "times_expert_ranks": FaultKind(
        "the gradient of experts is multiplied by the number of expert ranks, as an average over fewer copies is",
        heptad_engine(_on("ep")),
        _times_ranks,
    ),
    "rows_unsorted": FaultKind(
        "rows that came from several ranks are taken for sorted by expert",
        _on("ep"),
        _unsorted,
    ),
    "expert_part_alone": FaultKind(
        "the parts of an expert's output are not added over the ranks that hold its rows",
        _on("etp"),
        _part_alone,
    ),
    "second_on_a_node": FaultKind(
        "a token that crosses to a node once reaches one of its experts there",
        _on(
            "ep",
            lambda job: job.layout.ep_inner > 1 and job.model.experts_per_token > 1,
            "a token does not cross once for several (layout.ep_inner, model.experts_per_token)",
        ),
        _second_forgotten,
    ),
    "router_not_summed": FaultKind(
        "a router's gradient, of this rank's tokens only, is not summed over tensor ranks",
        heptad_engine(_on("tp")),
        left_out,
        _gate,
    ),
    "load_by_rank": FaultKind(
        "the balancing loss takes the load of a rank's tokens for that of their sequences",
        _of_sequences(lambda job: balances(job.model) > 0, "no loss balances (model.aux_loss, model.balance_loss)"),
        _own_load,
    ),
    "capacity_by_rank": FaultKind(
        "an expert's places are counted by rank and not by sequence",
        _of_sequences(lambda job: job.model.capacity_factor is not None, "nothing is dropped (model.capacity_factor)"),
        _own_places,
    ),
    "bias_by_rank": FaultKind(
        "a router's bias moves by the load that one rank saw",
        _batch_is_cut,
        _own_bias,
    ),
}
