"""SIGKILL at every file operation of a save, and of the pruning after it: the previous step stays loadable."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
from tests.checkpoint.ranks import Unsynced, assert_holds, save_all

from heptad.checkpoint.find import scan

T = TypeVar("T")


class KilledAt(Unsynced):
    """Kills the whole process at the k-th operation: before it, or in the middle of it when it is a write."""

    def __init__(self, kill_at: int) -> None:
        self.kill_at, self.count, self.lock = kill_at, 0, threading.Lock()

    def do(self, operation: str, path: Path, act: Callable[[], T]) -> T:
        with self.lock:
            self.count += 1
            if self.count == self.kill_at:
                if operation == "write":
                    act()
                    os.truncate(path, path.stat().st_size // 2)
                os.kill(os.getpid(), signal.SIGKILL)
        return super().do(operation, path, act)


def killed_save(root: Path, kill_at: int, step: int, world: int, keep: int) -> bool:
    """Save in a child that dies at operation `kill_at`; False when the save had fewer operations and ended."""
    child = os.fork()
    if child == 0:
        try:
            save_all(root, step, world, keep=keep, files=KilledAt(kill_at))
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(9)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0
    return False


@pytest.mark.parametrize(("world", "keep"), [(1, 1), (2, 2)])
def test_c_061_c_062_c_070_killed_at_every_file_operation(tmp_path: Path, world: int, keep: int) -> None:
    start = tmp_path / "start"
    for step in [1, 2]:
        save_all(start, step, world, keep=keep)
    kill_at, chosen = 1, []
    while True:
        root = tmp_path / f"at-{kill_at}"
        shutil.copytree(start, root)
        killed = killed_save(root, kill_at, 4, world, keep)
        entries = scan(root).of_run("a")
        assert entries, f"no checkpoint left after a kill at operation {kill_at}"
        entry = entries[-1]
        assert_holds(entry.path, entry.step)
        for other in scan(root).entries:
            assert_holds(other.path, other.step)
        chosen.append(entry.step)
        if not killed:
            break
        save_all(root, 4, world, keep=keep)
        saved = save_all(root, 6, world, keep=keep)
        assert_holds(saved.path, 6)
        assert [e.step for e in scan(root).entries] == [4, 6][-keep:] and len(list(root.iterdir())) == keep
        shutil.rmtree(root)
        kill_at += 1
    assert chosen == sorted(chosen) and set(chosen) == {2, 4}, "step 2 until the rename, step 4 from then on"
    assert chosen.count(4) > 6, "kills during pruning were among them"
