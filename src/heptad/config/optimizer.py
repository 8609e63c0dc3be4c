"""Rules of [optimizer] that need more than one field: the schedule fits the job, and each option has a reader."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from heptad.config.effect import idle
from heptad.config.schema import OptimizerName, OptimizerSection, RoleName
from heptad.errors import Problem

READERS: dict[str, tuple[OptimizerName, ...]] = {
    "lr": ("adamw", "sgd"),
    "betas": ("adamw",),
    "eps": ("adamw",),
    "momentum": ("sgd",),
    "muon_lr": ("muon",),
    "muon_momentum": ("muon",),
}
"""Option -> the optimizers that read it."""


def problems(section: OptimizerSection, total_steps: int) -> Iterator[Problem]:
    """`total_steps` is train.steps."""
    yield from _schedule(section, total_steps)
    for role, kind in section.roles.items():
        if kind == "muon" and role != "matrix":
            rule = f"Muon orthogonalises a matrix, and a parameter of role {role} is updated one by one"
            yield Problem(f"optimizer.roles.{role}", kind, rule, 'use "adamw" or "sgd" for this role')
    used = set(section.roles.values())
    if len(section.roles) < len(get_args(RoleName)):  # some role is left to `name`
        used |= {section.name, "adamw"} if section.name == "muon" else {section.name}
    for name, kinds in READERS.items():
        if not used & set(kinds):
            who = " or ".join(kinds)
            yield from idle("optimizer", section, (name,), f"only {who} reads it", f"let name or roles be {who}")
    if not section.weight_decay:
        yield from idle("optimizer", section, ("decay_roles",), "weight_decay is 0", "set weight_decay")
    elif not section.decay_roles:
        rule = "it would have no effect: decay_roles names no role"
        yield Problem("optimizer.weight_decay", section.weight_decay, rule, "weight_decay = 0, or name roles")


def _schedule(section: OptimizerSection, total_steps: int) -> Iterator[Problem]:
    warmup, decay = section.warmup_steps, section.decay_steps
    if warmup > total_steps:
        rule = f"the warm-up ends within the job (train.steps = {total_steps})"
        yield Problem("optimizer.warmup_steps", warmup, rule, f"warmup_steps <= {total_steps}")
    elif decay is not None and section.schedule != "constant" and warmup + decay > total_steps:
        rule = f"warm-up and decay fit into the job: {warmup} + {decay} <= train.steps = {total_steps}"
        yield Problem("optimizer.decay_steps", decay, rule, f"decay_steps <= {total_steps - warmup}")
    if section.schedule == "constant":
        why = 'schedule = "constant" never decays'
        yield from idle("optimizer", section, ("decay_steps", "min_lr_ratio"), why, "choose another schedule")
    elif section.schedule == "wsd" and decay == 0:
        yield from idle("optimizer", section, ("min_lr_ratio",), "decay_steps = 0 never decays", "raise decay_steps")
