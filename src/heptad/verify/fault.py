"""What a planted fault is, and the pieces that faults are made of.

A fault has a *home*: the axes it lives on, fixed when it is planted in the job as given. It stays planted when axes are
turned off to find the guilty one, and acts wherever the thing it breaks still happens: a rank that scales its gradients
is gone when its axis has one rank, a dropped micro-batch when there is only one. What `verify` names comes from those
runs; it never asks a fault for its home. Read next: `faults.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from heptad.axes.data.engine import DataEngine
from heptad.config.schema import Job
from heptad.models.spec import ParamSpec
from heptad.schedule.action import Action
from heptad.train.step import Trainer

Act = Callable[[Action, str], None]
Home = Callable[[Job], tuple[str, ...] | str]
"""The axes a fault lives on in a job, or why it cannot exist there."""
WITHOUT_RANKS = ("accumulation", "recompute")
"""Homes that are no mesh axis: what a fault breaks there is looked for when it acts."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault in a job: `param` is the parameter it aims at (or whose bucket or unit it aims at), "" for none."""

    name: str
    kind: FaultKind
    home: tuple[str, ...]
    param: str

    def __str__(self) -> str:
        return f"{self.name} ({self.param})" if self.param else self.name

    def plant(self, trainer: Trainer) -> None:
        """Change this rank's objects, where an axis of the home still has two ranks."""
        layout = trainer.mesh.layout
        if any(axis in WITHOUT_RANKS or layout.degree(axis) > 1 for axis in self.home):
            self.kind.plant(self, trainer)

    def last_rank(self, trainer: Trainer) -> bool:
        """Whether this is the last rank along every axis of the home: the one that is wrong."""
        layout = trainer.mesh.layout
        coords = layout.coords(trainer.rank)
        return all(coords[axis] == layout.degree(axis) - 1 for axis in self.home)


def anything(job: Job, spec: ParamSpec) -> bool:
    """Every parameter whose gradient is not zero by nature, as a key's bias's is."""
    return not spec.name.endswith(".k.bias")


@dataclass(frozen=True, slots=True)
class FaultKind:
    """`says` in one line; `home`: where it can live; `plant` does it.

    aims: which trainable parameters it can aim at, None for one that aims at none. second: it shows from the second
    step on.
    """

    says: str
    home: Home
    plant: Callable[[Fault, Trainer], None]
    aims: Callable[[Job, ParamSpec], bool] | None = None
    second: bool = False


def heptad_engine(home: Home) -> Home:
    """`home` under the engine whose parts a fault can reach."""

    def checked(job: Job) -> tuple[str, ...] | str:
        return home(job) if job.layout.engine == "heptad" else 'layout.engine = "fsdp2" communicates inside torch'

    return checked


def engine_of(trainer: Trainer) -> DataEngine:
    """The engine, of which faults know the inside."""
    assert isinstance(trainer.engine, DataEngine)
    return trainer.engine
