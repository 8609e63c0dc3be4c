"""A resolved job on one screen: the ranks, what follows from the sizes, and every option that is not at its default.

The whole job, defaults included, is what `load.dump` writes into the run's folder. Read next: `models/resolve.py`,
which derives the figures.
"""

from __future__ import annotations

from collections.abc import Mapping

from heptad.config.context import in_words
from heptad.config.recompute import dropped
from heptad.config.schema import Job
from heptad.config.sizes import AXES, world
from heptad.config.write import toml_value
from heptad.units import human_count


def summary(job: Job, figures: Mapping[str, int], *more: str) -> str:
    """Lines for people; `figures` as `models.resolve.derived` gives them, of a mixture with "active_parameters" (those
    of the main model that a token meets); `more`: lines before the changed options."""
    layout, train = job.layout, job.train
    degrees = " × ".join(f"{axis} {getattr(layout, axis)}" for axis in AXES if getattr(layout, axis) > 1)
    how = [f"attention by {in_words(layout)}"] if layout.cp > 1 else []
    how += ["sequence parallel"] if layout.sequence_parallel else []
    stream = f" with {' and '.join(how)}" if how else ""
    lines = [
        f"ranks             {world(layout)}" + (f" = {degrees}{stream}" if degrees else ""),
        f"data              {_plural(figures['data_ranks'], 'data rank')}, stage {layout.zero}, engine {layout.engine}",
        f"batch             {train.global_batch} sequences of {job.data.seq_len} tokens a step: "
        f"{figures['tokens_per_step']:,} tokens, {_plural(figures['micro_batches'], 'micro-batch')} "
        f"of {train.micro_batch} a data rank",
    ]
    if "parameters" in figures:
        total, trainable = figures["parameters"], figures["trainable_parameters"]
        frozen = f", {human_count(trainable)} trainable" if trainable != total else ""
        met = f", {human_count(figures['active_parameters'])} active" if "active_parameters" in figures else ""
        lines.append(f"parameters        {total:,} ({human_count(total)}{met}{frozen})")
    if layout.ep * layout.etp > 1:
        lines.append(f"experts           {_experts(job)}")
    if job.recompute.mode != "none":
        lines.append(f"recompute         {job.recompute.mode}: a block drops {dropped(job)}")
    lines += more
    lines += [f"[{name}]".ljust(18) + ", ".join(options) for name, options in _changed(job).items()]
    return "\n".join(lines)


def _experts(job: Job) -> str:
    """What a rank holds of a block's experts: 'edp 2 × ep 2 × etp 2: 4 of 8 a rank, ...'."""
    layout, model = job.layout, job.model
    block = layout.dp_shard * layout.cp * layout.tp
    degrees = [f"edp {block // (layout.ep * layout.etp)}", f"ep {layout.ep}", f"etp {layout.etp}"]
    shown = " × ".join(item for item in degrees if not item.endswith(" 1"))
    nodes = f" in nodes of {layout.ep_inner}" if layout.ep_inner > 1 else ""
    held = f": {-(-model.experts // layout.ep)} of {model.experts} a rank" if model.experts else ""
    width = model.expert_width or model.mlp_width
    rows = f", {-(-width // layout.etp)} of {width} rows of each" if layout.etp > 1 else ""
    return f"{shown}{nodes}{held}{rows}"


def _changed(job: Job) -> dict[str, list[str]]:
    """Section -> its options that differ from their defaults, as the file has them."""
    changed: dict[str, list[str]] = {}
    for name in Job.model_fields:
        section = getattr(job, name)
        for key, field in type(section).model_fields.items():
            value = getattr(section, key)
            if value != field.default:
                changed.setdefault(name, []).append(f"{field.alias or key} = {toml_value(value)}")
    return changed


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}{'es' if noun.endswith('ch') else 's'}"
