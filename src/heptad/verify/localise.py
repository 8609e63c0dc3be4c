"""Which module differs first, and which axis is guilty: both measured, never read off a fault's label.

The module: the first thing beyond its bound in the order a step makes things (outputs of units, loss, gradients from
the last parameter to the first, norm, parameters after the update). The axis: the same steps are run again with axes
turned off, one by one, and what heals is guilty; if no single one does, pairs; if no pair does, as few as possible. A
layout with every axis off that still differs has its fault in the model or in the optimizer.

Turned off: dp_replicate and dp_shard -> 1 (the global batch stays, by more accumulation), zero -> 0, accumulation -> 1
(larger micro-batches), prefetch -> 0, recompute -> none, engine -> heptad. Cost: one short run of the layout each.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations

from heptad.config.schema import Job, LayoutSection, RecomputeSection
from heptad.verify.compare import Comparison, Difference

AXES = ("dp_replicate", "dp_shard", "accumulation", "zero", "engine", "recompute", "prefetch")
"""In the order they are blamed when turning off any of several heals: what communicates first, policies last."""

NOBODY = "none of the axes: model or optimizer"
Heals = Callable[[Job], bool]


@dataclass(frozen=True, slots=True)
class Blame:
    """`axis`: the guilty axis, two or more joined by '+', or `NOBODY`; `also`: other single changes that heal."""

    axis: str
    also: tuple[str, ...] = ()


def present(job: Job) -> list[str]:
    """The axes of `job` that can be turned off."""
    layout = job.layout
    on = {
        "dp_replicate": layout.dp_replicate > 1,
        "dp_shard": layout.dp_shard > 1,
        "accumulation": job.train.global_batch > _data_ranks(layout) * job.train.micro_batch,
        "zero": layout.zero > 0 and layout.engine == "heptad",
        "engine": layout.engine != "heptad",
        "recompute": job.recompute.mode != "none",
        "prefetch": layout.zero > 0 and layout.engine == "heptad" and layout.prefetch > 0,
    }
    return [axis for axis in AXES if on[axis]]


def without(job: Job, axes: Sequence[str]) -> Job:
    """`job` with `axes` turned off: the same global batch in the same order, the same model."""
    layout, train, recompute = job.layout, job.train, job.recompute
    for axis in axes:
        if axis in ("dp_replicate", "dp_shard"):
            layout = layout.model_copy(update={axis: 1})
        elif axis in ("zero", "prefetch"):
            layout = layout.model_copy(update={axis: 0})
        elif axis == "engine":
            layout = layout.model_copy(update={"engine": "heptad"})
        elif axis == "recompute":
            recompute = RecomputeSection(mode="none")
        else:
            assert axis == "accumulation", axis
    if "accumulation" in axes:
        train = train.model_copy(update={"micro_batch": train.global_batch // _data_ranks(layout)})
    return job.model_copy(update={"layout": layout, "train": train, "recompute": recompute})


def guilty(job: Job, heals: Heals) -> Blame:
    """The axis whose absence makes `job` right; `heals(variant)` runs a variant and says whether it is right."""
    axes = present(job)
    if not axes or not heals(without(job, axes)):
        return Blame(NOBODY)
    if len(axes) == 1:
        return Blame(axes[0])
    singles = [axis for axis in axes if _try(job, (axis,), heals)]
    if singles:
        return Blame(singles[0], tuple(singles[1:]))
    for pair in combinations(axes, 2):
        if _try(job, pair, heals):
            return Blame("+".join(pair))
    needed = list(axes)  # all of them heal: give back each that is not needed
    for axis in reversed(axes):
        rest = [item for item in needed if item != axis]
        if _try(job, rest, heals):
            needed = rest
    return Blame("+".join(needed))


def _try(job: Job, axes: Sequence[str], heals: Heals) -> bool:
    healed = heals(without(job, axes))
    print(f"without {' and '.join(axes)}: {'right' if healed else 'still wrong'}", file=sys.stderr)
    return healed


def first_module(comparison: Comparison) -> str | None:
    """The first differing module in program order, or what differs where no module does; None if nothing does."""
    if not comparison.differences:
        return None
    step = min(item.step for item in comparison.differences)
    order = ("output", "loss", "gradient", "replicas", "norm", "parameter")
    here = [item for item in comparison.differences if item.step == step]
    first = min(here, key=lambda item: order.index(item.kind))
    return module_of(first)


def module_of(difference: Difference) -> str:
    """The module a difference lies in: a unit, or the module that owns the parameter."""
    if difference.kind in ("gradient", "parameter"):
        return difference.name.rpartition(".")[0] or difference.name
    if difference.kind == "output":
        return difference.name
    return {"loss": "loss", "norm": "gradient norm", "replicas": f"replicas: {difference.name}"}[difference.kind]


def _data_ranks(layout: LayoutSection) -> int:
    return layout.dp_replicate * layout.dp_shard
