"""Measured time of one step as pictures: what `train --trace`, or any job with a pipeline, leaves in the run folder.

Each rank records its actions and writes them to a file of its own; rank 0 joins them into `timeline.svg` (every rank's
unit actions), `trace.json` (the same for Chrome) and, where there is a pipeline, `pipeline.svg`: the first pipeline's
stage actions as measured and, below, as simulated. Ranks are aligned by their hosts' clocks: exact on one host, as good
as the hosts agree on the time elsewhere. Read next: `report/measured.py`, `report/timeline.py`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import astuple, replace
from pathlib import Path

from heptad.mesh.collectives import Group, barrier
from heptad.report.chrome import chrome_trace
from heptad.report.measured import measured_and_simulated
from heptad.report.timeline import timeline_svg
from heptad.schedule.expand import Stages
from heptad.trace import Event

TIMEOUT_S = 600.0


def write_trace(
    folder: Path, events: Sequence[Event], step: int, world: Group, stages: Stages | None, pipeline: Sequence[int]
) -> None:
    """Write the events of all ranks for `step` into `folder`. Collective over `world`.

    stages: what the ranks `pipeline` run, place by place, that this rank is one of (None: no pipeline).
    """
    folder.mkdir(parents=True, exist_ok=True)
    own = folder / f"rank-{world.index:05d}.json"
    wall_s = time.time() - time.perf_counter()
    own.write_text(json.dumps([wall_s, [astuple(event) for event in events]]), encoding="utf-8")
    barrier(world, TIMEOUT_S)
    if world.index == 0:
        parts = [folder / f"rank-{rank:05d}.json" for rank in range(world.size)]
        every = _joined([json.loads(part.read_text(encoding="utf-8")) for part in parts])
        title = f"Step {step}, measured, {world.size} rank{'s' if world.size > 1 else ''}"
        (folder / "timeline.svg").write_text(timeline_svg(every, title), encoding="utf-8")
        (folder / "trace.json").write_text(chrome_trace(every), encoding="utf-8")
        if stages is not None:
            others = f" (of {world.size})" if world.size > len(pipeline) else ""
            title = f"Step {step}: the pipeline of ranks {', '.join(map(str, pipeline))}{others}"
            picture = measured_and_simulated(every, stages, pipeline, title)
            (folder / "pipeline.svg").write_text(picture, encoding="utf-8")
        for part in parts:
            part.unlink()


def _joined(ranks: Sequence[tuple[float, Sequence[tuple[int, str, str, float, float]]]]) -> list[Event]:
    """All ranks' events, by their hosts' clocks, from the first one on."""
    every = [(wall_s, Event(*fields)) for wall_s, events in ranks for fields in events]
    first = min(wall_s + event.start_s for wall_s, event in every)
    return [
        replace(event, start_s=event.start_s + wall_s - first, end_s=event.end_s + wall_s - first)
        for wall_s, event in every
    ]
