"""Faults that `verify --inject` plants, each a small change to one rank's running objects: what a real bug would do.

A fault has a *home*: the axes it lives on, fixed when it is planted in the job as given. It stays planted when axes are
turned off to find the guilty one, and acts wherever the thing it breaks still happens: a rank that scales its gradients
is gone when its axis has one rank, a dropped micro-batch when there is only one. What `verify` names comes from those
runs; it never asks a fault for its home. `a+b` plants two. Read next: `localise.py`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from heptad.axes.apply import microbatches_of
from heptad.axes.data.bucket import Bucket, GradState
from heptad.axes.data.engine import DataEngine
from heptad.config.schema import Job
from heptad.errors import ConfigError, nearest
from heptad.mesh.collectives import Group
from heptad.models.batch import Batch
from heptad.models.build import build
from heptad.models.spec import ParamSpec
from heptad.models.taps import GradSink
from heptad.optim.norm import total_norm
from heptad.schedule.action import Action, Kind
from heptad.train import step as step_module
from heptad.train.step import Trainer

Act = Callable[[Action, str], None]
DATA_AXES = ("dp_shard", "dp_replicate")


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault in a job: `param` is the parameter it aims at (or whose bucket or unit it aims at)."""

    name: str
    home: tuple[str, ...]
    param: str

    def plant(self, trainer: Trainer) -> None:
        """Change this rank's objects, where an axis of the home still has two ranks (or two micro-batches)."""
        layout = trainer.mesh.layout
        if any(axis == "accumulation" or layout.degree(axis) > 1 for axis in self.home):
            KINDS[self.name].plant(self, trainer)

    def last_rank(self, trainer: Trainer) -> bool:
        """Whether this is the last rank along every axis of the home: the one that is wrong."""
        layout = trainer.mesh.layout
        coords = layout.coords(trainer.rank)
        return all(coords[axis] == layout.degree(axis) - 1 for axis in self.home)


@dataclass(frozen=True, slots=True)
class FaultKind:
    """`says` in one line; `home` gives the axes it lives on, or why it cannot exist in a job; `plant` does it."""

    says: str
    home: Callable[[Job], tuple[str, ...] | str]
    plant: Callable[[Fault, Trainer], None]


# Where faults live


def _one_data_axis(job: Job) -> tuple[str, ...] | str:
    found = [axis for axis in DATA_AXES if getattr(job.layout, axis) > 1]
    return tuple(found[:1]) or "there is one data rank (layout.dp_shard = layout.dp_replicate = 1)"


def _heptad_engine(home: Callable[[Job], tuple[str, ...] | str]) -> Callable[[Job], tuple[str, ...] | str]:
    def checked(job: Job) -> tuple[str, ...] | str:
        return home(job) if job.layout.engine == "heptad" else 'layout.engine = "fsdp2" communicates inside torch'

    return checked


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


def _engine(trainer: Trainer) -> DataEngine:
    assert isinstance(trainer.engine, DataEngine)
    return trainer.engine


def _bucket(fault: Fault, trainer: Trainer) -> Bucket:
    return next(bucket for bucket in _engine(trainer).buckets if fault.param in bucket.params)


def _alone(group: Group) -> Group:
    """A group of this rank only: collectives do nothing."""
    return Group(group.axis, (group.ranks[group.index],), 0, None, group.ledger)


def _scale(fault: Fault, trainer: Trainer, everything: bool) -> None:
    engine = _engine(trainer)
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
    if not chosen.place.sharded:
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

    def add(self, param: nn.Parameter, grad: Tensor) -> None:
        """Forgotten."""


def _norm_local(fault: Fault, trainer: Trainer) -> None:
    right = total_norm

    def local(shards: Any, p: float = 2.0) -> Tensor:
        with torch.no_grad():
            return right([replace(shard, group=None) for shard in shards], p)

    setattr(step_module, "total_norm", local)  # noqa: B010


KINDS: dict[str, FaultKind] = {
    "rank_scale": FaultKind(
        "one data rank's gradients are doubled before they are summed",
        _heptad_engine(_one_data_axis),
        lambda fault, trainer: _scale(fault, trainer, everything=True),
    ),
    "missing_reduction": FaultKind(
        "one bucket's gradients are not summed over ranks", _heptad_engine(_reduction), _missing_reduction
    ),
    "wrong_denominator": FaultKind(
        "one data rank divides by its own count of targets", _one_data_axis, _wrong_denominator
    ),
    "dropped_microbatch": FaultKind(
        "the last micro-batch's weight gradients of one unit are not added",
        _heptad_engine(_accumulation),
        _dropped_microbatch,
    ),
    "replica_not_summed": FaultKind(
        "one bucket's gradients are not summed over the replicas of a shard",
        _heptad_engine(_replicas),
        _replica_not_summed,
    ),
    "stale_gather": FaultKind(
        "one bucket keeps the parameters that other ranks had before the first update",
        _heptad_engine(_shards),
        _stale_gather,
    ),
    "norm_local": FaultKind("the gradient norm is not summed over the shards", _shards, _norm_local),
    "param": FaultKind(
        "one data rank's gradient of one parameter (param:NAME, param:random) is doubled",
        _heptad_engine(_one_data_axis),
        lambda fault, trainer: _scale(fault, trainer, everything=False),
    ),
}
_AIMED = "param"
"""The one kind that takes a parameter's name."""


def names() -> list[str]:
    """What `--inject` takes; `param:random` stands for `param:NAME` too."""
    return [f"{_AIMED}:random" if name == _AIMED else name for name in KINDS]


def parse(words: tuple[str, ...], job: Job, steps: int) -> list[Fault]:
    """Faults of `--inject` ("a", "a+b", "param:NAME") in `job` as it will run. Raises ConfigError."""
    return [_one(word.strip(), job, steps) for text in words for word in text.split("+")]


def _one(word: str, job: Job, steps: int) -> Fault:
    kind, _, aim = word.partition(":")
    if kind not in KINDS or bool(aim) != (kind == _AIMED):
        forms = {name.partition(":")[0]: name for name in names()}
        close = forms[kind] if kind in forms else nearest(word, names()) or names()[0]
        raise ConfigError.of("--inject", word, f"a fault is one of {', '.join(names())}", f"did you mean {close!r}?")
    home = KINDS[kind].home(job)
    if isinstance(home, str):
        raise ConfigError.of("--inject", word, f"the fault cannot exist in this job: {home}", "choose another layout")
    if kind == "stale_gather" and steps < 2:
        raise ConfigError.of("--inject", word, "it shows from the second step on", "--steps 2")
    specs = [spec for spec in build(job).specs if spec.trainable]
    return Fault(kind, home, _aim(aim, specs, f"{job.train.seed}/{word}"))


def _aim(name: str, specs: list[ParamSpec], key: str) -> str:
    """The parameter `name`, or one at random by `key`: a parameter whose gradient is not zero by nature."""
    known = [spec.name for spec in specs]
    if name not in ("", "random"):
        if name not in known:
            close = nearest(name, known) or known[0]
            raise ConfigError.of("--inject", f"param:{name}", "no such trainable parameter", f"did you mean {close!r}?")
        return name
    candidates = [item for item in known if not item.endswith(".k.bias")]
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return candidates[int.from_bytes(digest, "little") % len(candidates)]
