"""Nothing outlives the job: a watch inside the launcher, and a guard beside it for when the launcher itself is killed.

Every rank leads a process group of its own, so the processes it starts (data workers) end with it. The *watch* waits
for each rank's end without taking its exit status away from the launcher (`waitid` with WNOWAIT), so it knows who
ended first and how; ranks that do not follow a failed one within `GRACE_S` are killed. The *guard* is a small process
that waits for the launcher's word or its death, then kills what is left of the ranks' groups and removes the
launcher's folder.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

GRACE_S = 4.0
_POLL_S = 0.01
STOPPED = 130
"""Exit code of a rank that was asked to stop and did (128 + SIGINT)."""


def enter(folder: Path, rank: int, guard: int | None) -> None:
    """Called by a rank first: own process group, default signals, its process id in `folder`, `guard` closed."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)  # a Python handler would wait for the collective the rank is stuck in
    os.setpgid(0, 0)
    aside = folder / f"pid-{rank}.tmp"
    aside.write_text(str(os.getpid()))
    aside.rename(folder / f"pid-{rank}")
    if guard is not None:
        os.close(guard)


def kill_groups(folder: Path) -> None:
    """SIGKILL to every rank's process group."""
    for path in folder.glob("pid-*[0-9]"):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(int(path.read_text()), signal.SIGKILL)


class Guard:
    """The process that cleans up. `pipe`: its write end, which forked ranks inherit and close in `enter`."""

    def __init__(self, folder: Path) -> None:
        reader, self.pipe = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                _guard(folder, reader)
            finally:
                os._exit(0)
        os.close(reader)

    def finish(self) -> None:
        """Have it clean up now, and wait until it has."""
        with contextlib.suppress(BrokenPipeError):
            os.write(self.pipe, b".")
        os.close(self.pipe)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._pid, 0)


def _guard(folder: Path, reader: int) -> None:
    os.setsid()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)  # else a reader of the launcher's output waits for the guard
    os.closerange(3, reader)
    os.closerange(reader + 1, os.sysconf("SC_OPEN_MAX"))
    os.read(reader, 1)
    kill_groups(folder)
    shutil.rmtree(folder, ignore_errors=True)


class Watch:
    """Notes when and how each rank ended: `deaths` holds (monotonic seconds, status) of those that ended badly."""

    def __init__(self, folder: Path, world: int) -> None:
        self.deaths: dict[int, tuple[float, int | None]] = {}
        self._folder, self._world = folder, world
        self._over = threading.Event()
        self._waiters: list[threading.Thread] = []
        self._finder = threading.Thread(target=self._find, daemon=True)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch while the block runs; afterwards all that ended is known."""
        self._finder.start()
        try:
            yield
        finally:
            self._over.set()
            self._finder.join()
            for waiter in self._waiters:
                waiter.join(timeout=0.2)

    def _find(self) -> None:
        waiting = set(range(self._world))
        while waiting and not self._over.is_set():
            for rank in sorted(waiting):
                path = self._folder / f"pid-{rank}"
                if path.exists():
                    waiting.remove(rank)
                    waiter = threading.Thread(target=self._wait, args=(rank, int(path.read_text())), daemon=True)
                    self._waiters.append(waiter)
                    waiter.start()
            self._over.wait(_POLL_S)

    def _wait(self, rank: int, pid: int) -> None:
        try:
            ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            exited = ended is not None and ended.si_code == os.CLD_EXITED
            status = None if ended is None else ended.si_status if exited else -ended.si_status
        except ChildProcessError:
            status = None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)  # its data workers; while one lives, the launcher takes the rank for alive
        if status in (0, STOPPED):
            return
        first = not self.deaths
        self.deaths[rank] = (time.monotonic(), status)
        if first and not self._over.wait(GRACE_S):
            kill_groups(self._folder)
