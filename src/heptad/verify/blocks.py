"""Fewer blocks with the same structure: which of them are recomputed, in segments, and which are frozen. No torch.

A block of the small job stands where it stood in the whole one: block i of L is block i·n // L of n. What was true of
some blocks only stays so. Where recomputed blocks form several segments of several blocks and others are left out, a
fourth block makes room for that. Read next: `shrink.py`, which calls this, and `stages.py`, with a pipeline.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from fnmatch import fnmatchcase

from heptad.config.recompute import blocks, runs, segment_size
from heptad.config.schema import Job, ModelSection, RecomputeSection
from heptad.models.resolve import first_trained
from heptad.models.spec import param_specs

LAYERS = 3
_NUMBERED = re.compile(r"(?<=^blocks\.)\d+(?=\.)")


def shrink_blocks(job: Job) -> tuple[int, RecomputeSection]:
    """Number of blocks of the small decoder, and [recompute] for it. `job` is resolved."""
    section, before = job.recompute, job.model.layers
    chosen = blocks(section, before)
    left_out = next((index for index in range(before) if index not in chosen), None)
    size = segment_size(section, before)
    several = sum(-(-len(run) // size) for run in runs(chosen)) > 1
    after = min(before, LAYERS + (bool(section.layers) and left_out is not None and size > 1 and several))
    if after == before or not chosen:
        return after, section
    if left_out is None:
        kept = tuple(range(after))
    elif size == 1:
        kept = tuple(sorted(placed(chosen, before, after)))
    else:
        gap = left_out * after // before if several else 0 if left_out == 0 else after - 1
        kept = tuple(index for index in range(after) if index != gap)
    segment = section.segment
    if isinstance(segment, int) and segment > 1:
        segment = 2 if several else len(kept)
    small = section.model_copy(update={"segment": segment, "layers": kept if section.layers else ()})
    return after, trained(small, job.model, after)


def trained(section: RecomputeSection, model: ModelSection, layers: int) -> RecomputeSection:
    """`section` on blocks that have a backward: fewer blocks may put a recomputed one below all that is trained."""
    first = first_trained(model.model_copy(update={"layers": layers, "frozen": shrink_frozen(model, layers)}))
    if not section.layers or section.layers[0] >= first:
        return section
    moved = section.model_copy(update={"layers": tuple(sorted({max(index, first) for index in section.layers}))})
    longest = max(map(len, runs(moved.layers)))
    return moved.model_copy(update={"segment": longest}) if segment_size(moved, layers) > longest else moved


def shrink_frozen(model: ModelSection, layers: int) -> tuple[str, ...]:
    """`model.frozen` for `layers` blocks: patterns of single blocks follow them, and a block that was free stays."""
    patterns = [item for pattern in model.frozen for item in _single_blocks(pattern, model)]
    named = {int(found[0]) for found in map(_NUMBERED.search, patterns) if found}
    kept = placed(named, model.layers, layers)

    def follow(found: re.Match[str]) -> str:
        place = int(found[0]) * layers // model.layers
        return str(min(kept, key=lambda index: abs(index - place)))

    return tuple(dict.fromkeys(_NUMBERED.sub(follow, pattern) for pattern in patterns))


def _single_blocks(pattern: str, model: ModelSection) -> Iterator[str]:
    """`pattern`, or the parameters it means where those are of some blocks without naming one: blocks.[0-3].*"""
    specs = param_specs(model.model_copy(update={"frozen": ()}))
    names = [spec.name for spec in specs if fnmatchcase(spec.name, pattern)]
    meant = {name.split(".")[1] for name in names if name.startswith("blocks.")}
    yield from names if not _NUMBERED.search(pattern) and 0 < len(meant) < model.layers else [pattern]


def placed(indices: Collection[int], before: int, after: int) -> set[int]:
    """Where blocks `indices` of `before` stand among `after`: all of them only if all were meant before."""
    found = {index * after // before for index in indices}
    if len(found) == after < before:
        free = next((index for index in range(before) if index not in indices), None)
        found -= set() if free is None else {free * after // before}
    return found
