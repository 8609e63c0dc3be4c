"""Fewer blocks on the same pipeline stages: which hold more than others, and what recompute joins. No torch.

A stage that held more blocks than the smallest keeps two, the smallest ones one; where all held as many, and several,
all keep two. A stage that is recomputed in part keeps a block of either kind; where a segment joined blocks of a stage,
the first such stage keeps two of them. Micro-batches: enough for a warm-up, a steady part and an end on every rank.
Read next: `shrink.py`, which calls this; `axes/program.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from heptad.axes.pipeline.generate import FILE
from heptad.axes.pipeline.legal import legal_microbatches
from heptad.axes.program import stages_of
from heptad.config.recompute import blocks, runs, segment_size
from heptad.config.schema import Job, RecomputeSection
from heptad.models.spec import unit_specs
from heptad.verify.blocks import trained


def stage_sizes(job: Job) -> tuple[int, ...]:
    """Blocks of each stage of a resolved job with a pipeline."""
    stages = stages_of(job, unit_specs(job.model))
    assert stages is not None
    return tuple(sum(1 <= unit <= job.model.layers for unit in units) for units in stages.units)


def shrink_stages(job: Job) -> tuple[tuple[int, ...], RecomputeSection]:
    """Blocks of each stage of the small decoder, and [recompute] for them. `job` is resolved, with pp > 1."""
    before, section = stage_sizes(job), job.recompute
    least = min(before)
    sizes = [1 + (size > least or (least > 1 and max(before) == least)) for size in before]
    if section.mode == "none":
        return tuple(sizes), section
    chosen = blocks(section, job.model.layers)
    starts = (0, *accumulate(before))
    joined = _joined(chosen, segment_size(section, job.model.layers), starts)
    kept: list[int] = []
    for stage, number in enumerate(before):
        inside = [block in chosen for block in range(starts[stage], starts[stage + 1])]
        some = any(inside) and not all(inside)
        sizes[stage] = 2 + some if stage == joined else max(sizes[stage], 1 + some)
        assert sizes[stage] <= number
        here = _kept(inside, sizes[stage], 2 if stage == joined else 1)
        kept += [sum(sizes[:stage]) + place for place in here]
    layers = sum(sizes)
    longest = max(map(len, runs(kept)))
    segment = min(2, longest) if isinstance(section.segment, int) and section.segment > 1 else section.segment
    small = section.model_copy(update={"segment": segment, "layers": tuple(kept) if section.layers else ()})
    if segment_size(small, layers) > longest:
        small = small.model_copy(update={"segment": longest})
    return tuple(sizes), trained(small, job.model, layers)


def _joined(chosen: Sequence[int], size: int, starts: Sequence[int]) -> int | None:
    """The first stage in which a segment joins blocks; a segment ends with its stage."""
    for run in runs(chosen):
        for first in range(0, len(run), size):
            segment = run[first : first + size]
            for stage in range(len(starts) - 1):
                if sum(starts[stage] <= block < starts[stage + 1] for block in segment) > 1:
                    return stage
    return None


def _kept(inside: Sequence[bool], size: int, wanted: int) -> range:
    """Places of the recomputed blocks of a stage that now has `size`: all, none, or `wanted` of them at one end."""
    if all(inside) or not any(inside):
        return range(size if inside[0] else 0)
    return range(wanted) if inside[0] else range(size - wanted, size)


def shrink_microbatches(job: Job, before: int) -> int:
    """Micro-batches of the small job: at most 2P + 1 (2P where their number is a multiple of P), as the schedule can.

    A file has its own number.
    """
    ranks = job.layout.pp
    if job.layout.schedule.startswith(FILE):
        return before
    most = min(
        before, 2 * ranks + (before % ranks > 0 or job.layout.schedule in ("1f1b", "gpipe", "naive", "pipedream"))
    )
    fewer = legal_microbatches(job, most, -1)
    return before if fewer is None else fewer
