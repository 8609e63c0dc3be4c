"""Rules of the pipeline's sizes: each stage holds a block, `layers_per_stage` names them all, the engine can be cut.

Stages number P·V; V is the schedule's own where the job names none. Which P, V and M a schedule can do is known to its
generator, which `axes/pipeline/legal.py` asks, also before any process starts.
"""

from __future__ import annotations

from collections.abc import Iterator

from heptad.config.schema import Job, LayoutSection, ModelSection
from heptad.errors import Problem

STAGES_A_RANK = {"interleaved": 2, "zbv": 2, "dualpipev": 2}
"""V of a schedule where the job names none; 1 for the others (`axes/pipeline/generate.py` has the same numbers)."""

FILE = "file:"


def problems(job: Job, model: ModelSection) -> Iterator[Problem]:
    """`model` is the section with its preset filled in."""
    layout = job.layout
    if layout.pp == 1:
        return
    stages = num_stages(layout)
    if stages is not None:
        yield from stage_problems(layout, model, stages)
    if layout.engine == "fsdp2":
        rule = f"fsdp2 is the reference of the data axis alone, but pp = {layout.pp}"
        yield Problem("layout.engine", layout.engine, rule, 'engine = "heptad", or pp = 1')


def num_stages(layout: LayoutSection) -> int | None:
    """P·V; None where only a schedule's file knows it."""
    if layout.vpp is not None:
        return layout.pp * layout.vpp
    return None if layout.schedule.startswith(FILE) else layout.pp * STAGES_A_RANK.get(layout.schedule, 1)


def stage_problems(layout: LayoutSection, model: ModelSection, stages: int) -> Iterator[Problem]:
    """What keeps the model's blocks from making `stages` stages."""
    layers, sizes = model.layers, layout.layers_per_stage
    product = f"pp × vpp = {layout.pp} × {stages // layout.pp}"
    if layout.vpp is None and stages > layout.pp:
        product += f" ({layout.schedule} has {stages // layout.pp} stages a rank)"
    if layers < stages:
        rule = f"every stage holds a layer: {product} <= layers = {layers}"
        yield Problem("layout.pp", layout.pp, rule, f"pp × vpp <= {layers}, or layers >= {stages}")
    elif sizes and (len(sizes) != stages or sum(sizes) != layers):
        fix = f"e.g. layers_per_stage = {even_split(layers, stages)}, or leave it out: then stages are balanced by cost"
        if len(sizes) != stages:
            rule = f"a number of blocks for each of the {stages} stages ({product}), but there are {len(sizes)}"
        else:
            rule = f"the stages hold every block: {' + '.join(map(str, sizes))} = {sum(sizes)}, but layers = {layers}"
        yield Problem("layout.layers_per_stage", list(sizes), rule, fix)


def even_split(layers: int, stages: int) -> list[int]:
    """Blocks of each stage, as equal as can be, the first ones more: 30 on 4 are 8, 8, 7, 7."""
    return [layers // stages + (stage < layers % stages) for stage in range(stages)]
