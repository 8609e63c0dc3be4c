"""Which module differs first, and which axis is guilty: both measured, never read off a fault's label.

The module: the first thing beyond its bound in the order a step makes things (outputs of units, loss, gradients from
the last parameter to the first, norm, parameters after the update). The axis: the same steps are run again with axes
turned off, one by one, and what heals is guilty; if no single one does, pairs; if no pair does, as few as possible. A
layout with every axis off that still differs has its fault in the model or in the optimizer.

Turned off: ep_inner, etp, ep -> 1 (ep_inner with ep), dp_replicate and dp_shard -> 1 (the global batch stays, by more
accumulation), cp -> 1 with all options of the context axis, context -> gather, context_split -> contiguous, tp -> 1 and
with it sequence parallelism (and with that keep_gathered); of ep and etp remains what can be carved from the ranks that
are left; pp -> 1 with all options of the pipeline, schedule -> gpipe on the same stages, zero -> 0, accumulation -> 1
(larger micro-batches; a schedule that needs several becomes gpipe), prefetch -> 0, recompute and offloaded activations
-> none, compile -> false, attention -> the other kind, engine -> heptad. Cost: one short run of the layout each.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import gcd

from heptad.axes.pipeline.generate import generate
from heptad.axes.pipeline.generate import problems as schedule_problems
from heptad.axes.program import microbatches_of
from heptad.config.context import cuts_for_balance
from heptad.config.schema import Job, LayoutSection, RecomputeSection, Section
from heptad.verify.compare import Comparison
from heptad.verify.judge import Difference

EXPERTS = ("ep_inner", "etp", "ep")
DATA = ("dp_replicate", "dp_shard")
CONTEXT = ("context_split", "context", "cp")
TENSOR = ("keep_gathered", "sequence_parallel", "tp")
PIPELINE = ("pp",)
POLICIES = ("schedule", "accumulation", "zero", "engine", "offload", "recompute", "attention", "compile", "prefetch")
AXES = (*EXPERTS, *DATA, *CONTEXT, *TENSOR, *PIPELINE, *POLICIES)
"""In the order they are blamed when turning off any of several heals: what communicates first, policies last; of those
that take others with them, the most special first."""

NOBODY = "none of the axes: model or optimizer"
Heals = Callable[[Job], bool]


@dataclass(frozen=True, slots=True)
class Blame:
    """`axis`: the guilty axis, two or more joined by '+', or `NOBODY`; `also`: other single changes that heal."""

    axis: str
    also: tuple[str, ...] = ()


def present(job: Job) -> list[str]:
    """The axes of `job` that can be turned off."""
    layout, model = job.layout, job.model
    stages = layout.zero > 0 and layout.engine == "heptad"
    on = {
        "ep_inner": layout.ep_inner > 1,
        "etp": layout.etp > 1,
        "ep": layout.ep > 1,
        "dp_replicate": layout.dp_replicate > 1,
        "dp_shard": layout.dp_shard > 1,
        "context_split": cuts_for_balance(layout) and layout.context_split != "contiguous",
        "context": layout.cp > 1 and layout.context != "gather",
        "cp": layout.cp > 1,
        "keep_gathered": layout.keep_gathered,
        "sequence_parallel": layout.sequence_parallel,
        "tp": layout.tp > 1,
        "pp": layout.pp > 1,
        "schedule": layout.pp > 1 and layout.schedule not in PLAIN,
        "accumulation": job.train.global_batch > _data_ranks(layout) * job.train.micro_batch,
        "zero": stages,
        "engine": layout.engine != "heptad",
        "offload": job.offload.activations != "none",
        "recompute": job.recompute.mode != "none",
        "attention": model.attention == "flash" or (model.attention == "math" and not model.attention_dropout),
        "compile": job.train.compile,
        "prefetch": stages and layout.prefetch > 0,
    }
    return [axis for axis in AXES if on[axis]]


def without(job: Job, axes: Sequence[str]) -> Job:
    """`job` with `axes` turned off: the same global batch in the same order, the same model."""
    layout: dict[str, object] = {}
    changes: dict[str, Section] = {}
    for axis in (axis for axis in AXES if axis in axes):
        layout |= _OFF.get(axis, {})
    if "context" in axes and "cp" not in axes and job.layout.context == "ulysses":
        layout["context_split"] = "contiguous"  # the order it has
    if "recompute" in axes:
        changes["recompute"] = RecomputeSection(mode="none")
    if "offload" in axes:
        changes["offload"] = job.offload.model_copy(update={"activations": "none"})
    if "attention" in axes:
        other = {"flash": "math", "math": "flash"}[job.model.attention]
        changes["model"] = job.model.model_copy(update={"attention": other})
    if "pp" not in axes and job.layout.pp > 1 and ("schedule" in axes or _needs_several(job, axes)):
        layout |= _plain(job)
    changes["layout"] = _carved(job.layout.model_copy(update=layout))
    return _whole_steps(job.model_copy(update=changes), axes)


def _carved(layout: LayoutSection) -> LayoutSection:
    """With as much of ep and etp as the ranks that are left can be carved into."""
    block = layout.dp_shard * layout.cp * layout.tp
    etp = gcd(layout.etp, block)
    ep = gcd(layout.ep, block // etp)
    inner = layout.ep_inner if ep % layout.ep_inner == 0 and layout.ep_inner < ep else 1
    return layout.model_copy(update={"ep": ep, "etp": etp, "ep_inner": inner})


_OFF: dict[str, dict[str, object]] = {
    "ep_inner": {"ep_inner": 1},
    "etp": {"etp": 1},
    "ep": {"ep": 1, "ep_inner": 1},
    "dp_replicate": {"dp_replicate": 1},
    "dp_shard": {"dp_shard": 1},
    "context_split": {"context_split": "contiguous"},
    "context": {"context": "gather", "cp_ulysses": 1},
    "cp": {"cp": 1, "context": "ring", "cp_ulysses": 1, "context_split": "zigzag"},
    "keep_gathered": {"keep_gathered": False},
    "sequence_parallel": {"sequence_parallel": False, "keep_gathered": False},
    "tp": {"tp": 1, "sequence_parallel": False, "keep_gathered": False},
    "pp": {"pp": 1, "vpp": None, "schedule": "1f1b", "layers_per_stage": ()},
    "zero": {"zero": 0},
    "engine": {"engine": "heptad"},
    "prefetch": {"prefetch": 0},
}
"""Options of [layout] that turn an axis off."""


PLAIN = ("naive", "gpipe")
"""Schedules of which every stage runs all forwards before, or each right before, its backwards."""


def _needs_several(job: Job, axes: Sequence[str]) -> bool:
    """Whether the job's schedule cannot do the one micro-batch that is left without accumulation."""
    layout = job.layout
    return "accumulation" in axes and any(schedule_problems(layout.schedule, layout.pp, layout.vpp, 1))


def _plain(job: Job) -> dict[str, object]:
    """gpipe on the stages of the job's schedule."""
    layout = job.layout
    stages = generate(layout.schedule, layout.pp, layout.vpp, microbatches_of(job)).num_stages
    chunks, rest = divmod(stages, layout.pp)
    if rest:  # a schedule of one's own
        return {"schedule": "gpipe", "vpp": None, "layers_per_stage": ()}
    return {"schedule": "gpipe", "vpp": chunks if chunks > 1 else None}


def _whole_steps(job: Job, axes: Sequence[str]) -> Job:
    """What of [train] is an axis: all of a rank's sequences in one micro-batch, nothing compiled."""
    train: dict[str, object] = {}
    if "accumulation" in axes:
        train["micro_batch"] = job.train.global_batch // _data_ranks(job.layout)
    if "compile" in axes:
        train["compile"] = False
    return job.model_copy(update={"train": job.train.model_copy(update=train)})


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
    order = ("output", "score", "choice", "load", "loss", "gradient", "replicas", "norm", "parameter")
    here = [item for item in comparison.differences if item.step == step]
    first = min(here, key=lambda item: order.index(item.kind))
    return module_of(first)


def module_of(difference: Difference) -> str:
    """The module a difference lies in: a unit, or the module that owns the parameter."""
    if difference.kind in ("gradient", "parameter"):
        return difference.name.rpartition(".")[0] or difference.name
    if difference.kind in ("output", "score", "choice", "load"):
        return difference.name
    return {"loss": "loss", "norm": "gradient norm", "replicas": f"replicas: {difference.name}"}[difference.kind]


def _data_ranks(layout: LayoutSection) -> int:
    return layout.dp_replicate * layout.dp_shard
