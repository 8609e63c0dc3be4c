"""The command line: exit codes, stdout and stderr, what a verb imports, how arguments are passed on."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

Heptad = Callable[..., tuple[int, str, str]]
SRC = Path(__file__).resolve().parents[2] / "src"


def stand_in(monkeypatch: pytest.MonkeyPatch, module: str, **functions: Callable[..., Any]) -> None:
    fake = ModuleType(module)
    for name, function in functions.items():
        setattr(fake, name, function)
    monkeypatch.setitem(sys.modules, module, fake)


@pytest.mark.parametrize("args", [["--help"], ["plan", "--help"], ["train", "--help"]])
def test_help_imports_nothing_heavy(args: list[str]) -> None:
    """Time follows from what is imported; the figure itself is in the benchmarks."""
    program = (
        "import sys\n"
        f"sys.argv = ['heptad', *{args!r}]\n"
        "from heptad.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit as stop:\n    assert not stop.code\n"
        "heavy = {'torch', 'numpy', 'rich', 'tokenizers'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", program], env={"PYTHONPATH": str(SRC)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Usage" in done.stdout


def test_help_lists_the_verbs_that_exist(heptad: Heptad) -> None:
    code, out, _ = heptad("--help")
    listed = {line.split()[0] for line in out.partition("Commands:")[2].splitlines() if line.startswith("  ")}
    assert code == 0 and {"train", "verify", "timeline", "data", "plan"} <= listed


def test_a_bad_job_is_said_under_half_an_environment(heptad: Heptad, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    code, _, err = heptad("train", "debgu")
    assert code == 2 and "debgu" in err


def test_a_class_in_the_current_folder_is_found_and_tried_before_a_rank_starts(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\n\n\nclass Net(torch.nn.Module):\n    def __init__(self, section):\n        super().__init__()\n"
    )
    program = "import sys; del sys.path[0]; from heptad.cli.main import main; main()"
    args = ["train", "debug", "--set", "model.class=mine:Net", "--set", "layout.dp_shard=2"]
    done = subprocess.run(
        [sys.executable, "-c", program, *args],
        cwd=tmp_path, env={"PYTHONPATH": str(SRC)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 2 and "must have units()" in done.stderr, done.stderr
    assert "ranks  " not in done.stderr and not (tmp_path / "runs").exists()


@pytest.mark.parametrize("verb", ["train", "verify", "timeline", "data", "plan"])
@pytest.mark.parametrize("args", [["debgu"], ["debug", "--set", "layout.tp=3"], ["debug", "--set", "train.stesp=4"]])
def test_c_117_a_bad_job_exits_2_on_one_screen_before_anything_starts(
    heptad: Heptad, verb: str, args: list[str]
) -> None:
    code, out, err = heptad(verb, *args)
    assert code == 2 and out == "" and "Traceback" not in err
    assert "problem" in err and "rule:" in err and "fix:" in err and len(err.splitlines()) < 40


def test_plan_is_refused_with_what_to_use(heptad: Heptad, snapshot: Callable[[str, str], None]) -> None:
    code, out, err = heptad("plan", "debug")
    assert code == 2 and out == ""
    snapshot("plan_not_built", err)


@pytest.mark.parametrize("code", [0, 1])
def test_train_passes_its_arguments_and_exit_code_on(
    heptad: Heptad, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    calls: list[tuple[Any, dict[str, bool]]] = []

    def run(job: Any, **flags: bool) -> int:
        calls.append((job, flags))
        return code

    stand_in(monkeypatch, "heptad.launch.local", train=run)
    assert heptad("train", "debug", "--json", "--ledger", "--set", "train.steps=3", "--set", "train.seed=5")[0] == code
    (job, flags), *others = calls
    assert not others and flags == {"as_json": True, "ledger": True, "trace": False}
    assert (job.train.steps, job.train.seed, job.model.layers, job.model.head_dim) == (3, 5, 8, 8)


def test_a_corpus_that_is_not_there_is_a_bad_job_before_a_rank_starts(
    heptad: Heptad, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stand_in(monkeypatch, "heptad.launch.local", train=lambda *args, **flags: pytest.fail("started"))
    code, out, err = heptad("train", "debug", "--set", f"data.path={tmp_path / 'nowhere'}")
    assert code == 2 and out == "" and "data.path" in err


def test_verify_passes_its_arguments_and_exit_code_on(heptad: Heptad, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []

    def run(job: Any, **flags: Any) -> int:
        calls.append(flags)
        return 1

    stand_in(monkeypatch, "heptad.verify.run", verify=run)
    assert heptad("verify", "debug", "--steps", "2", "--full", "--inject", "a", "--inject", "b")[0] == 1
    assert calls == [{"steps": 2, "full": True, "inject": ("a", "b"), "as_json": False}]
    assert heptad("verify", "debug", "--steps", "0")[0] == 2
    assert heptad("verify")[0] == 2


def test_timeline_prints_the_checked_program_and_nothing_else_on_stdout(heptad: Heptad) -> None:
    from heptad.schedule.action import parse_program

    sets = ["--set", "layout.dp_shard=2", "--set", "model.layers=2", "--set", "train.global_batch=4"]
    code, out, err = heptad("timeline", "debug", "--actions", *sets)
    assert code == 0 and "blocks.1" in err
    program = parse_program(out)
    assert [str(action) for action in program if action.kind.value == "F"][:5] == ["0F0", "1F0", "2F0", "3F0", "0F1"]
    assert str(program[-1]) == "U"
    code, out, _ = heptad("timeline", "debug", "--actions", "--json", *sets)
    found = json.loads(out)
    assert code == 0 and parse_program(found["program"]) == program and found["units"][0] == "embed"
    assert heptad("timeline", "debug")[0] == 2


def test_data_describes_the_corpus(heptad: Heptad, tmp_path: Path) -> None:
    corpus, cache = tmp_path / "corpus", tmp_path / "cache"
    corpus.mkdir()
    for number in range(8):
        (corpus / f"{number}.txt").write_text(f"document {number}: " + "some words to read " * 40, encoding="utf-8")
    options = (f"data.path={corpus}", f"data.cache_dir={cache}", "data.seq_len=16")
    sets = [word for option in options for word in ("--set", option)]
    code, out, _ = heptad("data", "debug", "--json", "--checksums", *sets)
    found = json.loads(out)
    assert code == 0 and found["documents"] == 8 and found["seq_len"] == 16
    code, out, _ = heptad("data", "debug", *sets)
    assert code == 0 and "8 documents" in out
