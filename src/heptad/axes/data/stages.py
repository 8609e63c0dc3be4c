"""The stages as policies of one engine: which axes cut parameters, when buckets are gathered and reduced. Pure."""

from __future__ import annotations

from heptad.config.schema import LayoutSection
from heptad.mesh.layout import Layout
from heptad.schedule.lower import DataRule


def shard_axes(zero: int) -> tuple[str, ...]:
    """Axes over which a bucket is cut (the context ranks are data ranks for parameters). Stage 0 cuts nothing."""
    return () if zero == 0 else ("dp_shard", "cp")


def replica_axes(zero: int) -> tuple[str, ...]:
    """Axes along which ranks hold the same shard; gradients are summed over both kinds of axes."""
    return ("dp_replicate", "dp_shard", "cp") if zero == 0 else ("dp_replicate",)


def holder_axes(zero: int) -> tuple[str, ...]:
    """Axes whose ranks together hold one whole model."""
    return (*shard_axes(zero), "tp")


LOSS_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Axes over which losses and finite checks are summed; tensor ranks and the ranks of a pipeline read the same tokens,
so one of them counts."""


def data_rule(section: LayoutSection) -> DataRule:
    """Stage and prefetch distance as a lowering rule. `fsdp2` communicates in its own hooks: nothing is placed."""
    replicas = Layout.of(section).degree(*replica_axes(section.zero)) > 1
    if section.engine == "fsdp2":
        return DataRule("never", "never")
    if section.zero == 0:
        return DataRule("never", "step", scatter=False, prefetch=section.prefetch)
    return DataRule(
        gather="use" if section.zero == 3 else "step",
        reduce="step" if section.zero == 1 else "microbatch",
        replicas=replicas,
        prefetch=section.prefetch,
    )
