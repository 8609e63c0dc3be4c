"""One rank of `heptad train`, whoever started it: device, process group, loop, and what rank 0 prints.

stdout gets the result only: text for a person, or nothing here when the launcher prints JSON. Read next: `loop.py`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from heptad.config.schema import Job
from heptad.launch.environ import RankInfo
from heptad.launch.ranks import device_of, keep_freed_memory, process_group
from heptad.report.ledger import traffic_table
from heptad.train.loop import run

COLLECTIVE_TIMEOUT_S = 600.0


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Refuse kernels whose sums depend on timing (`train.deterministic`); CPU kernels in use have none, CUDA's do.

    Memory that torch leaves uninitialised stays so: nothing reads it, and filling it costs a pass.
    """
    settings: Any = torch.utils.deterministic
    before, fill = torch.are_deterministic_algorithms_enabled(), settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(wanted or before)
    settings.fill_uninitialized_memory = fill and not wanted
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        settings.fill_uninitialized_memory = fill


def run_rank(job: Job, info: RankInfo, as_json: bool, ledger: bool, trace: bool) -> dict[str, Any]:
    """Train `job` (resolved) as this rank; returns the object that `--json` prints, on every rank.

    Raises KeyboardInterrupt after a clean stop, so that the launcher says how far the job came.
    """
    device = device_of(info, "cpu" if job.cluster.preset == "cpu" or not torch.cuda.is_available() else "cuda")
    if device.type == "cpu":
        keep_freed_memory()
    with deterministic(job.train.deterministic), process_group(info, device, COLLECTIVE_TIMEOUT_S):
        outcome = run(job, info.rank, device, trace=trace, ledger=ledger, diary=info.diary)
    if info.rank == 0:
        out = sys.stderr if as_json else sys.stdout
        print(outcome.text(), file=out)
        if ledger:
            print(traffic_table(outcome.predicted, outcome.transfers), file=out)
        out.flush()
    if outcome.stopped:
        raise KeyboardInterrupt
    return dict(json.loads(outcome.json()))
