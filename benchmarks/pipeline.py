"""Lines of the table about the pipeline axis: Heptad's step against torch's runtime with the same schedule.

A real small model, the same cut, weights, micro-batches and optimizer on both sides (`torchpp.py`). Read next:
`waits.py` (schedules in time, without a processor).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from benchmarks.lines import Effort, Row, launches, row_of
from benchmarks.measure import ratio
from benchmarks.peers import CPU, Contender, Size, batch_of, job_of
from benchmarks.torchpp import SCHEDULES, PipelinePeer

from heptad.config.schema import Job
from heptad.train.step import Trainer

SIZE = Size(layers=8, width=192, heads=6, mlp_width=512, vocab=2048, seq_len=256, sequences=2, microbatches=8)


def piped(size: Size, ranks: int, schedule: str) -> Job:
    """Heptad's job: stage 0, all ranks along the pipeline, which all see the same micro-batches."""
    job = job_of(size, ranks, 0, dp_shard=1, pp=ranks)
    layout = job.layout.model_copy(update={"schedule": schedule, "vpp": SCHEDULES[schedule][1]})
    train = job.train.model_copy(update={"global_batch": size.sequences * size.microbatches})
    return job.model_copy(update={"layout": layout, "train": train})


class Piped:
    """Heptad's whole step on one rank of a pipeline."""

    def __init__(self, size: Size, rank: int, schedule: str, name: str = "heptad") -> None:
        self.name = name
        self.trainer = Trainer(piped(size, torch.distributed.get_world_size(), schedule), rank, CPU)
        self._batches = {number: [batch_of(size, at, number) for at in range(size.microbatches)] for number in range(4)}

    def step(self, number: int) -> float:
        batches = [replace(batch, step=number) for batch in self._batches[number % 4]]
        return self.trainer.step(number, batches).loss

    @property
    def units(self) -> tuple[range, ...]:
        """Of each stage."""
        stages = self.trainer.parallel.stages
        assert stages is not None
        return stages.units


class Against:
    """Builds both sides for one schedule; forked ranks take it as it is."""

    def __init__(self, schedule: str) -> None:
        self.schedule = schedule

    def __call__(self, rank: int, size: Size) -> list[Contender]:
        ours = Piped(size, rank, self.schedule)
        return [ours, PipelinePeer("torch", size, rank, self.schedule, ours.units)]


def against_torch(effort: Effort) -> list[Row]:
    """The whole step ÷ torch's with the same schedule, 2 and 4 loopback ranks."""
    rows, few = [], Effort(min(2, effort.launches), min(3, effort.rounds), 1)
    for ranks in (2, 4):
        for schedule in SCHEDULES:
            found = ratio(launches(ranks, SIZE, Against(schedule), few), "heptad", ["torch"])
            note = f"{SIZE.microbatches} micro-batches of {SIZE.sequences * SIZE.seq_len} tokens"
            what = f"pipeline step ÷ torch.distributed.pipelining, {schedule}, {ranks} loopback ranks"
            rows.append(row_of(what, found, 1.00, note=note))
    return rows
