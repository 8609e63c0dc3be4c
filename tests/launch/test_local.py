"""Local ranks: they run, meet on a port of their own, and when one ends badly all end, with the cause said once."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.launch.launching import alive, job_of, launch

from heptad.launch.local import train

ROOT = Path(__file__).parents[2]
CAUSE = {
    "exit": "rank 1 of 4 failed at step 12: sys.exit(1)",
    "os_exit": "rank 1 of 4 failed at step 12: the process ended with exit code 3, without raising an error",
    "kill": "rank 1 of 4 failed at step 12: killed by SIGKILL (out of memory?)",
    "raise": "rank 1 of 4 failed at step 12: ValueError: rank 1 has had enough",
}


@pytest.fixture(autouse=True)
def temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The launcher's own folder goes where the test can see that nothing is left of it."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


def test_as_many_ranks_run_as_the_layout_has(tmp_path: Path, temporary_folder: Path) -> None:
    launcher = launch("sums", 4, tmp_path / "run")
    assert launcher.wait() == 0, launcher.stderr
    assert launcher.result["sum"] == 6.0 and launcher.result["threads"] == 1
    assert launcher.stderr == "" and not list(temporary_folder.iterdir())


@pytest.mark.parametrize("how", ["exit", "os_exit", "kill", "raise"])
def test_c_098_a_rank_that_ends_badly_ends_the_job_and_is_named_first(
    tmp_path: Path, temporary_folder: Path, how: str
) -> None:
    launcher = launch("with_worker", 4, tmp_path / "run", how)
    pids = launcher.pids(4)
    failed = time.monotonic()
    assert launcher.wait() == 1, launcher.stderr
    assert time.monotonic() - failed < 10
    assert len(pids) == 8 and alive(pids) == []
    assert not list(temporary_folder.iterdir())
    lines = launcher.stderr.strip().splitlines()
    assert lines[0] == CAUSE[how] and lines[-1] == "all ranks were stopped"
    assert launcher.stderr.count("Traceback") == (how in ("exit", "raise"))
    if how in ("exit", "raise"):
        assert "_end(str(job.log.name))" in launcher.stderr and "importlib" not in launcher.stderr
    else:
        assert len(lines) == 2


def test_an_error_of_all_ranks_is_shown_once(tmp_path: Path) -> None:
    launcher = launch("all_raise", 3, tmp_path / "run")
    assert launcher.wait() == 1
    assert launcher.stderr.count("Traceback") == 1 and "MemoryError: no room for 3 tensors" in launcher.stderr


def test_a_rank_that_ignores_sigterm_is_killed_in_time(tmp_path: Path) -> None:
    launcher = launch("deaf", 2, tmp_path / "run")
    assert launcher.wait(10) == 1
    assert launcher.stderr.strip().startswith("rank 1 of 2 failed: ValueError")


def test_a_bad_job_found_by_a_rank_is_one_screen_and_exit_code_2(tmp_path: Path) -> None:
    launcher = launch("with_worker", 2, tmp_path / "run", "bad-job")
    assert launcher.wait() == 2
    assert launcher.stderr.strip().startswith("1 problem in the job:") and "Traceback" not in launcher.stderr


@pytest.mark.parametrize(("number", "cause"), [(signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM")])
def test_a_stopped_job_says_how_to_resume(tmp_path: Path, temporary_folder: Path, number: int, cause: str) -> None:
    launcher = launch("with_worker", 2, tmp_path / "run", "wait")
    pids = launcher.pids(2)
    os.killpg(launcher.pid, number)  # as a terminal does
    assert launcher.wait() == 128 + number
    assert alive(pids) == [] and not list(temporary_folder.iterdir())
    lines = launcher.stderr.strip().splitlines()
    assert lines[0] == f"stopped by {cause} at step 12; runs/demo/step-00000010" and len(lines) == 1


def test_a_rank_that_saves_before_it_stops_is_waited_for(tmp_path: Path) -> None:
    launcher = launch("saves_when_stopped", 2, tmp_path / "run")
    launcher.pids(2)
    os.killpg(launcher.pid, signal.SIGINT)
    assert launcher.wait() == 130
    assert launcher.stderr.strip().startswith("stopped by Ctrl-C at step 13; step 13")


def test_a_second_ctrl_c_ends_all_at_once(tmp_path: Path) -> None:
    launcher = launch("never_stops", 2, tmp_path / "run")
    pids = launcher.pids(2)
    os.kill(launcher.pid, signal.SIGINT)
    time.sleep(0.5)
    assert alive(pids, 0) == pids
    os.kill(launcher.pid, signal.SIGINT)
    assert launcher.wait(10) == 130 and alive(pids) == []


def test_ranks_and_their_workers_end_with_a_killed_launcher(tmp_path: Path, temporary_folder: Path) -> None:
    launcher = launch("with_worker", 2, tmp_path / "run", "wait")
    pids = launcher.pids(2)
    os.kill(launcher.pid, signal.SIGKILL)
    assert launcher.wait() == -signal.SIGKILL
    assert alive(pids) == []
    deadline = time.monotonic() + 3
    while list(temporary_folder.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not list(temporary_folder.iterdir())


def test_c_097_two_jobs_started_together_both_run(tmp_path: Path) -> None:
    launchers = [launch("slow", 2, tmp_path / name) for name in ("one", "two")]
    assert [launcher.wait() for launcher in launchers] == [0, 0], [launcher.stderr for launcher in launchers]
    assert len({launcher.result["port"] for launcher in launchers}) == 2


def test_c_097_a_fixed_port_is_used_and_an_occupied_one_named(tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("localhost", 0))
        holder.listen()
        port = holder.getsockname()[1]
        launcher = launch("sums", 2, tmp_path / "taken", port=port)
        assert launcher.wait() == 2
        assert launcher.stderr.strip().splitlines() == [
            f"port {port} is in use on this machine: choose another, or give none and a free one is taken"
        ]
    launcher = launch("sums", 2, tmp_path / "free", port=port)
    assert launcher.wait() == 0, launcher.stderr


@pytest.fixture
def heard_ctrl_c() -> Iterator[None]:
    """SIGINT as in a terminal: a shell starts what runs in its background with the signal ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heard_ctrl_c")
def test_one_rank_runs_in_this_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(job_of(1, tmp_path), True, False, False, entry="tests.launch.toy:sums") == 0
    assert json.loads(capsys.readouterr().out)["sum"] == 0.0
    assert train(job_of(1, tmp_path), False, False, False, entry="tests.launch.toy:all_raise") == 1
    out = capsys.readouterr()
    assert out.out == "" and out.err.strip().startswith("rank 0 of 1 failed: MemoryError")
    for name, code in (("int", 130), ("term", 143)):
        assert train(job_of(1, tmp_path, name), False, False, False, entry="tests.launch.toy:interrupted") == code
        assert "at step 7. No checkpoint was saved" in capsys.readouterr().err


@pytest.mark.parametrize("rank", [0, 1])
def test_a_wrong_number_of_ranks_is_refused_before_any_collective(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    """Rank 1 waits: were it to end at once, torchrun would end rank 0 before that has spoken."""
    for name, value in {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr("heptad.launch.local.SPEAKS_AFTER_S", 0.2)
    begin_s = time.monotonic()
    assert train(job_of(4, tmp_path), False, False, False, entry="tests.launch.toy:sums") == 2
    said = capsys.readouterr().err
    assert "the layout has 4 ranks" in said and "2 were started" in said
    assert rank == 0 or time.monotonic() - begin_s >= 0.2


@pytest.mark.slow
def test_under_torchrun_a_bad_job_is_said_once(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", "-m", "heptad"]
    environ = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}"}
    for sets, said in (("layout.dp_shard=2", "the layout has 2 ranks"), ("layout.tp=3", "not built yet")):
        done = subprocess.run(
            [*command, "train", "debug", "--set", sets],
            capture_output=True, text=True, timeout=120, env=environ, check=False, cwd=tmp_path,
        )  # fmt: skip
        assert done.returncode == 1 and done.stderr.count(said) == 1, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("how", "code"), [("sums", 0), ("with_worker", 1)])
def test_under_torchrun_this_process_is_one_rank(tmp_path: Path, how: str, code: int) -> None:
    script = tmp_path / "main.py"
    script.write_text(
        "import sys\nfrom pathlib import Path\nfrom heptad.launch.local import train\n"
        "from tests.launch.launching import job_of\n"
        f"job = job_of(2, Path({str(tmp_path)!r}), 'raise')\n"
        f"sys.exit(train(job, True, False, False, entry='tests.launch.toy:{how}'))\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    environ = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environ, check=False)
    assert done.returncode == code, done.stderr
    if code == 0:
        assert json.loads(done.stdout)["sum"] == 1.0
    else:
        assert done.stderr.count("has had enough") >= 1 and done.stderr.count("failed at step 12") == 1
