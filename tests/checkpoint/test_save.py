"""What a save leaves on disk, and in which order it gets there."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from tests.checkpoint.ranks import SHAPES, assert_holds, pieces_of, save_all, whole

import heptad
from heptad.checkpoint import files as files_module
from heptad.checkpoint.files import Files
from heptad.checkpoint.plan import Held, assign
from heptad.checkpoint.read import Reader

T = TypeVar("T")


class Recorded(Files):
    def __init__(self) -> None:
        self.operations: list[tuple[str, str]] = []

    def do(self, operation: str, path: Path, act: Callable[[], T]) -> T:
        self.operations.append((operation, path.name))
        return act()


@pytest.mark.parametrize("world", [1, 3])
def test_saved_tensors_open_with_the_official_reader_and_each_element_is_stored_once(
    tmp_path: Path, world: int
) -> None:
    saved = save_all(tmp_path, 12, world)
    assert saved.path.name == "step-00000012"
    names = sorted(path.name for path in saved.path.iterdir())
    ranks = [f"rank-{rank:05d}-of-{world:05d}.safetensors" for rank in range(world)]
    assert names == ["COMMIT", "index.json", "meta.json", *ranks]
    stored = [load_file(saved.path / name) for name in ranks]
    index = json.loads((saved.path / "index.json").read_text())["tensors"]
    assert sorted(index) == sorted(SHAPES)
    assert sum(tensor.numel() for tensors in stored for tensor in tensors.values()) == sum(
        whole(name).numel() for name in SHAPES
    )
    for name, entry in index.items():
        parts = [load_file(saved.path / file)[key] for file, key, _, _ in entry["parts"]]
        flat = torch.cat(parts) if parts else whole(name)
        assert torch.equal(flat, whole(name, step=12)), name
    assert_holds(saved.path, 12, world)


def test_meta_comes_back_with_step_run_and_version(tmp_path: Path) -> None:
    meta = {"tokens": 10**12, "loader": {"epoch": 1, "position": 17}, "lr": 0.1}
    path = save_all(tmp_path, 3, 2, run="demo", meta=meta).path
    with Reader(path) as reader:
        assert (reader.step, reader.run, reader.meta) == (3, "demo", meta)
    facts = json.loads((path / "meta.json").read_text())
    assert facts["heptad"] == heptad.__version__ and facts["world"] == 2


def test_a_large_tensor_is_streamed_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files_module, "BLOCK_BYTES", 24)
    monkeypatch.setattr("heptad.checkpoint.read.BLOCK_BYTES", 24)
    recorded = Recorded()
    path = save_all(tmp_path, 5, files=recorded).path
    assert sum(op == ("write", "rank-00000-of-00001.safetensors") for op in recorded.operations) > 20
    assert_holds(path, 5, world=2)


def test_everything_is_durable_before_it_is_named(tmp_path: Path) -> None:
    save_all(tmp_path, 1)
    recorded = Recorded()
    save_all(tmp_path, 2, files=recorded, keep=1)
    did = recorded.operations
    written = [name for operation, name in did if operation == "open"]
    for name in written:
        assert did.index(("fsync", name)) > max(i for i, op in enumerate(did) if op == ("write", name))
    assert written[-1] == "COMMIT"
    commit, rename = did.index(("open", "COMMIT")), did.index(("rename", "step-00000002.tmp-a"))
    removed = did.index(("rename", "step-00000001"))
    folder, root = ("fsync", "step-00000002.tmp-a"), ("fsync", tmp_path.name)
    assert folder in did[:commit] and folder in did[commit:rename], "files, then the marker, then the name"
    assert did[rename + 1] == root and removed > rename + 1, "the new step is durable before an old one goes"
    assert root in did[removed : did.index(("unlink", "COMMIT"))], "un-committed before its files go"


def test_nothing_in_checkpoint_can_run_code_on_loading() -> None:
    sources = sorted(Path(files_module.__file__).parent.glob("*.py"))
    assert len(sources) > 5
    forbidden = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "yaml"}
    for source in sources:
        for node in ast.walk(ast.parse(source.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                modules = {alias.name for alias in node.names} | {getattr(node, "module", None) or ""}
                assert not {name.split(".")[0] for name in modules} & forbidden, source
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                assert (node.value.id, node.attr) not in {("torch", "load"), ("torch", "save"), ("np", "load")}, source
            if isinstance(node, ast.Name):
                assert node.id not in {"eval", "exec", "__import__"}, source


def test_a_missing_element_is_named() -> None:
    held = [[Held("w", (7,), "F32", 4, 0, 3)], [Held("w", (7,), "F32", 4, 4, 7)]]
    with pytest.raises(AssertionError, match=r"w: no rank holds elements \[3, 4\) of 7"):
        assign(held)


@given(st.data(), st.integers(1, 4), st.integers(1, 29))
def test_each_element_is_written_once_whatever_is_replicated(data: st.DataObject, world: int, size: int) -> None:
    held = []
    for rank in range(world):
        start = 0 if rank == 0 else data.draw(st.integers(0, size))
        stop = size if rank == 0 else data.draw(st.integers(start, size))
        held.append([Held("w", (size,), "F32", 4, start, stop)])
    count = [0] * size
    for rank, ranges in enumerate(assign(held)):
        for item in ranges:
            assert held[rank][0].start <= item.start < item.stop <= held[rank][0].stop
            for at in range(item.start, item.stop):
                count[at] += 1
    assert count == [1] * size


def test_replicas_share_the_writing() -> None:
    names = [f"blocks.{n}.w" for n in range(8)]
    plan = assign([[Held(name, (11,), "F32", 4, 0, 11) for name in names] for _ in range(4)])
    assert [len(ranges) for ranges in plan] == [2, 2, 2, 2]


def test_pieces_of_the_stand_in_are_uneven() -> None:
    sizes = {piece.tensor.numel() for rank in range(4) for piece in pieces_of(rank, 4) if "embed" in piece.name}
    assert len(sizes) > 1
