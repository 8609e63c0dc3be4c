"""Which optimizer and which decay a parameter gets: by its role and shape, before anything is cut.

A rank that holds three elements of a matrix treats them as part of a matrix; a 1-D shard is never mistaken for a bias.
Settings that could have no effect are refused by `config/optimizer.py`. No torch. Read next: `build.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from heptad.config.schema import OptimizerName, OptimizerSection
from heptad.models.cut import family_of
from heptad.models.spec import ParamSpec


def kind_of(section: OptimizerSection, spec: ParamSpec) -> OptimizerName:
    """The optimizer that updates this parameter.

    Muon is defined for matrices (2-D, role "matrix") and takes each expert's in a stack of them by itself, as Moonlight
    (arXiv 2502.16982) does; under it, everything else is AdamW's, as its authors train.
    """
    kind = section.roles.get(spec.role, section.name)
    matrices = len(spec.shape) == 2 or family_of(spec) == "expert"
    return "adamw" if kind == "muon" and (spec.role != "matrix" or not matrices) else kind


def decay_of(section: OptimizerSection, spec: ParamSpec) -> float:
    """The weight decay of this parameter: `weight_decay` for `decay_roles`, else 0."""
    return section.weight_decay if spec.role in section.decay_roles else 0.0


def peak_lr(section: OptimizerSection, kind: OptimizerName) -> float:
    """The learning rate that the schedule's factor multiplies: Muon's own for Muon."""
    return section.muon_lr if kind == "muon" else section.lr


def state_slots(section: OptimizerSection, kind: OptimizerName) -> tuple[str, ...]:
    """Names of the states kept for every element; each takes the master's dtype."""
    if kind == "adamw":
        return ("exp_avg", "exp_avg_sq")
    if kind == "muon":
        return ("muon_momentum",)
    return ("momentum",) if section.momentum else ()


def describe(section: OptimizerSection, specs: Sequence[ParamSpec]) -> list[str]:
    """One line for each (optimizer, decay) with the roles in it and their sizes; one given twice counts once."""
    groups: dict[tuple[OptimizerName, float], list[ParamSpec]] = {}
    for spec in dict.fromkeys(specs):
        if spec.trainable:
            groups.setdefault((kind_of(section, spec), decay_of(section, spec)), []).append(spec)
    lines = []
    for (kind, decay), members in sorted(groups.items()):
        roles = ", ".join(dict.fromkeys(spec.role for spec in members))
        numel = sum(spec.numel for spec in members)
        head = f"{kind}, lr {peak_lr(section, kind):g}, decay {decay:g}"
        lines.append(f"{head}: {roles} ({len(members)} tensors, {numel:,} elements)")
    return lines
