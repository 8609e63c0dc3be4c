"""Launchers in processes of their own, with their output in files."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from heptad.config.schema import Job, LayoutSection, LogSection
from heptad.launch.local import train


@dataclass
class Launcher:
    """A forked launcher: its process id and where its output goes."""

    pid: int
    folder: Path
    started: float

    def wait(self, timeout_s: float = 20.0) -> int:
        """Its exit code, or minus the signal."""
        while time.monotonic() < self.started + timeout_s:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.01)
        os.kill(self.pid, 9)
        raise AssertionError(f"still running after {timeout_s} s: {self.stderr}")

    @property
    def stderr(self) -> str:
        return (self.folder / "stderr").read_text()

    @property
    def result(self) -> Any:
        return json.loads((self.folder / "stdout").read_text())

    def pids(self, world: int, timeout_s: float = 60.0) -> list[int]:
        """Process ids of the ranks and their data workers, once all have noted them."""
        notes = [self.folder / f"rank-{rank}" for rank in range(world)]
        while not all(note.exists() for note in notes):
            assert time.monotonic() < self.started + timeout_s, self.stderr
            time.sleep(0.01)
        return [int(pid) for note in notes for pid in note.read_text().split()]


def job_of(world: int, folder: Path, name: str = "toy") -> Job:
    return Job(layout=LayoutSection(dp_shard=world), log=LogSection(dir=str(folder), name=name))


def launch(program: str, world: int, folder: Path, name: str = "toy", port: int = 0) -> Launcher:
    """Start `heptad train` on a toy program in a child process, leader of a process group as under a shell."""
    folder.mkdir(exist_ok=True)
    started = time.monotonic()
    pid = os.fork()
    if pid == 0:
        try:
            os.setpgid(0, 0)
            for number, stream in ((1, "stdout"), (2, "stderr")):
                os.dup2(os.open(folder / stream, os.O_WRONLY | os.O_CREAT), number)
            sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
            entry = f"tests.launch.toy:{program}"
            code = train(job_of(world, folder, name), True, False, False, entry=entry, port=port)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        except BaseException:
            import traceback

            traceback.print_exc(file=sys.stderr)
            sys.stderr.flush()
            os._exit(99)
    return Launcher(pid, folder, started)


def alive(pids: list[int], timeout_s: float = 3.0) -> list[int]:
    """Those still running after at most `timeout_s` (a zombie that nobody reaps has ended)."""
    deadline = time.monotonic() + timeout_s
    while True:
        running = [pid for pid in pids if _runs(pid)]
        if not running or time.monotonic() > deadline:
            return running
        time.sleep(0.02)


def _runs(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
