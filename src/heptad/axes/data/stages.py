"""The stages as policies of one engine: which axes cut parameters, when buckets are gathered and reduced. Pure."""

from __future__ import annotations

from typing import Literal

from heptad.config.schema import LayoutSection
from heptad.mesh.layout import Layout
from heptad.models.cut import FAMILIES, Family
from heptad.schedule.lower import DataRule


def shard_axes(zero: int, family: Family) -> tuple[str, ...]:
    """Axes over which a bucket of `family` is cut. Stage 0 cuts nothing.

    The context ranks are data ranks for dense parameters; for experts so are all that `ep` and `etp` leave.
    """
    return () if zero == 0 else DATA_AXES[family]


def replica_axes(zero: int, family: Family = "dense") -> tuple[str, ...]:
    """Axes along which ranks hold the same shard; gradients are summed over both kinds of axes."""
    return ("dp_replicate", *DATA_AXES[family]) if zero == 0 else ("dp_replicate",)


def holder_axes(zero: int, family: Family = "dense") -> tuple[str, ...]:
    """Axes whose ranks together hold all parameters of `family`."""
    return (*shard_axes(zero, family), *PART_AXES[family])


def matrix_axes(zero: int, family: Family = "dense") -> tuple[str, ...]:
    """Of these the axes whose ranks hold parts of the same matrices: along `ep` each has experts of its own."""
    return tuple(axis for axis in holder_axes(zero, family) if axis != "ep")


def teams(layout: Layout, zero: int, family: Family = "dense") -> tuple[tuple[int, ...], ...]:
    """Of the ranks along `holder_axes`, by their places, those that hold parts of the same matrices: a team for each
    place of `ep`, in its order."""
    ep, etp = (layout.ep, layout.etp) if family == "expert" else (1, 1)
    every = range(layout.degree(*holder_axes(zero, family)))
    return tuple(tuple(at for at in every if at // etp % ep == team) for team in range(ep))


def shard_counts(layout: Layout, zero: int) -> dict[Family, int]:
    """Ranks over which each family is cut."""
    return {family: layout.degree(*shard_axes(zero, family)) for family in FAMILIES}


DATA_AXES: dict[Family, tuple[str, ...]] = {"dense": ("dp_shard", "cp"), "expert": ("edp",)}
"""Axes whose ranks hold what the stages may cut, inside a copy of HSDP."""

PART_AXES: dict[Family, tuple[str, ...]] = {"dense": ("tp",), "expert": ("ep", "etp")}
"""Axes that cut parameters before the data axis does (`models/cut.py`)."""

LOSS_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Axes over which losses and finite checks are summed; tensor ranks and the ranks of a pipeline read the same tokens,
so one of them counts."""

ROUTED_AXES = ("cp", "tp")
"""Axes whose ranks route tokens of the same sequences."""


def reductions(section: LayoutSection) -> Literal["step", "microbatch"]:
    """How often a bucket's gradient is reduced: stages 0 and 1 keep it whole and do it once a step.

    Stages 2 and 3 free it after each micro-batch; under a pipeline, whose micro-batches follow each other fast, "auto"
    waits for the last one instead: (K+1)/2 to 1/K of the traffic, for whole gradients between first and last write.
    """
    if section.zero < 2:
        return "step"
    if section.reduce_grads != "auto":
        return section.reduce_grads
    return "step" if section.pp > 1 else "microbatch"


def data_rule(section: LayoutSection) -> DataRule:
    """Stage and prefetch distance as a lowering rule. `fsdp2` communicates in its own hooks: nothing is placed."""
    replicas = Layout.of(section).degree(*replica_axes(section.zero)) > 1
    if section.engine == "fsdp2":
        return DataRule("never", "never")
    if section.zero == 0:
        return DataRule("never", "step", scatter=False, prefetch=section.prefetch)
    return DataRule(
        gather="use" if section.zero == 3 else "step",
        reduce=reductions(section),
        replicas=replicas,
        prefetch=section.prefetch,
    )
