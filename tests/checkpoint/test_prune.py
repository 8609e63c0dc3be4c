"""Which steps stay."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.checkpoint.ranks import assert_holds, save_all

from heptad.checkpoint.find import scan
from heptad.checkpoint.form import CheckpointError


def steps(root: Path, run: str = "a") -> list[int]:
    return [entry.step for entry in scan(root).of_run(run)]


def test_c_069_the_newest_by_step_number_stay(tmp_path: Path) -> None:
    for step in [900, 1000, 9900, 10000]:
        save_all(tmp_path, step, keep=2)
    assert steps(tmp_path) == [9900, 10000]
    assert len(list(tmp_path.iterdir())) == 2


def test_c_069_the_step_is_the_markers_not_the_names(tmp_path: Path) -> None:
    for step in [900, 1000]:
        save_all(tmp_path, step)
    (tmp_path / "step-00001000").rename(tmp_path / "step-00000001")
    save_all(tmp_path, 1100, keep=2)
    assert steps(tmp_path) == [1000, 1100]


@pytest.mark.parametrize("keep", [1, 2])
def test_c_070_the_last_checkpoint_is_never_pruned(tmp_path: Path, keep: int) -> None:
    for step in range(1, 5):
        saved = save_all(tmp_path, step, keep=keep)
        assert steps(tmp_path) == list(range(max(1, step - keep + 1), step + 1))
        assert_holds(saved.path, step)


def test_c_071_another_runs_steps_are_left_alone_and_reported(tmp_path: Path) -> None:
    save_all(tmp_path, 1000, run="a")
    saved = save_all(tmp_path, 10, run="b", keep=1)
    assert saved.notes == ("left alone: step-00001000 of a",) and not saved.removed
    assert steps(tmp_path, "a") == [1000] and steps(tmp_path, "b") == [10]
    same = save_all(tmp_path, 1000, run="b", keep=1)
    assert same.path.name == "step-00001000-2" and steps(tmp_path, "a") == [1000] and steps(tmp_path, "b") == [1000]
    (tmp_path / "step-00001000" / "COMMIT").write_text("?")
    assert save_all(tmp_path, 1001, run="b", keep=1).notes == (
        "left alone: step-00001000 of a run that cannot be read",
    )


def test_a_step_saved_again_replaces_the_old_one_after_it_is_committed(tmp_path: Path) -> None:
    save_all(tmp_path, 7)
    saved = save_all(tmp_path, 7, world=2)
    assert saved.path.name == "step-00000007-2" and [path.name for path in saved.removed] == ["step-00000007"]
    assert_holds(saved.path, 7)


def test_later_steps_of_an_abandoned_past_are_set_aside_not_chosen(tmp_path: Path) -> None:
    save_all(tmp_path, 5)
    save_all(tmp_path, 10)
    saved = save_all(tmp_path, 6, keep=1)  # the run went on from step 5 by hand
    entry = scan(tmp_path).of_run("a")[-1]
    assert entry.step == 6 and [path.name for path in saved.removed] == ["step-00000005"]
    assert "set aside: step-00000010" in saved.notes[0] and (tmp_path / "step-00000010.aside-a").is_dir()


def test_leftovers_of_this_run_only_are_cleared_by_the_next_save(tmp_path: Path) -> None:
    for name in ["step-00000003.tmp-a", "step-00000001.gone-a", "step-00000003.tmp-b"]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "rank-00000-of-00001.safetensors").write_bytes(b"half")
    save_all(tmp_path, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000003.tmp-b"]


def test_a_runs_name_is_checked(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"log\.name"):
        save_all(tmp_path, 1, run="a/b")
