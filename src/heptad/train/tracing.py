"""Measured time of one step as pictures: what `train --trace` leaves in the run folder.

Each rank records its actions and writes them to a file of its own; rank 0 joins them into `timeline.svg` and
`trace.json` (Chrome). Every rank's clock starts with its own step, so ranks are aligned where the step begins.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path

from heptad.mesh.collectives import Group, barrier
from heptad.report.chrome import chrome_trace
from heptad.report.timeline import timeline_svg
from heptad.trace import Event

TIMEOUT_S = 600.0


def write_trace(folder: Path, events: Sequence[Event], step: int, world: Group) -> None:
    """Write the events of all ranks for `step` into `folder`. Collective over `world`."""
    folder.mkdir(parents=True, exist_ok=True)
    own = folder / f"rank-{world.index:05d}.json"
    own.write_text(json.dumps([astuple(event) for event in events]), encoding="utf-8")
    barrier(world, TIMEOUT_S)
    if world.index == 0:
        parts = [folder / f"rank-{rank:05d}.json" for rank in range(world.size)]
        every = [Event(*fields) for part in parts for fields in json.loads(part.read_text(encoding="utf-8"))]
        title = f"Step {step}, measured, {world.size} rank{'s' if world.size > 1 else ''}"
        (folder / "timeline.svg").write_text(timeline_svg(every, title), encoding="utf-8")
        (folder / "trace.json").write_text(chrome_trace(every), encoding="utf-8")
        for part in parts:
            part.unlink()
