"""The training loop of one rank: start or resume, step, log, evaluate, save, stop cleanly, finish.

Order, and why: the run's name first (all ranks must look into the same folder); then the checkpoint that the run goes
on from, whose loader state says where the data goes on and how many steps remain; then the trainer; then its state.
Everything a rank decides here follows from values that are equal on all ranks (the step's result, the job), so no rank
waits for another that took a different turn. Rank 0 alone writes metrics and pictures. Read next: `step.py`,
`state.py`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from heptad.checkpoint.find import resume
from heptad.checkpoint.read import Reader
from heptad.config.schema import Job
from heptad.launch.failure import Diary
from heptad.loader.loader import Loader
from heptad.loader.prepare import PreparedData, prepare
from heptad.mesh.collectives import Group, barrier
from heptad.mesh.device import Mesh
from heptad.mesh.layout import Layout
from heptad.models.batch import Batch
from heptad.models.build import Model
from heptad.optim.schedule import past_end
from heptad.report.loss import loss_svg
from heptad.report.opening import opening
from heptad.trace import Event, Transfer
from heptad.train.agreement import digest_of, require_same, require_same_program, require_same_replicas
from heptad.train.metrics import Meter, Metrics, elsewhere, known_flops, read_metrics
from heptad.train.outcome import Outcome
from heptad.train.progress import Display
from heptad.train.runfolder import RunFolder, open_folder
from heptad.train.sample import continued
from heptad.train.sent import Sent
from heptad.train.state import Counts, restore, save_state
from heptad.train.step import StepResult, Trainer
from heptad.train.stop import StopRequest
from heptad.train.tracing import write_trace

PREPARE_TIMEOUT_S = 7200.0
WARM_STEPS = 10
"""The step that is traced: allocators and caches are warm."""


def run(
    job: Job,
    rank: int,
    device: torch.device,
    model: Model | None = None,
    data: PreparedData | None = None,
    trace: bool = False,
    ledger: bool = False,
    display: Display | None = None,
    diary: Diary | None = None,
) -> Outcome:
    """Train `job` (resolved) as rank `rank`; collective over all ranks, `torch.distributed` being initialised.

    model, data: instead of the job's own. trace: record one step's actions. ledger: count what one step sends.
    Returns the same losses and counts on every rank. Raises ConfigError, CheckpointError, NonFinite.
    """
    layout = Layout.of(job.layout)
    world = Mesh(layout, rank, [layout.axes], device).group(*layout.axes)
    folder = open_folder(job, world, device)
    shown = display or Display(job.train.steps, shown=rank == 0)
    with folder.held(rank), shown, StopRequest() as stop:
        found = resume(folder.checkpoints, folder.name, job.checkpoint.resume)
        tokens = _prepared(job, world, shown) if data is None else data
        barrier(world, PREPARE_TIMEOUT_S)
        state = None if found.reader is None else found.reader.meta["loader"]
        loader = Loader(job, layout.data_rank(rank), layout.data_ranks, tokens, state)
        hint = "give every node the same files, or one data.cache_dir that all of them see"
        require_same("the tokens", digest_of(loader.digest), world, device, hint)
        notes = (*found.notes, *loader.progress.notes) if found.reader is not None else found.notes[1:]
        if elsewhere(job, device):
            notes = (f"no CUDA device here: a job for {job.cluster.preset!r} runs on the CPU, without MFU", *notes)
        for note in (*notes, *([opening(job)] if rank == 0 else [])):
            shown.say(note)
        loop = _Loop(folder, loader, found.reader, world, device, model, shown, stop)
        if rank == 0:
            folder.write_job()
        loop.diary = diary or Diary()
        if found.reader is not None:
            loop.diary.saved(_how_to_resume(folder, found.reader.step))
        loop.trace, loop.ledger = trace, ledger
        return loop.run()


def _prepared(job: Job, world: Group, display: Display) -> PreparedData:
    """Rank 0 makes the token files, the others wait and map them."""
    tokens = prepare(job, display.say) if world.index == 0 else None
    barrier(world, PREPARE_TIMEOUT_S)
    return prepare(job) if tokens is None else tokens


class _Loop:
    """What the loop holds between steps."""

    trace = False
    ledger = False
    diary = Diary()

    def __init__(
        self,
        folder: RunFolder,
        loader: Loader,
        reader: Reader | None,
        world: Group,
        device: torch.device,
        model: Model | None,
        display: Display,
        stop: StopRequest,
    ) -> None:
        self.folder, self.loader, self.world, self.display, self.stop = folder, loader, world, display, stop
        self.last_step = loader.progress.total_steps
        display.total_steps = self.last_step
        self.job = folder.job.model_copy(
            update={"train": folder.job.train.model_copy(update={"steps": self.last_step})}
        )
        self.trainer = Trainer(self.job, world.index, device, model)
        self.counts = Counts() if reader is None else restore(self.trainer, reader)
        require_same_program(self.trainer)
        require_same_replicas(self.trainer)
        self.start = self.saved_step = self.counts.step
        events = folder.path / "tb" if self.job.log.tensorboard else None
        self.metrics = Metrics(folder.metrics, self.start, world.index == 0, events)
        self.meter = Meter(self.counts.tokens, self.counts.targets, *known_flops(self.job, world.size, device))
        self.validation = loader.validation()
        self.first_val_loss: float | None = None
        self.val_loss: float | None = None
        self.transfers: tuple[Transfer, ...] = ()
        self.predicted: tuple[Transfer, ...] | None = None

    def run(self) -> Outcome:
        """All steps that remain."""
        self._first_validation()
        result: StepResult | None = None
        for step in range(self.start + 1, self.last_step + 1):
            result = self._step(step)
            if self._due(self.job.train.val_every, step) and step < self.last_step and not result.stop:
                self._validate(step)
            if self._due(self.job.checkpoint.every, step):
                self._save()
            if result.stop:
                break
        return self._finish(result)

    def _step(self, step: int) -> StepResult:
        sent = Sent(self.trainer) if self.ledger and step == min(self.start + 2, self.last_step) else None
        traced = self.traces and step == min(self.start + WARM_STEPS, self.last_step)
        events: list[Event] | None = [] if traced else None
        if sent is not None:
            sent.begin()
        self.diary.reached(step)
        begin_s = time.perf_counter()
        result = self.trainer.step(step, self.loader.step(step - 1), self.stop.asked, events, sent is not None)
        self.meter.add(result.num_tokens, result.num_targets, time.perf_counter() - begin_s)
        if sent is not None:
            self.transfers, self.predicted = sent.end()
        if events is not None:
            stages, pipeline = self.trainer.parallel.stages, self.trainer.pipeline.ranks
            write_trace(self.folder.path / "trace", events, step, self.world, stages, pipeline)
        self.counts = Counts(step, self.meter.tokens, self.meter.targets)
        warning = past_end(self.job.optimizer, step, self.job.train.steps)
        if warning is not None:
            self.display.say(f"warning: {warning}")
        if result.skipped:
            self.display.say(_why_skipped(result))
        if self._due(self.job.log.every, step) or step == self.last_step or result.stop or result.skipped:
            self._log(result)
        return result

    @property
    def traces(self) -> bool:
        """A pipeline's times are always shown: one step that records its actions costs nothing worth leaving out."""
        return self.trace or self.trainer.parallel.stages is not None

    def _pictures(self) -> tuple[str, ...]:
        names = ("loss.svg", "trace/pipeline.svg", "trace/timeline.svg")
        return tuple(str(path) for name in names if (path := self.folder.path / name).exists())

    def _log(self, result: StepResult) -> None:
        figures = {
            "step": result.step,
            "loss": result.loss,
            "balance_loss": result.balance_loss,
            "z_loss": result.z_loss,
            "expert_load_max": result.expert_load_max,
            "dropped_share": result.dropped_share,
            "grad_norm_pre_clip": result.grad_norm,
            "clip_factor": result.clip_factor,
            "lr": result.lr,
            "skipped": result.skipped,
            **self.meter.reading(),
        }
        self.metrics.log(figures)
        self.display.step(result.step, figures, self.meter.seconds_left(self.last_step - result.step))

    def _first_validation(self) -> None:
        """Before the first step; a resumed run reads it from its metrics."""
        if self.start == 0:
            self._validate(0)
            self.first_val_loss = self.val_loss
            return
        lines = [line for line in read_metrics(self.folder.metrics) if line["val_loss"] is not None]
        if lines:
            self.first_val_loss = lines[0]["val_loss"]

    def _validate(self, step: int) -> None:
        if not self.validation:
            return
        self.val_loss = self.trainer.evaluate(self.validation)
        self.metrics.log({"step": step, "val_loss": self.val_loss})
        self.display.say(f"step {step}: validation loss {self.val_loss:.4f}")
        self._picture()

    def _picture(self) -> None:
        if self.world.index == 0:
            path = self.folder.path / "loss.svg"
            path.write_text(_loss_picture(self.folder.metrics, self.folder.name), encoding="utf-8")

    def _save(self) -> None:
        for note in save_state(self.trainer, self.loader, self.folder, self.counts, self.world):
            self.display.say(note)
        self.saved_step = self.counts.step
        self.diary.saved(_how_to_resume(self.folder, self.saved_step))

    def _finish(self, result: StepResult | None) -> Outcome:
        """Last validation, checkpoint, sample and picture; after a stop only what resuming needs."""
        stopped = result is not None and result.stop and self.counts.step < self.last_step
        if self.job.checkpoint.every and self.saved_step < self.counts.step:
            self._save()
        sample = ""
        if not stopped:
            self._validate(self.counts.step)
            sample = self._sample()
        self._picture()
        self.metrics.close()
        return Outcome(
            run_dir=str(self.folder.path),
            first_val_loss=self.first_val_loss,
            val_loss=self.val_loss,
            train_loss=None if result is None or not math.isfinite(result.loss) else result.loss,
            steps=self.counts.step,
            tokens=self.counts.tokens,
            targets=self.counts.targets,
            tokens_per_s=self.meter.overall(),
            sample=sample,
            stopped=stopped,
            resume_with=_how_to_resume(self.folder, self.saved_step) if stopped else None,
            transfers=self.transfers,
            predicted=self.predicted,
            pictures=self._pictures() if self.world.index == 0 else (),
        )

    def _sample(self) -> str:
        """Text that goes on from the beginning of a validation sample (of a training one without validation)."""
        if self.job.train.sample_tokens == 0:
            return ""
        if not self.trainer.gives_logits:
            self.display.say("no sample: the model's last unit has no logits(x)")
            return ""
        batches: Sequence[Batch] = self.validation or self.loader.step(max(self.counts.step - 1, self.start))
        return continued(self.trainer.logits, batches[0], self.job, self.loader.tokenizer)

    @staticmethod
    def _due(every: int, step: int) -> bool:
        return every > 0 and step % every == 0


def _why_skipped(result: StepResult) -> str:
    if result.num_targets == 0:
        return f"step {result.step}: no update, the global batch has no target"
    where = "" if result.bad_rank is None else f", first on rank {result.bad_rank}"
    return f"step {result.step}: no update, loss {result.loss}, gradient norm {result.grad_norm}{where}"


def _how_to_resume(folder: RunFolder, saved_step: int) -> str:
    if folder.job.checkpoint.every == 0:
        return "nothing to resume from: checkpoint.every is 0, so no checkpoint was written"
    return f"saved step {saved_step}; go on with: heptad train {folder.job_file}"


def _loss_picture(metrics: Path, name: str) -> str:
    lines = read_metrics(metrics)
    curves = [[(line["step"], line[key]) for line in lines if line[key] is not None] for key in ("loss", "val_loss")]
    return loss_svg(curves[0], curves[1], f"Loss of run {name}")
