"""Events as a Chrome trace: open the file at ui.perfetto.dev or chrome://tracing.

A process is a rank, a thread a lane; complete events ("X") with times in microseconds. Format: "Trace Event Format"
(Google). No torch. Read next: `timeline.py` (the same events as a picture).
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from heptad.trace import Event


def chrome_trace(events: Sequence[Event]) -> str:
    """JSON text of the trace; ranks and lanes are named and sorted, compute above comm."""
    lanes = sorted({event.lane for event in events}, key=lambda lane: (lane != "compute", lane))
    thread = {lane: number for number, lane in enumerate(lanes)}
    records: list[dict[str, object]] = []
    for rank in sorted({event.rank for event in events}):
        records.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
        records.append({"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}})
        for lane in lanes:
            where = {"pid": rank, "tid": thread[lane]}
            records.append({"ph": "M", "name": "thread_name", **where, "args": {"name": lane}})
            records.append({"ph": "M", "name": "thread_sort_index", **where, "args": {"sort_index": thread[lane]}})
    for event in sorted(events, key=lambda event: (event.rank, event.start_s)):
        records.append(
            {
                "ph": "X",
                "name": event.name,
                "cat": event.lane,
                "pid": event.rank,
                "tid": thread[event.lane],
                "ts": round(event.start_s * 1e6, 3),
                "dur": round((event.end_s - event.start_s) * 1e6, 3),
            }
        )
    return json.dumps({"traceEvents": records, "displayTimeUnit": "ms"})
