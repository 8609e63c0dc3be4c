"""What a job with `schedule = "pipedream"` cannot have: a stage is updated after each micro-batch, without a flush.

Clipping needs the norm over all stages of one gradient; when the first stage has its part, the last one has been
updated already. Stages 2 and 3 cut what a backward needs whole: each version that is kept would have to be gathered
for it again. A tied table lies on the first and the last stage, which see a micro-batch's gradient at different times.
Its number of stages is its generator's rule. Read next: `check.py`, `axes/pipeline/generators/pipedream.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

from heptad.config.schema import Job, ModelSection
from heptad.errors import Problem

NAME = "pipedream"


def problems(job: Job, model: ModelSection) -> Iterator[Problem]:
    """`model` is the section with its preset filled in."""
    layout, clip = job.layout, job.optimizer.clip_norm
    if layout.pp == 1 or layout.schedule != NAME:
        return
    other = 'schedule = "1f1b" (the same order, with a flush)'
    if layout.zero > 1:
        rule = (
            f"stage {layout.zero} cuts parameters or gradients between uses, but pipedream keeps whole versions of the "
            "weights for backwards to come: those would have to be gathered again"
        )
        yield Problem("layout.zero", layout.zero, rule, f"zero = 1, or {other}")
    if clip is not None:
        rule = (
            "clipping needs the norm over all stages, which is not known without a flush: pipedream updates each stage "
            "right after its backward"
        )
        yield Problem("optimizer.clip_norm", clip, rule, f'clip_norm = "none", or {other}')
    if model.tied:
        rule = "the first and the last stage both hold a tied table, and pipedream would update them at different times"
        yield Problem("model.tied", model.tied, rule, f"tied = false, or {other}")
