"""`heptad timeline --schedule` and `--compare`: numbers, text, picture, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from heptad.axes.pipeline.generate import GENERATORS, generate
from heptad.schedule.pipeline import format_schedule, parse_schedule

Heptad = Callable[..., tuple[int, str, str]]
DUALPIPE = ("timeline", "--schedule", "dualpipe", "--pp", "8", "--microbatches", "20")
SMALL = ("timeline", "--schedule", "1f1b", "--pp", "4", "--microbatches", "8")


def test_json_has_the_published_figures(heptad: Heptad) -> None:
    code, out, err = heptad(*DUALPIPE, "--json")
    found = json.loads(out)
    assert code == 0 and err == ""
    assert (found["makespan"], found["idle"], found["peak_live"]) == (66, [6] * 8, [9] * 8)
    assert found["idle_fraction"] == pytest.approx(6 / 66)
    assert found["idle_fraction"] == sum(found["idle"]) / (found["ranks"] * found["makespan"])
    lines = json.loads(heptad(*DUALPIPE, "--json", "--actions")[1])["actions"]
    assert "\n".join(lines) == format_schedule(generate("dualpipe", 8, None, 20))
    assert json.loads(heptad(*DUALPIPE, "--json", "--pairs", "early")[1])["idle"] == [3] * 8


@pytest.mark.parametrize("name", sorted(GENERATORS))
def test_actions_are_the_text_form(heptad: Heptad, name: str) -> None:
    code, out, _ = heptad("timeline", "--schedule", name, "--pp", "4", "--microbatches", "8", "--actions")
    assert code == 0 and len(out.splitlines()) == 4
    assert parse_schedule(out, name).lines == generate(name, 4, None, 8).lines


def test_times_and_links_are_options(heptad: Heptad) -> None:
    def makespan(*args: str) -> float:
        return float(json.loads(heptad(*SMALL, *args, "--json")[1])["makespan"])

    assert makespan() == 33 and makespan("--f", "2", "--i", "2", "--w", "2") == 66
    assert makespan("--b", "1") == 22 and makespan("--i", "0.5", "--w", "0.5") == 22
    assert makespan("--comm", "0.1") > 33 and makespan("--latency", "0.1") == makespan("--comm", "0.1")
    assert makespan("--rendezvous") >= 33
    dualpipe = json.loads(heptad(*DUALPIPE, "--json", "--fb", "2.5")[1])
    assert dualpipe["makespan"] < 66


def test_interleaved_takes_vpp(heptad: Heptad) -> None:
    args = ("timeline", "--schedule", "interleaved", "--pp", "4", "--microbatches", "8", "--vpp", "3", "--json")
    found = json.loads(heptad(*args)[1])
    assert found["stages"] == 12 and found["idle_fraction"] == pytest.approx(3 / (3 * 8 + 3))


def test_the_picture_is_written_and_the_numbers_printed(heptad: Heptad, tmp_path: Path) -> None:
    path = tmp_path / "x.svg"
    code, out, _ = heptad(*DUALPIPE, "--f", "1", "--i", "1", "--w", "1", "--comm", "0.1", "-o", str(path))
    assert code == 0 and path.read_text(encoding="utf-8").startswith("<svg") and "idle" in out and "formula" in out
    assert "messages that take no time" in out and "exact here" in heptad(*DUALPIPE)[1]
    assert "8 ranks, 20 micro-batches (F 1, I 1, W 1, B 2, F&amp;B 3, comm 0.1)" in path.read_text(encoding="utf-8")


def test_compare_draws_the_same_model(heptad: Heptad, tmp_path: Path) -> None:
    path, names = tmp_path / "x.svg", ["gpipe", "1f1b", "interleaved", "zbv", "dualpipe"]
    args = ("timeline", "--compare", ",".join(names), "--pp", "4", "--microbatches", "8")
    found = json.loads(heptad(*args, "--json", "-o", str(path))[1])["schedules"]
    assert [entry["schedule"] for entry in found] == names
    work = [entry["makespan"] - entry["idle"][0] for entry in found]
    assert work == [24] * 5
    assert [entry["idle"][0] for entry in found] == [9, 9, 4.5, 1.5, 2]
    assert all(f">{name}<" in path.read_text(encoding="utf-8") for name in names)
    text = heptad(*args, "--actions")[1]
    assert text.count("# ") == 5 and len(text.splitlines()) == 25
    assert json.loads(heptad(*args, "--json", "--vpp", "4")[1])["schedules"][2]["stages"] == 16


def test_a_file_of_ones_own(heptad: Heptad, tmp_path: Path) -> None:
    path = tmp_path / "my.txt"
    path.write_text("# mine\n0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1\n", encoding="utf-8")
    code, out, _ = heptad("timeline", "--schedule", f"file:{path}", "--json")
    assert code == 0 and json.loads(out)["makespan"] == 9
    assert heptad("timeline", "--schedule", f"file:{path}", "--pp", "2", "--microbatches", "2")[0] == 0
    assert "formula" not in heptad("timeline", "--schedule", f"file:{path}")[1]
    assert heptad("timeline", "--schedule", f"file:{path}", "--pp", "3")[0] == 2
    path.write_text("0F0 0B0 0F1 0B1\n1F1 1B1 1F0 1B0\n", encoding="utf-8")
    code, out, err = heptad("timeline", "--schedule", f"file:{path}")
    assert code == 2 and out == "" and "rank 0" in err and "rank 1" in err


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ((), "JOB"),
        (("--pp", "4"), "belongs to a schedule"),
        (("debug", "--comm", "1"), "belongs to a schedule"),
        (("debug", "--rendezvous"), "belongs to a schedule"),
        (("debug", *SMALL[1:]), "without a job"),
        (("--schedule", "1f1b"), "--pp"),
        (("--schedule", "1f1b", "--pp", "4"), "--microbatches"),
        (("--schedule", "1f2b", "--pp", "4", "--microbatches", "8"), "1f1b"),
        (("--schedule", "1f1b", "--compare", "zbv,gpipe", "--pp", "4", "--microbatches", "8"), "either one"),
        (("--compare", "gpipe,dualpip", "--pp", "4", "--microbatches", "8"), "dualpipe"),
        (("--schedule", "dualpipe", "--pp", "8", "--microbatches", "6"), "16"),
        (("--schedule", "file:nowhere.txt"), "nowhere.txt"),
        ((*SMALL[1:], "--f", "-1"), "not negative"),
        ((*SMALL[1:], "--w", "nan"), "finite"),
        ((*SMALL[1:], "--f", "0", "--i", "0", "--w", "0"), "something takes time"),
        ((*SMALL[1:], "--pairs", "early"), "no effect"),
        ((*SMALL[1:], "--fb", "2.5"), "no effect"),
        ((*SMALL[1:], "--vpp", "2"), "vpp"),
        ((*SMALL[1:], "-o", "/nowhere/x.svg"), "folder that exists"),
        ((*DUALPIPE[1:], "--fb", "9"), "2 to 3"),
        ((*DUALPIPE[1:], "--pairs", "late"), "block or early"),
        ((*DUALPIPE[1:], "--pairs", "early", "--rendezvous"), "both inputs"),
        (("--compare", "gpipe,1f1b", "--pp", "4", "--microbatches", "8", "--vpp", "2"), "no effect"),
        (("--schedule", "interleaved", "--pp", "4", "--microbatches", "14", "--rendezvous"), "deadlock"),
    ],
)
def test_what_cannot_be_shown_exits_2_on_one_screen(heptad: Heptad, args: tuple[str, ...], says: str) -> None:
    code, out, err = heptad("timeline", *args)
    assert code == 2 and out == "" and says in err and "rule:" in err and "fix:" in err and len(err.splitlines()) < 40


def test_no_torch_is_needed() -> None:
    program = f"import sys; sys.argv = ['heptad', *{DUALPIPE!r}]\nfrom heptad.cli.main import main\n" + (
        "try:\n    main()\nexcept SystemExit as stop:\n    assert not stop.code\nassert 'torch' not in sys.modules\n"
    )
    source = Path(__file__).resolve().parents[2] / "src"
    subprocess.run([sys.executable, "-c", program], check=True, env={"PYTHONPATH": str(source)}, capture_output=True)
