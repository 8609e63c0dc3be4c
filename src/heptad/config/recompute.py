"""Rules of [recompute] that need more than one field: which blocks are meant, and whether segments of them exist.

A segment is a run of consecutive blocks that is recomputed from the input of its first one, so a block that is left out
of `layers` ends a segment. Read next: `models/resolve.py`, which refuses blocks that have no backward (frozen).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from heptad.config.effect import idle
from heptad.config.schema import Job, LayoutSection, ModelSection, RecomputeSection
from heptad.errors import Problem


def problems(job: Job, model: ModelSection) -> Iterator[Problem]:
    """`model` is the section with its preset filled in. A class of one's own shows its blocks once built."""
    section = job.recompute
    if section.mode == "none":
        yield from idle("recompute", section, ("segment",), 'mode is "none"', 'mode = "full"')
        yield from idle("recompute", section, ("layers",), 'mode is "none"', 'mode = "selective" or "full"')
        return
    if section.mode == "selective":
        why = "a block recomputed in part keeps its own input; only whole blocks are joined"
        yield from idle("recompute", section, ("segment",), why, 'mode = "full"')
    twice = sorted({index for index in section.layers if section.layers.count(index) > 1})
    if twice:
        rule = f"each block is named once ({', '.join(map(str, twice))} stands there again)"
        yield Problem("recompute.layers", list(section.layers), rule, "keep one of them")
    if model.class_ is not None:
        return
    beyond = sorted({index for index in section.layers if index >= model.layers})
    if beyond:
        rule = f"blocks are numbered 0 to {model.layers - 1} (model.layers = {model.layers})"
        fix = f"leave {', '.join(map(str, beyond))} out, or raise model.layers"
        yield Problem("recompute.layers", list(section.layers), rule, fix)
    elif section.mode == "full":
        yield from _segment(section, model.layers)


def _segment(section: RecomputeSection, layers: int) -> Iterator[Problem]:
    chosen = blocks(section, layers)
    size, longest = segment_size(section, layers), max(map(len, runs(chosen)))
    if size > longest:
        which = f"{len(chosen)} of {layers} blocks are recomputed" if len(chosen) < layers else f"there are {layers}"
        rule = f"a segment is of consecutive recomputed blocks, at most {longest} here ({which}), but this is {size}"
        yield Problem("recompute.segment", section.segment, rule, f"segment <= {longest}")


def forms_scores(model: ModelSection) -> bool:
    """Whether attention's scores exist as a tensor ("math"); flash attention never forms them."""
    return model.attention == "math" or (model.attention == "auto" and model.attention_dropout > 0)


def keeps_scores(model: ModelSection, layout: LayoutSection) -> bool:
    """Whether a block's graph holds them; attention of a cut sequence forms its scores again, a block at a time."""
    return forms_scores(model) and layout.cp == 1


def dropped(job: Job) -> str:
    """What a recomputed block does not keep, in words; "" under mode "none"."""
    section = job.recompute
    if section.mode == "none":
        return ""
    if section.mode == "full":
        size = "" if section.segment == 1 else f" of every {segment_size(section, job.model.layers)}th block"
        return f"everything but the input{size}"
    scores = keeps_scores(job.model, job.layout)
    return "attention's scores and probabilities" if scores else "the MLP's activation"


def segment_size(section: RecomputeSection, layers: int) -> int:
    """Blocks of a segment: "sqrt" is the rounded root of the number of recomputed blocks."""
    if section.segment == "sqrt":
        return round(math.sqrt(len(blocks(section, layers))))
    return section.segment


def blocks(section: RecomputeSection, layers: int) -> tuple[int, ...]:
    """Indices of the recomputed blocks of a decoder of `layers` blocks, ascending; () under mode "none"."""
    if section.mode == "none":
        return ()
    return tuple(sorted(set(section.layers))) or tuple(range(layers))


def runs(indices: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Ascending `indices` cut where one is left out: (0, 1, 3) -> (0, 1), (3,)."""
    found: list[tuple[int, ...]] = []
    for index in indices:
        if found and index == found[-1][-1] + 1:
            found[-1] += (index,)
        else:
            found.append((index,))
    return tuple(found)
