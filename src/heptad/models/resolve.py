"""From the job as written to the job as meant: preset expanded, derived sizes filled, and the figures that follow.

Never imports torch. Read next: `spec.py`, `config/presets.py`.
"""

from __future__ import annotations

from heptad.config.effect import is_set
from heptad.config.presets import expand
from heptad.config.recompute import blocks, runs
from heptad.config.schema import Job, ModelSection, OptimizerSection, RecomputeSection
from heptad.errors import ConfigError, nearest
from heptad.models.spec import complete, param_specs


def resolve(job: Job) -> Job:
    """The job with every field of its model filled; resolving again changes nothing. Raises ConfigError."""
    section = expand(job.model)
    if section.class_ is None:
        section = complete(section)
        _check_frozen(section)
        _check_roles(job.optimizer, section)
        _check_recompute(job.recompute, section)
    return job.model_copy(update={"model": section})


def derived(job: Job) -> dict[str, int]:
    """Figures that follow from a resolved job: data ranks, micro-batches a rank and step, tokens a step, parameters.

    Parameters are those of the decoder; a custom class is counted when it is built.
    """
    data_ranks = job.layout.dp_replicate * job.layout.dp_shard
    figures = {
        "data_ranks": data_ranks,
        "micro_batches": job.train.global_batch // (data_ranks * job.train.micro_batch),
        "tokens_per_step": job.train.global_batch * job.data.seq_len,
    }
    if job.model.class_ is None:
        specs = param_specs(job.model)
        figures["parameters"] = sum(item.numel for item in specs)
        figures["trainable_parameters"] = sum(item.numel for item in specs if item.trainable)
    return figures


def _check_frozen(section: ModelSection) -> None:
    open_section = section.model_copy(update={"frozen": ()})
    names = [item.name for item in param_specs(open_section)]
    for pattern in section.frozen:
        if all(item.trainable for item in param_specs(section.model_copy(update={"frozen": (pattern,)}))):
            close = nearest(pattern, names) or names[0]
            rule = "each pattern must match a parameter's name"
            raise ConfigError.of("model.frozen", pattern, rule, f"a name such as {close!r}; * matches anything")
    if not any(item.trainable for item in param_specs(section)):
        raise ConfigError.of("model.frozen", list(section.frozen), "something is left to train", "freeze less")


def _check_roles(optimizer: OptimizerSection, section: ModelSection) -> None:
    """Each role that is given an optimizer of its own is some parameter's."""
    there = dict.fromkeys(item.role for item in param_specs(section) if item.trainable)
    for role, kind in optimizer.roles.items():
        if role not in there:
            rule = f"it would have no effect: the model has no trainable parameter of role {role}"
            fix = f"remove it; there are {', '.join(there)}"
            raise ConfigError.of(f"optimizer.roles.{role}", kind, rule, fix)
    if is_set(optimizer, "decay_roles") and not there.keys() & set(optimizer.decay_roles):
        rule = "it would have no effect: the model has no trainable parameter of these roles"
        raise ConfigError.of("optimizer.decay_roles", list(optimizer.decay_roles), rule, f"name {' or '.join(there)}")


def first_trained(section: ModelSection) -> int:
    """Index of the first block that has a backward: the one with, or above, the first trainable parameter."""
    units = (item.name.split(".") for item in param_specs(section) if item.trainable)
    first = next(units)
    return int(first[1]) if first[0] == "blocks" else 0 if first[0] == "embed" else section.layers


def _check_recompute(recompute: RecomputeSection, section: ModelSection) -> None:
    """Blocks below everything that is trained have no backward: nothing of them is kept, so nothing runs again."""
    first = first_trained(section)
    chosen = blocks(recompute, section.layers)
    idle = [index for index in chosen if index < first]
    if idle and (recompute.layers or len(idle) == len(chosen)):
        rule = f"it would have no effect on blocks {_listed(idle)}: all up to them is frozen, so they have no backward"
        what = ("layers", list(recompute.layers)) if recompute.layers else ("mode", recompute.mode)
        fix = 'mode = "none"' if len(idle) == len(chosen) else f"leave {_listed(idle)} out"
        raise ConfigError.of(f"recompute.{what[0]}", what[1], rule, f"{fix}, or freeze less")


def _listed(indices: list[int]) -> str:
    return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs(indices))
