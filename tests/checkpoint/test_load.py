"""Loading: any layout loads any checkpoint; damage and disagreement are named, never passed over."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.checkpoint.ranks import SHAPES, assert_holds, save_all

from heptad.checkpoint.find import resume, scan
from heptad.checkpoint.form import FORMAT, CheckpointError
from heptad.checkpoint.read import Reader
from heptad.mesh.piece import Piece


@pytest.mark.parametrize("saved_on", [1, 2, 3, 4])
def test_c_055_any_number_of_ranks_loads_what_any_other_saved(tmp_path: Path, saved_on: int) -> None:
    meta = {"loader": {"samples": 37}, "optimizer": {"step": 9}}
    path = save_all(tmp_path, 9, saved_on, meta=meta).path
    for loaded_on in [1, 2, 3, 4]:
        assert_holds(path, 9, loaded_on)
        with Reader(path) as reader:
            assert reader.meta == meta


def test_any_range_is_assembled_from_whatever_parts_it_overlaps(tmp_path: Path) -> None:
    path = save_all(tmp_path, 1, 4).path
    with Reader(path) as reader:
        size = 13 * 7
        for start in range(0, size, 6):
            for stop in range(start, size + 1, 5):
                out = torch.zeros(stop - start, dtype=torch.float64)
                reader.fill("embed.tokens.weight", start, stop, out)
                want = (torch.arange(size) + 1000)[start:stop].to(torch.bfloat16).double()
                assert torch.equal(out, want)


def test_a_value_is_never_rounded_silently(tmp_path: Path) -> None:
    with Reader(save_all(tmp_path, 1).path) as reader:
        with pytest.raises(CheckpointError, match=r"head.norm.weight is stored as torch.float32, which torch.bfloat16"):
            reader.fill("head.norm.weight", 0, 3, torch.zeros(3, dtype=torch.bfloat16))


def test_c_073_missing_extra_and_mismatched_tensors_are_named(tmp_path: Path) -> None:
    with Reader(save_all(tmp_path, 1).path) as reader:
        assert reader.check(SHAPES) == reader.check(SHAPES, partial=True)
        with pytest.raises(CheckpointError, match=r"blocks.2.w is not in the checkpoint"):
            reader.check({**SHAPES, "blocks.2.w": (5,)})
        fewer = {name: shape for name, shape in SHAPES.items() if name != "count"}
        with pytest.raises(CheckpointError, match=r"count is in the checkpoint only"):
            reader.check(fewer)
        skipped = reader.check({**fewer, "blocks.2.w": (5,)}, partial=True)
        assert (skipped.missing, skipped.extra) == (("blocks.2.w",), ("count",))
        left = Piece("blocks.2.w", (5,), 0, 5, torch.full((5,), 7.0))
        norm = Piece("head.norm.weight", (3,), 0, 3, torch.zeros(3))
        reader.load([left, norm], skipped)
        assert left.tensor.tolist() == [7.0] * 5 and norm.tensor.tolist() == [1000.0, 1001.0, 1002.0]
        with pytest.raises(CheckpointError, match=r"head.norm.weight has shape \(3,\) in the checkpoint and \(2,\)"):
            reader.check({**SHAPES, "head.norm.weight": (2,)})
        with pytest.raises(CheckpointError, match=r"has shape \(3,\) in the checkpoint and \(3, 1\)"):
            reader.load([Piece("head.norm.weight", (3, 1), 0, 3, torch.zeros(3))])
        with pytest.raises(CheckpointError, match=r"12 more tensors"):
            reader.check({**SHAPES, **{f"blocks.{n}.w": (5,) for n in range(20)}})


@pytest.mark.parametrize("name", ["index.json", "meta.json", "rank-00001-of-00002.safetensors"])
@pytest.mark.parametrize("damage", ["cut", "flip", "gone"])
def test_damage_names_the_file(tmp_path: Path, name: str, damage: str) -> None:
    path = save_all(tmp_path, 1, 2).path
    content = bytearray((path / name).read_bytes())
    content[-1] ^= 1
    if damage == "gone":
        (path / name).unlink()
    else:
        (path / name).write_bytes(content[:-3] if damage == "cut" else content)
    with pytest.raises(CheckpointError, match=name), Reader(path) as reader:
        reader.fill("embed.tokens.weight", 0, 91, torch.zeros(91))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 99, "step": 1, "run": "a", "files": {}}'])
def test_a_marker_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    path = save_all(tmp_path, 1).path
    (path / "COMMIT").write_text(text)
    with pytest.raises(CheckpointError, match="COMMIT"):
        Reader(path)


def test_an_older_format_is_refused_by_name_and_left_alone(tmp_path: Path) -> None:
    """Its square row-parallel weights would load transposed, with the right shape."""
    path = save_all(tmp_path, 1).path
    marker = path / "COMMIT"
    marker.write_text(marker.read_text().replace(f'"format": {FORMAT}', '"format": 1'))
    for opened in (lambda: Reader(path), lambda: resume(tmp_path, "a", "auto"), lambda: resume(tmp_path, "a", "must")):
        with pytest.raises(CheckpointError, match=r"format 1 keeps attention\.out and mlp\.down output first"):
            opened()
    assert resume(tmp_path, "a", "never").reader is None
    saved = save_all(tmp_path, 2, keep=1)
    assert saved.notes == ("left alone: step-00000001 of a run that cannot be read",) and marker.exists()


def test_a_marker_cannot_point_outside_its_directory(tmp_path: Path) -> None:
    path = save_all(tmp_path, 1).path
    marker = path / "COMMIT"
    marker.write_text(marker.read_text().replace('"index.json"', '"../index.json"'))
    with pytest.raises(CheckpointError, match="not a plain file name"):
        Reader(path)


def test_c_074_resume_never_starts_afresh_by_accident(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    fresh = resume(root, "a", "auto")
    assert fresh.reader is None and "fresh start: no checkpoint of run 'a'" in fresh.notes[0]
    with pytest.raises(CheckpointError, match="must hold a complete checkpoint of run 'a'"):
        resume(root, "a", "must")
    save_all(root, 2)
    path = save_all(root, 4).path
    for mode in ("auto", "must"):
        found = resume(root, "a", mode)  # type: ignore[arg-type]
        assert found.reader is not None and found.reader.step == 4
        assert found.notes[0] == f"resuming from step 4: {path}"
    assert resume(root, "a", "never").reader is None
    (path / "rank-00000-of-00001.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"rank-00000-of-00001\.safetensors"):
        resume(root, "a", "auto")
    (path / "COMMIT").write_text("not json")
    with pytest.raises(CheckpointError, match="COMMIT"):
        resume(root, "a", "auto")


def test_c_074_a_shape_that_differs_stops_the_resume(tmp_path: Path) -> None:
    save_all(tmp_path, 2)
    reader = resume(tmp_path, "a", "auto").reader
    assert reader is not None
    with pytest.raises(CheckpointError, match=r"\(13, 7\) in the checkpoint and \(13, 8\) in the model"):
        reader.check({**SHAPES, "embed.tokens.weight": (13, 8)})


def test_foreign_and_unfinished_directories_are_not_chosen_and_are_said(tmp_path: Path) -> None:
    save_all(tmp_path, 3, run="a")
    save_all(tmp_path, 1000, run="b")
    (tmp_path / "step-00000009.tmp-a").mkdir()
    (tmp_path / "step-00000011").mkdir()  # no marker: a deletion by hand that was cut short
    assert [entry.step for entry in scan(tmp_path).of_run("a")][-1] == 3
    assert [entry.step for entry in scan(tmp_path).of_run(None)][-1] == 1000
    notes = "\n".join(resume(tmp_path, "a", "auto").notes)
    assert "step-00000009.tmp-a" in notes and "also holds checkpoints of b" in notes
