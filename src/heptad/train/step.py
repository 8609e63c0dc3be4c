"""One training step and one evaluation, on one rank.

A step: count the targets of the whole global batch (one integer all-reduce under the first forward); run the program,
whose last unit's output is scaled by one over that count, so gradients are only ever summed; the loss is summed over
ranks under the backward; then, in U: the gradient norm of the whole model, one decision that all ranks share (finite or
not), clipping, the optimizer. Tensor ranks read the same tokens and have the same loss: the first of them counts, the
others add exact zeros to the same sums; so do the ranks of a pipeline that hold no last stage. Context ranks take their
own tokens of the batches they all read, before anything else, and each counts its own targets; a token counts once
(C-123). Biases of routers move last, by the load of the whole batch (`balance.py`). An asynchronous pipeline updates
inside the step (`stale.py`); U then only reports. Read next: `schedule/executor.py`, `axes/context/take.py`,
`optim/build.py`, `loop.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from heptad.axes.apply import Parallel, apply
from heptad.axes.context.take import take, whole
from heptad.axes.data.stages import LOSS_AXES
from heptad.axes.program import microbatches_of
from heptad.config.schema import Job
from heptad.mesh.collectives import all_reduce, broadcast
from heptad.mesh.host import host_value
from heptad.mesh.ledger import LibraryLedger
from heptad.mesh.piece import Piece
from heptad.models.batch import Batch
from heptad.models.build import Model, sequences_an_update
from heptad.optim.build import build_optimizer
from heptad.optim.norm import clip_, total_norm
from heptad.optim.schedule import lr_at
from heptad.trace import Event
from heptad.train.balance import Balance
from heptad.train.loss import LossSum
from heptad.train.stale import StageUpdates


class NonFinite(RuntimeError):
    """Loss or gradient is inf or nan and the job says to stop; the state is that of before the step (of an asynchronous
    step: with every update that was finite)."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """Figures of one step, equal on all ranks.

    loss: mean over the global batch's targets (0 without targets). grad_norm: before clipping. clip_factor: what
    gradients were scaled by. skipped: no update was made: no target, or not finite (`bad_rank`: the first rank whose
    own loss was not; of tensor ranks, which share a loss, the first). num_tokens counts each position of the global
    batch once, num_targets those with a label. stop: some rank asked. balance_loss, z_loss: what the routers of all
    blocks add, with their coefficients, a mean over the global batch's sequences; None: nothing. expert_load_max: the
    global batch's tokens at the busiest expert over the mean, of the block where that is largest; dropped_share: of all
    choices those beyond the capacity, None without one.
    """

    step: int
    loss: float
    grad_norm: float
    clip_factor: float
    skipped: bool
    bad_rank: int | None
    num_tokens: int
    num_targets: int
    lr: float
    stop: bool
    balance_loss: float | None = None
    z_loss: float | None = None
    expert_load_max: float | None = None
    dropped_share: float | None = None


class Trainer:
    """A job on one rank: model, engine, optimizer, program. Construction is collective over all ranks."""

    def __init__(self, job: Job, rank: int, device: torch.device, model: Model | None = None) -> None:
        self.parallel: Parallel = apply(job, rank, device, model)
        self.parallel.model.module.train()
        self.job, self.rank, self.device = job, rank, device
        self.engine, self.mesh = self.parallel.engine, self.parallel.mesh
        self.loss_group = self.mesh.group(*LOSS_AXES)
        coords = self.mesh.layout.coords(rank)
        self.counts = coords["tp"] == 0
        self.counts_targets = self.counts and coords["pp"] == 0
        self.pipeline = self.mesh.group("pp")
        stages, model = self.parallel.stages, self.parallel.model
        held = frozenset(range(len(model.units)) if stages is None else stages.held(coords["pp"]))
        self.balance = Balance(model, held, self.loss_group, device)
        self.optimizer = build_optimizer(job.optimizer, self.engine.shards, job.train.steps)
        self.program = self.parallel.program(microbatches_of(job))
        self.result: StepResult | None = None
        asynchronous = stages is not None and stages.schedule.asynchronous
        self.stale = StageUpdates(self.parallel, self.optimizer, self.counts_targets) if asynchronous else None

    def step(
        self,
        step: int,
        batches: Sequence[Batch],
        stop: bool = False,
        record: list[Event] | None = None,
        count_library: bool = False,
    ) -> StepResult:
        """Step number `step` (from 1) on this rank's micro-batches; `stop`: this rank asks to stop after it.

        record: gets an Event an action. count_library: the ledger also counts what an engine's library sends (slow).
        Raises NonFinite on every rank when the job says so.
        """
        num_tokens = sum(batch.ids.numel() for batch in batches) * self.mesh.layout.data_ranks
        batches = self.own(batches)
        self._mode(training=True)
        self.balance.begin()
        stale = self.stale
        if stale is not None:
            stale.begin(step, batches)
        num_targets = self.count_targets(batches) if stale is None else stale.num_targets
        self.engine.begin_step()
        adds = bool(self.balance.adding)
        loss = LossSum(self.loss_group, stop, self.device, self.counts, self.balance.added if adds else None)

        def sums(losses: list[Tensor]) -> None:
            loss.start(losses)
            self.balance.start()

        def update(losses: list[Tensor]) -> None:
            sums(losses)
            self.result = self._update(step, loss, num_targets())

        def scale(microbatch: int) -> float:
            return 1.0 / max(num_targets(), 1) if stale is None else stale.scale(microbatch)

        with self._library_ledger() if count_library else nullcontext():
            twice = count_library and self.engine.library_communicates  # its ledger would count the sums once more
            # in a pipeline other units' forwards, with routers, may follow the last one's
            later = bool(self.balance.routers) and self.parallel.stages is not None
            early = None if twice or later else sums
            run = self.parallel.executor.run
            update_stage = None if stale is None else stale.update
            run(self.program, batches, scale, update, record, outputs_ready=early, update_stage=update_stage)
        assert self.result is not None
        busiest, dropped = self.balance.end(updated=not self.result.skipped)
        return replace(self.result, num_tokens=num_tokens, expert_load_max=busiest, dropped_share=dropped)

    def own(self, batches: Sequence[Batch]) -> list[Batch]:
        """This rank's tokens of whole micro-batches, on its device."""
        place, layout = self.mesh.layout.coords(self.rank)["cp"], self.job.layout
        depths = self.job.model.mtp_depth if self.job.model.class_ is None else 0
        return [take(batch, layout, place, depths).to(self.device) for batch in batches]

    def pieces(self) -> list[Piece]:
        """All that an update changes: this rank's weights (under the parameter's name) and optimizer state."""
        weights = [shard.piece(shard.master) for shard in self.engine.shards]
        return weights + self.balance.pieces() + self.optimizer.pieces()

    def _library_ledger(self) -> AbstractContextManager[object]:
        """For an engine whose collectives do not pass `mesh/collectives.py`; Heptad's own count themselves."""
        if not self.engine.library_communicates:
            return nullcontext()
        executor = self.parallel.executor

        def phase() -> str | None:
            return None if executor.phase == "update" else executor.phase

        return LibraryLedger(self.mesh.ledger, self.mesh.axis_of, phase)

    def _mode(self, training: bool) -> None:
        """Dropout on or off; the walk over all modules (0.3 ms a hundred) only when it changes."""
        if self.parallel.model.module.training is not training:
            self.parallel.model.module.train(training)

    def count_targets(self, batches: Sequence[Batch]) -> Callable[[], int]:
        """Targets of the whole global batch, the one denominator of the step: starts the sum, the result waits for it.

        The first forward hides it; the first backward asks.
        """
        count = torch.stack([(batch.labels >= 0).sum() for batch in batches]).sum()
        count = count if self.counts_targets else torch.zeros_like(count)
        work = all_reduce(count, self.loss_group, "count")

        def wait() -> int:
            work.wait()
            return int(host_value(count, expected=sum(batch.labels.numel() for batch in batches)))

        return cache(wait)

    def _update(self, step: int, summed: LossSum, num_targets: int) -> StepResult:
        """What U does: nothing changes unless loss and gradient are finite on every rank.

        After an asynchronous step it has changed already, and this only tells.
        """
        section = self.job.optimizer
        norm = self._norm()
        total, stops = summed.wait()
        loss = total / max(num_targets, 1)
        norm_value = host_value(norm, expected=0.0)
        finite = math.isfinite(loss) and math.isfinite(norm_value)
        bad_rank = None if finite else self._first_bad_rank(summed.local)
        if not finite and section.nonfinite == "raise":
            where = "every rank's own loss is finite" if bad_rank is None else f"first on rank {bad_rank}"
            raise NonFinite(f"step {step}: loss {loss}, gradient norm {norm_value} ({where})")
        skipped = not finite or num_targets == 0
        factor = 1.0
        if not skipped and self.stale is None:
            if section.clip_norm is not None and norm_value > section.clip_norm:
                factor = host_value(clip_(self.engine.shards, section.clip_norm, norm), expected=1.0)
            self.optimizer.step(step)
            self.engine.refresh()
        lr = lr_at(section, step, self.job.train.steps, section.lr)
        added = self._of_routers(summed.of_routers())
        return StepResult(step, loss, norm_value, factor, skipped, bad_rank, 0, num_targets, lr, stops, *added)

    def _of_routers(self, sums: tuple[float, ...]) -> list[float | None]:
        """Both losses of the routers; of an asynchronous step the mean over its updates."""
        updates = self.job.train.global_batch / sequences_an_update(self.job)
        on = self.balance.coefficients
        return [total / updates if factor else None for factor, total in zip(on, sums, strict=False)]

    def _norm(self) -> Tensor:
        """Of the whole gradient; of an asynchronous step, see `stale.py`."""
        if self.stale is not None:
            return self.stale.drained()
        self.engine.finish_grads()
        return total_norm(self.engine.shards, pipeline=self.pipeline)

    def _first_bad_rank(self, local: Tensor) -> int | None:
        bad = torch.where(local.isfinite(), math.inf, float(self.rank)).to(torch.float64)
        all_reduce(bad, self.loss_group, "check", "min").wait()
        rank = host_value(bad, expected=math.inf)
        return int(rank) if math.isfinite(rank) else None

    def evaluate(self, batches: Sequence[Batch]) -> float:
        """Mean loss over the targets of all ranks' `batches` (as many on each rank), without dropout."""
        self._mode(training=False)
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        with torch.no_grad():
            batches = self.own(batches)
            losses = self.parallel.executor.run(self.parallel.program(len(batches), train=False), batches)
            if self.counts and losses:
                sums[0] = torch.stack(losses).double().sum()
            if self.counts_targets:
                sums[1] = torch.stack([(batch.labels >= 0).sum() for batch in batches]).sum().double()
        all_reduce(sums, self.loss_group, "evaluate").wait()
        total, count = (host_value(value, expected=1.0) for value in sums)
        return total / max(count, 1.0)

    @property
    def gives_logits(self) -> bool:
        """Whether the last unit has `logits(x)`, which text needs (a custom one may not)."""
        return callable(getattr(self.parallel.model.units[-1], "logits", None))

    def logits(self, batch: Batch) -> Tensor:
        """Logits [B, L, V] of `batch`, without dropout. Collective: every rank takes part."""
        self._mode(training=False)
        program = self.parallel.program(1, train=False)
        (own,) = self.own([batch])
        with torch.no_grad():
            found = self.parallel.executor.run(program, [own], logits=True)
        if self.parallel.stages is None:
            logits = found[0]
        else:
            shape, dtype = (*own.ids.shape, self.job.model.vocab), self.parallel.policy.params
            logits = found[0].contiguous() if found else torch.empty(shape, dtype=dtype, device=self.device)
            broadcast(logits, self.parallel.stages.where[0][-1], self.pipeline, "sample").wait()
        if own.context is None:
            return logits
        return whole(logits, own.context, batch.ids.shape[1], self.mesh.group("cp"), "sample")
