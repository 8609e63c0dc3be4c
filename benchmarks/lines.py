"""The lines of the benchmark table: each a function of `Effort` that measures and returns rows. Nothing here asserts
speed.

Sizes: MAIN is the model and batch of `make train`; SMALL has the same shape of work with more parameters a token,
so that communication weighs; LINK is small enough that a 200 Mbit/s link and two cores finish a step in a second.
Read next: `measure.py` (what a ratio is), `peers.py` (who is compared), `link.py` (lines over a slow link).
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from benchmarks.measure import Ratio, Times, alternate, ratio
from benchmarks.netbox import Netbox
from benchmarks.peers import Contender, Ours, Peer, Size, check, ddp, fsdp2, job_of, plain
from benchmarks.ranks import launch

from heptad.mesh.meter import MemoryMeter, everything_alive

MAIN = Size(layers=4, width=192, heads=6, mlp_width=512, vocab=4096, seq_len=128, sequences=8)
SMALL = Size(layers=6, width=256, heads=4, mlp_width=688, vocab=2048, seq_len=32)


@dataclass(frozen=True, slots=True)
class Effort:
    """How often things are repeated: launches of ranks, blocks in each, steps in a block."""

    launches: int = 3
    rounds: int = 4
    steps: int = 2


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. `limit` on `value` (None: stated only), `upper_limit` on the bound of a ratio."""

    what: str
    value: float
    limit: float | None = None
    upper: float | None = None
    upper_limit: float | None = None
    unit: str = ""
    note: str = ""

    @property
    def holds(self) -> bool | None:
        """Whether the target is met; None where there is none."""
        if self.limit is None:
            return None
        bounded = self.upper_limit is None or (self.upper is not None and self.upper <= self.upper_limit)
        return self.value <= self.limit and bounded


def row_of(what: str, found: Ratio, limit: float | None, upper_limit: float | None = None, note: str = "") -> Row:
    """A ratio as a row, with the medians behind it."""
    seen = f"{1e3 * found.ours_s:.0f} ms against {1e3 * found.theirs_s:.0f} ms, {found.num_pairs} pairs"
    return Row(what, found.value, limit, found.upper, upper_limit, note=f"{seen}{'; ' if note else ''}{note}")


Build = Callable[[int, Size], list[Contender]]


def timed(rank: int, size: Size, build: Build, rounds: int, steps: int) -> Times:
    """On a rank: build the contenders, check that they train alike, time them in turn."""
    contenders = build(rank, size)
    check(contenders)
    return alternate(contenders, rounds, steps)


def launches(ranks: int, size: Size, build: Build, effort: Effort, box: Netbox | None = None) -> list[Times]:
    """Times of every launch (equal on all ranks)."""
    return [launch(ranks, timed, size, build, effort.rounds, effort.steps, box=box)[0] for _ in range(effort.launches)]


def _against_ddp(rank: int, size: Size) -> list[Contender]:
    world = torch.distributed.get_world_size()
    # the bucket size DDP has in one of its two forms; Heptad's default is 1 MB
    job = job_of(size, world, 0, dp_replicate=world, bucket_mb=5.0)
    return [Ours(size, rank, job), ddp(size, rank, 5), ddp(size, rank, 25)]


def _against_fsdp2(rank: int, size: Size) -> list[Contender]:
    return [Ours(size, rank, job_of(size, torch.distributed.get_world_size(), 3)), fsdp2(size, rank)]


def _against_loop(rank: int, size: Size) -> list[Contender]:
    return [Ours(size, rank, job_of(size, 1, 0)), plain(size)]


def stage0(effort: Effort) -> list[Row]:
    """Stage 0 against torch DDP, on loopback ranks."""
    rows = []
    for size in (MAIN.tokens(128, 2), MAIN):
        for ranks in (2, 4):
            found = ratio(launches(ranks, size, _against_ddp, effort), "heptad", ["ddp5", "ddp25"])
            tokens = size.seq_len * size.sequences
            what = f"stage 0 ÷ torch DDP (best of 5 and 25 MB), {ranks} loopback ranks, {tokens} tokens each"
            rows.append(row_of(what, found, 1.00, 1.05))
    return rows


def stage3(effort: Effort) -> list[Row]:
    """Stage 3 against torch FSDP2, on 4 loopback ranks."""
    rows = []
    for label, size, limit in (("few tokens", SMALL, 0.85), ("many tokens", MAIN, 0.98)):
        found = ratio(launches(4, size, _against_fsdp2, effort), "heptad", ["fsdp2"])
        tokens = f"{label}, {size.seq_len * size.sequences} a rank"
        rows.append(row_of(f"stage 3 ÷ torch FSDP2, 4 loopback ranks, {tokens}", found, limit))
    return rows


def whole_step(effort: Effort) -> list[Row]:
    """The whole train step against a loop written by hand, 1 rank."""
    more = Effort(effort.launches, 2 * effort.rounds, effort.steps)
    found = ratio(launches(1, MAIN, _against_loop, more), "heptad", ["loop"])
    return [row_of("whole train step ÷ hand-written loop, 1 rank", found, 1.03)]


def _against_eager(rank: int, size: Size) -> list[Contender]:
    eager = job_of(size, 1, 0)
    compiled = eager.model_copy(update={"train": eager.train.model_copy(update={"compile": True})})
    return [Ours(size, rank, compiled, "compiled"), Ours(size, rank, eager, "eager")]


def compilation(effort: Effort) -> list[Row]:
    """The whole train step with `train.compile` against without, 1 rank."""
    found = ratio(launches(1, MAIN, _against_eager, effort), "compiled", ["eager"])
    note = "RMSNorm, the gated activation and the loss's exponentials are what it makes faster"
    return [row_of("step with train.compile ÷ step without, 1 rank", found, None, note=note)]


class _Gradients:
    """Forward and backward alone: the executor's program without update, or one `loss.backward()`."""

    def __init__(self, inner: Ours | Peer) -> None:
        self.name, self.inner = inner.name, inner

    def step(self, number: int) -> float:
        inner, batch = self.inner, self.inner._batches[number % 4]
        scale = 1.0 / batch.labels.numel()
        if isinstance(inner, Peer):
            loss = inner.module(batch) * scale
            loss.backward()
            inner.optimizer.zero_grad(set_to_none=True)
            return float(loss.detach())
        trainer = inner.trainer
        trainer.engine.begin_step()
        losses = trainer.parallel.executor.run(trainer.program, [batch], lambda _: scale, lambda _: None)
        return float(losses[0]) * scale


def _gradients(rank: int, size: Size) -> list[Contender]:
    return [_Gradients(Ours(size, rank, job_of(size, 1, 0))), _Gradients(plain(size))]


def executor(effort: Effort) -> list[Row]:
    """Forward and backward through the executor against one `loss.backward()`, 1 rank: tiny blocks and real ones."""
    more = Effort(effort.launches, 2 * effort.rounds, effort.steps)
    rows = []
    for label, size in (("32 tokens", SMALL), ("1024 tokens", MAIN)):
        found = ratio(launches(1, size, _gradients, more), "heptad", ["loop"])
        what = f"executor: forward and backward ÷ one loss.backward(), 1 rank, {label}"
        rows.append(row_of(what, found, None, note="what detached units and taps cost"))
    return rows


def _peak(rank: int, size: Size, which: str) -> int:
    world = torch.distributed.get_world_size()
    side: Contender = Ours(size, rank, job_of(size, world, 3)) if which == "heptad" else fsdp2(size, rank)
    side.step(1)
    with MemoryMeter(everything_alive()) as meter:
        side.step(2)
    return meter.peak_bytes


def memory(effort: Effort) -> list[Row]:
    """Peak bytes of live storages in a step, the largest rank's."""
    rows = []
    for label, size in (("few tokens", SMALL), ("many tokens", MAIN)):
        ours, theirs = (max(launch(4, _peak, size, which)) for which in ("heptad", "fsdp2"))
        note = f"{ours / 1e6:.1f} MB against {theirs / 1e6:.1f} MB; gloo's own staging copies are not seen"
        rows.append(Row(f"peak resident bytes, stage 3 ÷ FSDP2, 4 ranks, {label}", ours / theirs, 1.00, note=note))
    return rows


PLANNING = (
    "errors units trace config.schema config.load config.check mesh.layout models.spec models.resolve schedule.action "
    "schedule.lower schedule.check axes.data.cost axes.data.buckets account.parameters account.flops"
).split()


def _seconds(argv: Sequence[str]) -> float:
    start = time.perf_counter()
    subprocess.run(argv, check=True, capture_output=True)
    return time.perf_counter() - start


def start_up(effort: Effort) -> list[Row]:
    """How long a user waits for help, and what importing the planning side takes."""
    rows, times = [], max(5, effort.rounds)
    heptad = str(Path(sys.executable).with_name("heptad"))
    for words in (["--help"], ["plan", "--help"]):
        seconds = statistics.median(_seconds([heptad, *words]) for _ in range(times))
        rows.append(Row(f"`heptad {' '.join(words)}`", seconds, 0.5, unit=" s"))
    names = ", ".join(f"heptad.{name}" for name in PLANNING)
    code = f"import time; t = time.perf_counter(); import {names}; print(time.perf_counter() - t)"
    argv = [sys.executable, "-c", code]
    seen = [float(subprocess.run(argv, check=True, capture_output=True, text=True).stdout) for _ in range(times)]
    rows.append(Row("import of the planning side", statistics.median(seen), 0.3, unit=" s"))
    return rows
