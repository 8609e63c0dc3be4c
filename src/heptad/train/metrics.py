"""Figures of a run: which there are, what they mean, and where they are written.

Only rank 0 writes, and no collective is behind a figure: every value is in the step's result on every rank already, so
ranks cannot wait for each other over a name. The names are `METRICS`; another one is refused on every rank alike.

    tokens                positions of the global batches so far, each once (padding included, whatever splits them)
    targets               those that had a label: the supervised tokens, which the loss is divided by
    grad_norm_pre_clip    norm of the whole gradient before clipping: may exceed the limit
    balance_loss, z_loss  what the routers of all blocks add to the loss, with their coefficients, beside "loss": a mean
                          over the sequences of the global batch (aux_loss or balance_loss of the job; z_loss)
    expert_load_max       tokens that chose the busiest expert over the mean, of the block where that is most, in the
                          whole global batch: 1 is even; dropped choices are counted
    dropped_share         of all choices of experts those dropped for capacity_factor, in all blocks
    clip_factor           what the gradient was multiplied by
    tokens_per_s          tokens of the steps since the last line over the time inside those steps (reading a batch is
                          inside, validation and checkpoints are not)
    mfu                   model FLOPs of those tokens over what all devices could do in that time: `account/flops.py`,
                          causal convention, every document as long as seq_len, recompute not counted; null without a
                          known peak

A line has every name, null where there is no value; a loss that is not finite is null and its step `skipped`.
TensorBoard gets the same names as scalars, through the tensorboard package's own writer (no TensorFlow).
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from heptad.account.flops import flops_per_token
from heptad.cluster.catalog import cluster
from heptad.config.schema import Job
from heptad.precision.dtypes import dtypes_of

METRICS = (
    "step",
    "loss",
    "balance_loss",
    "z_loss",
    "expert_load_max",
    "dropped_share",
    "val_loss",
    "grad_norm_pre_clip",
    "clip_factor",
    "lr",
    "skipped",
    "tokens",
    "targets",
    "step_s",
    "tokens_per_s",
    "mfu",
)


class Metrics:
    """metrics.jsonl and TensorBoard events of one run on rank 0; on other ranks it only checks names.

    Lines after `start_step` belong to a past that is run again and are dropped; a fresh start over an old run sets the
    old file aside. `tensorboard` is the events' folder, None for none.
    """

    def __init__(self, path: Path, start_step: int, writes: bool, tensorboard: Path | None = None) -> None:
        self.path, self.writes = path, writes
        self._tensorboard: EventFileWriter | None = None
        if not writes:
            return
        kept = [record for record in read_metrics(path) if record["step"] <= start_step] if start_step else []
        if start_step == 0 and path.exists():
            path.rename(_aside(path))
        path.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")
        if tensorboard is not None:
            self._tensorboard = EventFileWriter(str(tensorboard))
            restart = SessionLog(status=SessionLog.START)
            self._tensorboard.add_event(Event(step=start_step + 1, wall_time=time.time(), session_log=restart))

    def log(self, values: Mapping[str, float | int | bool | None]) -> None:
        """One line; `values` has "step" and any other names of METRICS. Raises ValueError for a name that is none."""
        unknown = sorted(set(values) - set(METRICS))
        if unknown or "step" not in values:
            raise ValueError(f"a line has 'step' and names of METRICS; not {unknown or sorted(values)}")
        if not self.writes:
            return
        record = {name: _finite(values.get(name)) for name in METRICS}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        if self._tensorboard is not None:
            scalars = [
                Summary.Value(tag=name, simple_value=float(value))
                for name, value in record.items()
                if value is not None and name != "step"
            ]
            event = Event(step=int(values["step"] or 0), wall_time=time.time(), summary=Summary(value=scalars))
            self._tensorboard.add_event(event)

    def close(self) -> None:
        """Flush and close the files."""
        if self._tensorboard is not None:
            self._tensorboard.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file (none when there is none); a last line that was cut short is left out."""
    return list(_records(path)) if path.exists() else []


def _records(path: Path) -> Iterator[dict[str, Any]]:
    lines = path.read_text(encoding="utf-8").split("\n")
    for line in lines[:-1]:
        yield json.loads(line)


def _finite(value: float | int | bool | None) -> float | int | bool | None:
    return value if value is None or math.isfinite(value) else None


def _aside(path: Path) -> Path:
    names = (path.with_name(f"{path.stem}-old-{number}{path.suffix}") for number in range(1, 10_000))
    return next(name for name in names if not name.exists())


class Meter:
    """Tokens and time: cumulative counts, and the rate since the last reading and of the whole run.

    `flops_per_token` and `peak_flops_per_s` (of all devices together) give MFU; None when either is not known.
    """

    def __init__(
        self, tokens: int, targets: int, flops_per_token: float | None = None, peak_flops_per_s: float | None = None
    ) -> None:
        self.tokens, self.targets = tokens, targets
        self._flops_per_token, self._peak_flops_per_s = flops_per_token, peak_flops_per_s
        self._steps: list[tuple[int, float]] = []
        self._since = 0

    def add(self, num_tokens: int, num_targets: int, step_s: float) -> None:
        """One step's counts and its time."""
        self.tokens += num_tokens
        self.targets += num_targets
        self._steps.append((num_tokens, step_s))

    def reading(self) -> dict[str, float | int | None]:
        """tokens, targets, and step_s (mean), tokens_per_s, mfu since the last reading."""
        recent, self._since = self._steps[self._since :], len(self._steps)
        rate = _rate(recent)
        step_s = sum(seconds for _, seconds in recent) / len(recent) if recent else None
        counts = {"tokens": self.tokens, "targets": self.targets}
        return {**counts, "step_s": step_s, "tokens_per_s": rate, "mfu": self._mfu(rate)}

    def overall(self) -> float | None:
        """Tokens per second of all steps but the first, which also warms up (of the first when it is the only one)."""
        return _rate(self._steps[1:] or self._steps)

    def seconds_left(self, steps_left: int) -> float | None:
        """Estimate from the last steps, of the time inside steps."""
        recent = self._steps[1:][-20:] or self._steps
        return steps_left * sum(seconds for _, seconds in recent) / len(recent) if recent else None

    def _mfu(self, rate: float | None) -> float | None:
        if rate is None or self._flops_per_token is None or self._peak_flops_per_s is None:
            return None
        return rate * self._flops_per_token / self._peak_flops_per_s


def known_flops(job: Job, num_devices: int, device: torch.device) -> tuple[float | None, float | None]:
    """Model FLOPs of a token and the peak of all devices, each None when it is not known."""
    peak = cluster(job.cluster).device.peak(dtypes_of(job.precision, device.type).params)
    peak = None if elsewhere(job, device) else peak
    flops = None if job.model.class_ is not None else flops_per_token(job.model, job.data.seq_len, "causal")
    return flops, None if peak is None else peak * num_devices


def elsewhere(job: Job, device: torch.device) -> bool:
    """Whether the job's cluster is a catalogue's, and this is no device of it."""
    return device.type == "cpu" and job.cluster.preset not in (None, "cpu")


def _rate(steps: list[tuple[int, float]]) -> float | None:
    seconds = sum(step_s for _, step_s in steps)
    return sum(num_tokens for num_tokens, _ in steps) / seconds if seconds > 0 else None
