"""What a rank does for `verify`: the job's own `Trainer`, watched. Nothing is changed but what a planted fault changes.

Kept of each step: the loss and norm it reports, its pieces of every gradient (before clipping) and of every parameter
after the update, a fingerprint of each unit's output (of its own rows, where tensor or context ranks cut the stream),
the ledger, and the bytes of live storages.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from heptad.axes.context.take import PADDING
from heptad.axes.expert.flow import Calls
from heptad.config.schema import Job
from heptad.launch.forked import forked
from heptad.loader.loader import Loader
from heptad.loader.prepare import PreparedData
from heptad.mesh.layout import Layout
from heptad.mesh.meter import MemoryMeter
from heptad.mesh.piece import Piece
from heptad.mesh.regions import Stream
from heptad.models.batch import Batch
from heptad.models.taps import GradSink, Tape
from heptad.precision.policy import Policy
from heptad.trace import Transfer
from heptad.train.loss import LossSum
from heptad.train.sent import calls, spread
from heptad.train.step import StepResult, Trainer
from heptad.verify.decisions import Decisions, taken, witnesses
from heptad.verify.fault import Fault
from heptad.verify.reference import fingerprint


@dataclass(frozen=True, slots=True)
class RankStep:
    """One step on one rank. outputs[micro-batch][unit]: Σ x² of the rows of the unit's output that lie here, of the
    last one the loss itself; of the units that ran here, all of them without a pipeline. grads: at the step's end;
    updates: of each update inside it. calls: where the tokens here went, with an expert axis. loads: router -> counts
    of the whole batch, as `train/balance.py` has them. decided: in bf16, by routers that ran here, of the tokens here.
    """

    result: StepResult
    grads: list[Piece]
    updates: list[list[Piece]]
    params: list[Piece]
    outputs: list[dict[int, float]]
    transfers: list[Transfer]
    calls: Calls
    loads: dict[str, list[int]]
    decided: dict[str, Decisions]


@dataclass(frozen=True, slots=True)
class RankReport:
    """All steps of one rank. Bytes of live storages: between the last two steps, and at most during the last one."""

    coords: dict[str, int]
    data_rank: int
    steps: list[RankStep]
    resident_bytes: int
    peak_bytes: int


class Watched(Trainer):
    """A trainer that keeps its unclipped gradients and its units' outputs."""

    def __init__(self, job: Job, rank: int) -> None:
        super().__init__(job, rank, torch.device("cpu"))
        self.grads: list[Piece] = []
        self.updates: list[list[Piece]] = []
        self.outputs: dict[int, dict[int, float]] = {}
        self.stream = Stream(self.mesh.group("tp"), job.layout.sequence_parallel)
        self.routers = spread(job, self.parallel.model)
        self.witnesses = witnesses(self.parallel.model.module, Policy.of(job.precision, "cpu"))
        self._forward = self.parallel.executor.forward
        setattr(self.parallel.executor, "forward", self._seen)  # noqa: B010
        if self.stale is not None:
            self._apply = self.stale.apply
            setattr(self.stale, "apply", self._applied)  # noqa: B010

    def _applied(self) -> None:
        self.updates.append(self._gradients())
        self._apply()

    def _gradients(self) -> list[Piece]:
        return [s.piece(s.grad.clone()) for s in self.engine.shards if s.grad is not None]

    def _seen(
        self, unit: int, inputs: Tensor | None, batch: Batch, taped: bool, sink: GradSink | None = None
    ) -> tuple[Tensor, Tape]:
        output, tape = self._forward(unit, inputs, batch, taped, sink)
        mark = fingerprint(self._real(output, batch)) if output.dim() else float(output.detach())
        self.outputs.setdefault(self._numbers[id(batch)], {}).setdefault(unit, mark)
        return output, tape

    def own(self, batches: Sequence[Batch]) -> list[Batch]:
        """Each part is known by the number of the whole one's first token: the same batch on another device is still
        that batch."""
        parts = super().own(batches)
        self._numbers = {id(part): _first(batch) for part, batch in zip(parts, batches, strict=True)}
        return parts

    def _real(self, output: Tensor, batch: Batch) -> Tensor:
        """`output` without the rows that fill up a cut stream or a cut sequence, whose values nobody reads."""
        if self.stream.sequence:
            start, stop = self.stream.own(batch.ids.numel())
            rows, index = output[: stop - start], batch.index.flatten()[start:stop]
        else:
            rows, index = output.flatten(0, 1), batch.index.flatten()
        return rows if batch.context is None else rows[index != PADDING]

    def _update(self, step: int, summed: LossSum, num_targets: int) -> StepResult:
        self.engine.finish_grads()
        self.grads = self._gradients()
        return super()._update(step, summed, num_targets)

    def watch(self, step: int, batches: Sequence[Batch]) -> RankStep:
        """Run one step."""
        self.outputs.clear()
        self.updates.clear()
        for router in self.routers.values():
            router.choices = {}
        for witness in self.witnesses.values():
            witness.start()
        self.mesh.ledger.reset()
        result = self.step(step, batches, count_library=True)
        params = [shard.piece(shard.master.clone()) for shard in self.engine.shards] + self.balance.pieces()
        outputs = [self.outputs.get(_first(batch), {}) for batch in batches]
        transfers = self.mesh.ledger.transfers()
        balance, decided = self.balance, taken(self.witnesses)
        loads = dict(zip(balance.routers, balance.counts.tolist(), strict=True)) if balance.routers else {}
        went, updates = calls(self.job, self.routers), list(self.updates)
        return RankStep(result, self.grads, updates, params, outputs, transfers, went, loads, decided)


def _first(batch: Batch) -> int:
    """The global number of a whole batch's first token."""
    return int(batch.index.flatten()[0])


def run_layout(
    job: Job,
    tokens: PreparedData,
    steps: int,
    faults: Sequence[Fault] = (),
    timeout_s: float = 120.0,
    metered: bool = False,
) -> list[RankReport]:
    """`job`'s layout on forked gloo ranks; one report a rank, in rank order. Raises RankFailed.

    metered: bytes of live storages are followed too (else they are 0), which doubles the time of a small step.
    """
    if job.recompute.mode == "selective" or job.train.compile:
        importlib.import_module("torch._dynamo")  # once here, or for two seconds on each rank
    world = Layout.of(job.layout).world
    return forked(world, _rank, job, tokens, steps, tuple(faults), metered, timeout_s=timeout_s)


def _rank(
    rank: int, job: Job, tokens: PreparedData, steps: int, faults: tuple[Fault, ...], metered: bool
) -> RankReport:
    torch.manual_seed(rank)  # whatever is drawn and not keyed differs between ranks, and shows
    layout = Layout.of(job.layout)
    meter = MemoryMeter()
    with meter if metered else nullcontext():
        trainer = Watched(job, rank)
    for fault in faults:
        fault.plant(trainer)
    loader = Loader(job, layout.data_rank(rank), layout.data_ranks, tokens)
    done = [trainer.watch(step, loader.step(step - 1)) for step in range(1, steps)]
    resident = meter.current_bytes()
    with meter if metered else nullcontext():
        meter.reset_peak()
        done.append(trainer.watch(steps, loader.step(steps - 1)))
    return RankReport(layout.coords(rank), layout.data_rank(rank), done, resident, meter.peak_bytes)


def pieces_of(reports: Sequence[RankReport], step: int, what: str) -> list[list[Piece]]:
    """Each rank's pieces ("grads" or "params") after step number `step` (from 1)."""
    found: list[Any] = [getattr(report.steps[step - 1], what) for report in reports]
    return found
