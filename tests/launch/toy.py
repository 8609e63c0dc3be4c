"""Programs of a rank for the launcher's tests. `job.log.dir` is a folder for what they leave behind."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from heptad.config.schema import Job
from heptad.errors import ConfigError
from heptad.launch.environ import RankInfo
from heptad.launch.ranks import device_of, process_group


def sums(job: Job, info: RankInfo, *flags: bool) -> dict[str, Any]:
    """Every rank adds its number; rank 0 says where they met."""
    with process_group(info, device_of(info, "cpu"), timeout_s=30):
        total = torch.tensor([float(info.rank)])
        dist.all_reduce(total)
    return {"sum": total.item(), "port": os.environ.get("MASTER_PORT"), "threads": torch.get_num_threads()}


def with_worker(job: Job, info: RankInfo, *flags: bool) -> None:
    """Each rank has a data worker; rank 1 ends in the way that the log's name says, the others wait for it."""
    worker = os.fork()
    if worker == 0:
        time.sleep(60)
        os._exit(0)
    note = Path(job.log.dir) / f"rank-{info.rank}"
    with process_group(info, device_of(info, "cpu"), timeout_s=60):
        info.diary.reached(12)
        if info.rank == 0:
            info.diary.saved("runs/demo/step-00000010")
        dist.barrier()
        note.with_suffix(".tmp").write_text(f"{os.getpid()} {worker}")
        note.with_suffix(".tmp").rename(note)
        if info.rank == 1:
            _end(str(job.log.name))
        dist.all_reduce(torch.ones(3))


def saves_when_stopped(job: Job, info: RankInfo, *flags: bool) -> None:
    """SIGINT sets a flag; the rank then works a little, rank 0 longest."""
    asked: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: asked.append(number))
    info.diary.reached(12)
    _note(job, info)
    while not asked:
        time.sleep(0.01)
    info.diary.reached(13)
    time.sleep(1.0 if info.rank == 0 else 0.0)
    info.diary.saved("step 13")
    raise KeyboardInterrupt


def never_stops(job: Job, info: RankInfo, *flags: bool) -> None:
    """SIGINT is not heard."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _note(job, info)
    time.sleep(60)


def _note(job: Job, info: RankInfo) -> None:
    note = Path(job.log.dir) / f"rank-{info.rank}"
    note.with_suffix(".tmp").write_text(str(os.getpid()))
    note.with_suffix(".tmp").rename(note)


def _end(how: str) -> None:
    if how == "exit":
        sys.exit(1)
    if how == "os_exit":
        os._exit(3)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "raise":
        raise ValueError("rank 1 has had enough")
    if how == "bad-job":
        raise ConfigError.of("data.path", "/nowhere", "the path exists", "give one that does")
    if how == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(60)


def all_raise(job: Job, info: RankInfo, *flags: bool) -> None:
    """The same error everywhere."""
    raise MemoryError("no room for 3 tensors")


def deaf(job: Job, info: RankInfo, *flags: bool) -> None:
    """Rank 0 ignores SIGTERM and sleeps while rank 1 fails."""
    if info.rank == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(60)
    time.sleep(0.3)
    raise ValueError("rank 1 has had enough")


def interrupted(job: Job, info: RankInfo, *flags: bool) -> None:
    """Ctrl-C in a job of one rank."""
    info.diary.reached(7)
    os.kill(os.getpid(), signal.SIGINT if job.log.name == "int" else signal.SIGTERM)
    time.sleep(5)


def slow(job: Job, info: RankInfo, *flags: bool) -> dict[str, Any]:
    """Long enough that two jobs overlap."""
    result = sums(job, info)
    time.sleep(0.5)
    return result
