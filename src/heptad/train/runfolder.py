"""The run folder: what a run leaves behind, and its name, which all ranks share.

    runs/NAME/job.toml          the resolved job, with its name in it: training this file again resumes the run
    runs/NAME/metrics.jsonl     one object a logged step (`metrics.py`)
    runs/NAME/tb/               TensorBoard events
    runs/NAME/checkpoints/      step directories (or [checkpoint] dir)
    runs/NAME/loss.svg          the loss picture;  trace/  with --trace;  lock  while a job trains

Rank 0 chooses the name (the time, unless [log] names the run), makes the folder, and tells the others. A name that is
there already is the same run: resumed, or started again with its old metrics set aside. Read next: `loop.py`.
"""

from __future__ import annotations

import fcntl
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import torch

from heptad.config.load import dump
from heptad.config.schema import Job
from heptad.errors import ConfigError
from heptad.mesh.collectives import Group, broadcast

NAME_BYTES = 256


@dataclass(frozen=True, slots=True)
class RunFolder:
    """`job` is the job with its name filled in; the same on every rank."""

    path: Path
    name: str
    job: Job

    @property
    def checkpoints(self) -> Path:
        """Where step directories are: [checkpoint] dir, or inside the run folder."""
        return Path(self.job.checkpoint.dir) if self.job.checkpoint.dir is not None else self.path / "checkpoints"

    @property
    def metrics(self) -> Path:
        """metrics.jsonl."""
        return self.path / "metrics.jsonl"

    @property
    def job_file(self) -> Path:
        """job.toml."""
        return self.path / "job.toml"

    def write_job(self) -> None:
        """The resolved job; for rank 0, once the job has proved to go on from what the folder holds."""
        self.job_file.write_text(dump(self.job), encoding="utf-8")

    @contextmanager
    def held(self, rank: int) -> Iterator[None]:
        """One job at a time trains a run: rank 0 locks the folder (`lock`) while the block runs."""
        if rank:
            yield
            return
        with (self.path / "lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                rule = f"one job at a time trains a run, and another one does ({self.path})"
                fix = "wait for it or stop it, or give this run another name"
                raise ConfigError.of("log.name", self.name, rule, fix) from None
            yield


def open_folder(job: Job, world: Group, device: torch.device) -> RunFolder:
    """Agree on the name and make the folder on rank 0. Collective over `world`."""
    name = _agreed(_free_name(job) if world.index == 0 else "", world, device)
    named = job.model_copy(update={"log": job.log.model_copy(update={"name": name})})
    folder = RunFolder(Path(job.log.dir) / name, name, named)
    if world.index == 0:
        with _refused("log.dir", job.log.dir):
            folder.path.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder.path).close()
        if job.checkpoint.every:
            with _refused("checkpoint.dir", str(folder.checkpoints)):  # now, not at the first save
                folder.checkpoints.mkdir(parents=True, exist_ok=True)
                tempfile.TemporaryFile(dir=folder.checkpoints).close()
    return folder


@contextmanager
def _refused(field: str, given: str) -> Iterator[None]:
    """What the disk refuses, as a bad job."""
    try:
        yield
    except OSError as error:
        fix = f"set {field} to a folder that can be written"
        raise ConfigError.of(field, given, f"a run writes here, and cannot ({error})", fix) from error


def _free_name(job: Job) -> str:
    if job.log.name is not None:
        return job.log.name
    stem = datetime.now().strftime("%Y%m%d-%H%M%S")
    names = [stem, *(f"{stem}-{number}" for number in range(2, 1000))]
    return next(name for name in names if not (Path(job.log.dir) / name).exists())


def _agreed(name: str, world: Group, device: torch.device) -> str:
    """Rank 0's `name` on every rank."""
    raw = name.encode().ljust(NAME_BYTES, b"\0")
    assert len(raw) == NAME_BYTES, f"a run's name has at most {NAME_BYTES} bytes: {name!r}"
    buffer = torch.frombuffer(bytearray(raw), dtype=torch.uint8).to(device)
    broadcast(buffer, 0, world, "setup").wait()
    return bytes(buffer.cpu().numpy()).rstrip(b"\0").decode()
