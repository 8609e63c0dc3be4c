"""The learning rate as a pure function of the step: warm-up, then cosine, linear, WSD or constant.

Nothing is counted or remembered, so a resumed run cannot drift: the optimizer asks again at every step. Steps count
from 1 and step i of a warm-up of w steps uses i/w of the peak, so the first step already moves the weights. After the
warm-up the factor starts at 1 and ends at `min_lr_ratio` on the last decaying step, and stays there, also past the end
of the job (`past_end` says so). Every legal setting gives a finite factor in (0, 1] or [min_lr_ratio, 1] after the
warm-up. WSD: warm-up, stable, decay (MiniCPM, arXiv 2404.06395), with a linear decay. No torch. Read next: `build.py`.
"""

from __future__ import annotations

import math

from heptad.config.schema import OptimizerSection

WSD_DECAY_SHARE = 0.1
"""Share of the steps that WSD decays over when `decay_steps` is not given."""


def factor_at(section: OptimizerSection, step: int, total_steps: int) -> float:
    """Learning rate at `step` (from 1) as a share of the peak, for a job of `total_steps`."""
    assert step >= 1 and total_steps >= 1, (step, total_steps)
    if step <= section.warmup_steps:
        return step / section.warmup_steps
    if section.schedule == "constant":
        return 1.0
    first, last = decay_span(section, total_steps)
    if step <= first:
        return 1.0
    share = 1.0 if step >= last else (step - first) / (last - first)
    fall = 0.5 * (1.0 - math.cos(math.pi * share)) if section.schedule == "cosine" else share
    return min(1.0, section.min_lr_ratio + (1.0 - section.min_lr_ratio) * (1.0 - fall))


def decay_span(section: OptimizerSection, total_steps: int) -> tuple[int, int]:
    """(last step at the peak, first step at the minimum).

    cosine and linear: `decay_steps` after the warm-up (default: all that remain); wsd: the last `decay_steps` of the
    job (default: a tenth). Equal ends mean that no step lies between: the step after the peak is at the minimum.
    """
    peak = max(section.warmup_steps, 1)
    if section.schedule == "wsd":
        decay = math.ceil(WSD_DECAY_SHARE * total_steps) if section.decay_steps is None else section.decay_steps
        return max(peak, total_steps - decay), max(peak, total_steps)
    if section.decay_steps is None:
        return peak, max(peak, total_steps)
    return peak, peak + section.decay_steps


def lr_at(section: OptimizerSection, step: int, total_steps: int, peak: float | None = None) -> float:
    """Learning rate at `step` (from 1); `peak` is `section.lr` unless given (Muon has its own)."""
    return (section.lr if peak is None else peak) * factor_at(section, step, total_steps)


def past_end(section: OptimizerSection, step: int, total_steps: int) -> str | None:
    """The warning of a run that goes on past its schedule's end, or None before it."""
    if step <= total_steps:
        return None
    lr = lr_at(section, step, total_steps)
    what = "stays at the peak" if section.schedule == "constant" else "stays at its minimum"
    return (
        f"step {step} lies past the end of the learning-rate schedule (train.steps = {total_steps}): the learning rate "
        f"{what}, {lr:g}. Raise train.steps or change optimizer.schedule for another one."
    )
