"""Which failure is said to be the first, and how."""

from __future__ import annotations

import time
from pathlib import Path

from heptad.errors import ConfigError
from heptad.launch.failure import Diary, block, collect, known, leave, of_exception, stopped


def raised(rank: int, error: BaseException) -> None:
    try:
        raise error
    except BaseException as caught:
        assert of_exception(rank, caught, None).details.startswith("Traceback")


def test_a_broken_connection_is_never_the_first_cause(tmp_path: Path) -> None:
    leave(tmp_path, of_exception(0, RuntimeError("Connection closed by peer [127.0.0.1]:42"), 4))
    failures = collect(tmp_path, {0: (time.monotonic(), 1), 1: (time.monotonic(), -9), 2: (time.monotonic() + 1, -15)})
    assert [failure.rank for failure in failures] == [1, 2, 0]
    assert block(failures, 3) == "rank 1 of 3 failed: killed by SIGKILL (out of memory?)\nall ranks were stopped"


def test_a_broken_connection_is_said_when_it_is_all_there_is(tmp_path: Path) -> None:
    leave(tmp_path, of_exception(0, RuntimeError("Connection reset by peer"), 4))
    assert block(collect(tmp_path, {}), 2).startswith("rank 0 of 2 failed at step 4: RuntimeError: Connection reset")


def test_errors_of_their_own_are_listed_and_the_same_ones_counted(tmp_path: Path) -> None:
    for rank, error in enumerate([ValueError("a"), ValueError("a"), KeyError("b"), ValueError("a")]):
        raised(rank, error)
        leave(tmp_path, of_exception(rank, error, 1))
    lines = block(collect(tmp_path, {}), 4).splitlines()
    assert lines[0] == "rank 0 of 4 failed at step 1: ValueError: a"
    assert lines[-3:] == ["the same error: rank 1, 3", "rank 2 failed too: KeyError: 'b'", "all ranks were stopped"]


def test_a_bad_job_comes_before_all_else(tmp_path: Path) -> None:
    leave(tmp_path, of_exception(0, ValueError("a"), None))
    bad = ConfigError.of("data.path", "x", "exists", "make it")
    leave(tmp_path, of_exception(1, bad, None))
    assert block(collect(tmp_path, {}), 2) == str(bad)


def test_a_diary_survives_its_process(tmp_path: Path) -> None:
    assert Diary.read(tmp_path / "none").step is None
    diary = Diary(tmp_path / "diary")
    assert Diary.read(tmp_path / "diary").step is None
    diary.saved("runs/a/step-00000100")
    assert Diary.read(tmp_path / "diary").checkpoint == "runs/a/step-00000100"
    for step in (99, 100, 7):
        diary.reached(step)
    diary.saved("b")
    found = Diary.read(tmp_path / "diary")
    assert (found.step, found.checkpoint) == (7, "b")
    assert stopped("Ctrl-C", found) == "stopped by Ctrl-C at step 7; b"
    assert "starts afresh" in stopped("SIGTERM", Diary())


def test_the_launchers_exit_codes_fill_what_the_watch_came_too_late_for() -> None:
    found = known({0: (1.0, None), 1: (2.0, -15)}, {0: -9, 1: -6, 2: 1})
    assert found[0] == (1.0, -9) and found[1] == (2.0, -15) and found[2][1] == 1
