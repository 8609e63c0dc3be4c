"""What is said when a rank fails or a job is stopped: one block on stderr, the first cause first.

Each rank keeps a diary (step reached, checkpoint saved) and, when it raises, leaves a report in the launcher's folder.
A rank that ends without a report (`os._exit`, SIGKILL, a crash) is noticed by the launcher (`watch.py`). The first
cause is the earliest of them that is not a broken connection: a peer notices the dead rank's closed socket at once.
"""

from __future__ import annotations

import json
import os
import signal
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

from heptad.errors import ConfigError

_STEP_WIDTH = 20
_BROKEN_CONNECTION = ("closed by peer", "connection reset", "broken pipe", "connection refused", "socket closed")


class Diary:
    """Step reached and checkpoint saved, readable after the process was killed when it has a file (`path`)."""

    def __init__(self, path: Path | None = None) -> None:
        self.step: int | None = None
        self.checkpoint: str | None = None
        self._file = None if path is None else os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)

    def reached(self, step: int) -> None:
        """`step` begins."""
        self.step = step
        if self._file is not None:
            os.pwrite(self._file, f"{step:<{_STEP_WIDTH}d}\n".encode(), 0)

    def saved(self, checkpoint: Path | str) -> None:
        """A step is committed (or was resumed from); `checkpoint` says which, and how to go on from it."""
        self.checkpoint = str(checkpoint)
        if self._file is not None:
            os.pwrite(self._file, f"{self.checkpoint}\n".encode(), _STEP_WIDTH + 1)

    @classmethod
    def read(cls, path: Path) -> Diary:
        """What the rank with the diary at `path` had noted; empty when it noted nothing."""
        diary = cls()
        text = path.read_bytes() if path.exists() else b""
        step, checkpoint = text[:_STEP_WIDTH].strip(b"\0 \n"), text[_STEP_WIDTH + 1 :].split(b"\n")[0]
        diary.step = int(step) if step else None
        diary.checkpoint = checkpoint.decode() or None
        return diary


@dataclass(frozen=True, slots=True)
class Failure:
    """How one rank ended. `when_s`: monotonic clock; `summary`: one line; `details`: traceback or ''."""

    rank: int
    when_s: float
    summary: str
    details: str
    step: int | None = None
    bad_job: bool = False
    consequence: bool = False


def of_exception(rank: int, error: BaseException, step: int | None) -> Failure:
    """The failure that `error` is; a ConfigError is a bad job and keeps its own text."""
    when_s = time.monotonic()
    if isinstance(error, ConfigError):
        return Failure(rank, when_s, "ConfigError", str(error), step, bad_job=True)
    last = "".join(traceback.format_exception_only(error)).strip().splitlines()
    summary = f"sys.exit({error.code!r})" if isinstance(error, SystemExit) else last[0] if last else repr(error)
    details = "".join(traceback.format_exception(type(error), error, _below_launch(error))).rstrip()
    broken = any(words in str(error).lower() for words in _BROKEN_CONNECTION)
    return Failure(rank, when_s, summary, details, step, consequence=broken and not isinstance(error, SystemExit))


def _below_launch(error: BaseException) -> TracebackType | None:
    """The traceback from the rank's own program on: how it was started says nothing."""
    here = str(Path(__file__).parent)
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename.startswith(here):
        trace = trace.tb_next
    return trace


def of_death(rank: int, when_s: float, status: int | None, step: int | None) -> Failure:
    """A rank that ended without a report. `status`: exit code, or minus the signal; None if unknown."""
    if status is None:
        summary = "the process ended without a report"
    elif status < 0:
        name = signal.Signals(-status).name
        summary = f"killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
    else:
        summary = f"the process ended with exit code {status}, without raising an error"
    return Failure(rank, when_s, summary, "", step)


def leave(folder: Path, failure: Failure) -> None:
    """Write a rank's report where `collect` finds it; renamed into place, so never half-read."""
    aside = folder / f"failure-{failure.rank}.tmp"
    aside.write_text(json.dumps(asdict(failure)))
    aside.rename(folder / f"failure-{failure.rank}.json")


Deaths = Mapping[int, tuple[float, int | None]]
"""Rank -> (monotonic seconds, status) of the ranks that did not end well; None: nobody saw how."""


def known(watched: Deaths, exit_codes: Mapping[int, int]) -> dict[int, tuple[float, int | None]]:
    """What the watch saw, and the launcher's exit codes where the watch came too late."""
    found = dict(watched)
    for rank, code in exit_codes.items():
        when_s, status = found.get(rank, (time.monotonic(), None))
        found[rank] = when_s, code if status is None else status
    return found


def collect(folder: Path, deaths: Deaths) -> list[Failure]:
    """All failures, the first cause first."""
    failures = [Failure(**json.loads(path.read_text())) for path in folder.glob("failure-*.json")]
    reported = {failure.rank for failure in failures}
    for rank, (when_s, status) in deaths.items():
        if rank not in reported:
            failures.append(of_death(rank, when_s, status, Diary.read(folder / f"diary-{rank}").step))
    return sorted(failures, key=lambda failure: (not failure.bad_job, failure.consequence, failure.when_s))


def block(failures: Sequence[Failure], world: int) -> str:
    """What the user reads: the first cause with its traceback; one line for ranks that failed on their own as well."""
    first = failures[0]
    if first.bad_job:
        return first.details
    where = "" if first.step is None else f" at step {first.step}"
    lines = [f"rank {first.rank} of {world} failed{where}: {first.summary}"]
    lines += [f"    {line}" for line in first.details.splitlines()]
    own = [failure for failure in failures[1:] if failure.details and not failure.consequence]
    same = [str(failure.rank) for failure in own if failure.summary == first.summary]
    if same:
        lines.append(f"the same error: rank {', '.join(same)}")
    lines += [f"rank {item.rank} failed too: {item.summary}" for item in own if item.summary != first.summary]
    if world > 1:
        lines.append("all ranks were stopped")
    return "\n".join(lines)


def stopped(cause: str, diary: Diary) -> str:
    """What is said after Ctrl-C or SIGTERM: how far the job was, and how to go on."""
    where = "before the first step" if diary.step is None else f"at step {diary.step}"
    if diary.checkpoint is None:
        return f"stopped by {cause} {where}. No checkpoint was saved (checkpoint.every), so the next run starts afresh."
    return f"stopped by {cause} {where}; {diary.checkpoint}"
