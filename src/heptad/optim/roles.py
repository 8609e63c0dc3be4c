"""Which optimizer and which decay a parameter gets: by its role and shape, before anything is cut.

A rank that holds three elements of a matrix treats them as part of a matrix; a 1-D shard is never mistaken for a bias.
`check` refuses settings that could have no effect. No torch. Read next: `build.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from heptad.config.schema import OptimizerName, OptimizerSection
from heptad.errors import Problem
from heptad.models.spec import ParamSpec


def kind_of(section: OptimizerSection, spec: ParamSpec) -> OptimizerName:
    """The optimizer that updates this parameter.

    Muon is defined for matrices (2-D, role "matrix"); under it, everything else is AdamW's, as its authors train.
    """
    kind = section.roles.get(spec.role, section.name)
    if kind == "muon" and (spec.role != "matrix" or len(spec.shape) != 2):
        return "adamw"
    return kind


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
    """One line for each (optimizer, decay) with the roles in it and their sizes."""
    groups: dict[tuple[OptimizerName, float], list[ParamSpec]] = {}
    for spec in specs:
        if spec.trainable:
            groups.setdefault((kind_of(section, spec), decay_of(section, spec)), []).append(spec)
    lines = []
    for (kind, decay), members in sorted(groups.items()):
        roles = ", ".join(dict.fromkeys(spec.role for spec in members))
        numel = sum(spec.numel for spec in members)
        head = f"{kind}, lr {peak_lr(section, kind):g}, decay {decay:g}"
        lines.append(f"{head}: {roles} ({len(members)} tensors, {numel:,} elements)")
    return lines


def check(section: OptimizerSection, total_steps: int) -> list[Problem]:
    """Every rule of `[optimizer]` that needs more than one field."""
    problems = _schedule_problems(section, total_steps)
    used: set[OptimizerName] = {section.name, *section.roles.values()}
    if section.name == "muon":
        used.add("adamw")
    for role, kind in section.roles.items():
        if kind == "muon" and role != "matrix":
            rule = "Muon orthogonalises a matrix; this role has none"
            problems.append(Problem(f"optimizer.roles.{role}", kind, rule, 'use "adamw" or "sgd" for this role'))
    readers: dict[str, set[OptimizerName]] = {
        "betas": {"adamw"},
        "eps": {"adamw"},
        "lr": {"adamw", "sgd"},
        "momentum": {"sgd"},
        "muon_lr": {"muon"},
        "muon_momentum": {"muon"},
    }
    for field, kinds in readers.items():
        value = getattr(section, field)
        if value != OptimizerSection.model_fields[field].default and not used & kinds:
            names = " or ".join(sorted(kinds))
            rule = f"only {names} reads it and no parameter uses {names}: it would have no effect"
            fix = f"remove it, or set optimizer.name or roles to {names}"
            problems.append(Problem(f"optimizer.{field}", value, rule, fix))
    return problems + _range_problems(section)


def _range_problems(section: OptimizerSection) -> list[Problem]:
    problems = []
    if section.weight_decay and not section.decay_roles:
        rule = "no role decays, so weight_decay would have no effect"
        fix = "set optimizer.weight_decay = 0, or name roles"
        problems.append(Problem("optimizer.decay_roles", section.decay_roles, rule, fix))
    return problems


def _schedule_problems(section: OptimizerSection, total_steps: int) -> list[Problem]:
    problems = []
    if section.warmup_steps > total_steps:
        rule = f"warm-up ends within train.steps = {total_steps}"
        problems.append(Problem("optimizer.warmup_steps", section.warmup_steps, rule, f"at most {total_steps}"))
    room = max(total_steps - section.warmup_steps, 0)
    if section.schedule == "constant":
        for field in ("decay_steps", "min_lr_ratio"):
            value = getattr(section, field)
            if value != OptimizerSection.model_fields[field].default:
                rule = 'the "constant" schedule never decays: it would have no effect'
                problems.append(Problem(f"optimizer.{field}", value, rule, "remove it, or choose another schedule"))
    elif section.decay_steps is not None and section.decay_steps > room and section.warmup_steps <= total_steps:
        rule = f"warm-up and decay fit into train.steps = {total_steps}"
        problems.append(Problem("optimizer.decay_steps", section.decay_steps, rule, f"at most {room}"))
    return problems
