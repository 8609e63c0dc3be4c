"""Saving: a step's directory is complete or absent, at whatever moment the job is killed.

Five phases, a barrier after each: rank 0 clears what a killed save of this run left and makes `step-….tmp-RUN`; every
rank announces what it holds; rank 0 decides who writes what (`plan.py`); every rank writes and fsyncs its file; rank 0
writes index, meta and, last, COMMIT, fsyncs the directory and renames it to its final name. Only then are older steps
pruned (C-070): a step is un-committed by a rename before its first file goes (C-062). Steps of other runs are never
touched (C-071). The barrier is the caller's, so waiting for a slow disk has its own time limit, not the training
collectives'.

Costs: one write of every element, one block of memory. Read next: `read.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

import heptad
from heptad.checkpoint.files import DTYPE_NAMES, Files, Written, safetensors_blocks
from heptad.checkpoint.find import scan
from heptad.checkpoint.form import COMMIT, FORMAT, INDEX, META, check_run, dir_name, rank_file, read_json
from heptad.checkpoint.plan import Held, Range, assign
from heptad.mesh.piece import Piece

PLAN = "plan.json"


@dataclass(frozen=True, slots=True)
class Saved:
    """What rank 0 did: the new checkpoint, what pruning removed, and lines for the user (foreign steps)."""

    path: Path
    removed: tuple[Path, ...]
    notes: tuple[str, ...]


def save(
    root: Path | str,
    step: int,
    pieces: Sequence[Piece],
    meta: Mapping[str, Any],
    rank: int,
    world: int,
    barrier: Callable[[], None],
    *,
    run: str,
    keep: int,
    files: Files | None = None,
) -> Saved | None:
    """Write `pieces` of all ranks as the checkpoint of `step`; returns on every rank once it is committed and pruned.

    Every rank calls it with its own `pieces` (replicas are fine: each element is written once) and the same other
    arguments. `meta`: values JSON can hold. `keep` >= 1: how many steps of `run` stay. Result on rank 0, None
    elsewhere. Raises OSError when the disk does; what was there before stays loadable.
    """
    assert keep >= 1, keep
    check_run(run)
    root, files = Path(root), files or Files()
    aside = root / f"{dir_name(step)}.tmp-{run}"
    if rank == 0:
        _start(root, aside, run, files)
    barrier()
    files.write_json(aside / _note("have", rank), {"pieces": [asdict(_held(piece)) for piece in pieces]})
    barrier()
    if rank == 0:
        _write_plan(aside, world, files)
    barrier()
    _write_rank(aside, pieces, rank, world, files)
    barrier()
    saved = None
    if rank == 0:
        path = _commit(root, aside, step, run, world, meta, files)
        removed, notes = prune(root, run, step, keep, files)
        saved = Saved(path, removed, notes)
    barrier()
    return saved


def prune(root: Path, run: str, step: int, keep: int, files: Files) -> tuple[tuple[Path, ...], tuple[str, ...]]:
    """Remove all but the newest `keep` committed steps of `run` up to `step`; returns what was removed, and notes.

    Later steps of the same run belong to a past that was resumed from an earlier step: set aside, not deleted.
    """
    found = scan(root)
    mine = [entry for entry in found.entries if entry.problem is None and entry.run == run]
    foreign = [entry for entry in found.entries if entry.problem is not None or entry.run != run]
    notes = [f"left alone: {entry.path.name} of {entry.run or 'a run that cannot be read'}" for entry in foreign]
    for entry in (entry for entry in mine if entry.step > step):
        files.rename(entry.path, root / f"{entry.path.name}.aside-{run}")
        notes.append(
            f"set aside: {entry.path.name}, a step later than the one just saved, as {entry.path.name}.aside-{run}"
        )
    newest = {entry.step: entry for entry in mine if entry.step <= step}  # the last of a step is its newest
    kept = {newest[number].path for number in sorted(newest)[-keep:]}
    removed = [entry.path for entry in mine if entry.step <= step and entry.path not in kept]
    gone = [root / f"{path.name}.gone-{run}" for path in removed]
    for path, target in zip(removed, gone, strict=True):
        files.rename(path, target)
    if removed:
        files.sync_dir(root)
    for target in gone:
        files.remove_tree(target)
    return tuple(removed), tuple(notes)


def _start(root: Path, aside: Path, run: str, files: Files) -> None:
    files.make_dir(root)
    for path, owner in scan(root).leftovers:
        if owner == run:
            files.remove_tree(path)
    files.make_dir(aside)


def _note(what: str, rank: int) -> str:
    return f"{what}-{rank:05d}.json"


def _held(piece: Piece) -> Held:
    tensor = piece.tensor
    dtype = DTYPE_NAMES[tensor.dtype]
    return Held(piece.name, tuple(piece.shape), dtype, tensor.element_size(), piece.start, piece.stop)


def _announced(aside: Path, world: int) -> list[list[Held]]:
    notes = [read_json(aside / _note("have", rank))["pieces"] for rank in range(world)]
    return [[Held(**{**item, "shape": tuple(item["shape"])}) for item in items] for items in notes]


def _write_plan(aside: Path, world: int, files: Files) -> None:
    plan = assign(_announced(aside, world))
    files.write_json(aside / PLAN, {"ranks": [[asdict(item) for item in ranges] for ranges in plan]})


def _read_plan(aside: Path) -> list[list[Range]]:
    return [[Range(**item) for item in ranges] for ranges in read_json(aside / PLAN)["ranks"]]


def _write_rank(aside: Path, pieces: Sequence[Piece], rank: int, world: int, files: Files) -> None:
    tensors = {f"{item.name}@{item.start}": _cut(pieces, item) for item in _read_plan(aside)[rank]}
    written = files.write(aside / rank_file(rank, world), safetensors_blocks(tensors))
    files.write_json(aside / _note("wrote", rank), asdict(written))


def _cut(pieces: Sequence[Piece], item: Range) -> Tensor:
    for piece in pieces:
        if piece.name == item.name and piece.start <= item.start and item.stop <= piece.stop:
            return piece.tensor[item.start - piece.start : item.stop - piece.start]
    raise AssertionError(f"no single piece of this rank holds {item}")


def _index(aside: Path, world: int) -> dict[str, Any]:
    tensors: dict[str, Any] = {}
    for items in _announced(aside, world):
        for held in items:
            tensors.setdefault(held.name, {"shape": list(held.shape), "dtype": held.dtype, "parts": []})
    for rank, ranges in enumerate(_read_plan(aside)):
        for item in ranges:
            part = [rank_file(rank, world), f"{item.name}@{item.start}", item.start, item.stop]
            tensors[item.name]["parts"].append(part)
    for entry in tensors.values():
        entry["parts"].sort(key=lambda part: part[2])
    return {"tensors": tensors}


def _commit(root: Path, aside: Path, step: int, run: str, world: int, meta: Mapping[str, Any], files: Files) -> Path:
    written = {rank_file(rank, world): Written(**read_json(aside / _note("wrote", rank))) for rank in range(world)}
    written[INDEX] = files.write_json(aside / INDEX, _index(aside, world))
    facts = {"step": step, "run": run, "world": world, "heptad": heptad.__version__, "meta": dict(meta)}
    written[META] = files.write_json(aside / META, facts)
    for name in [PLAN, *(_note(what, rank) for what in ("have", "wrote") for rank in range(world))]:
        files.remove(aside / name)
    files.sync_dir(aside)
    sizes = {name: [item.num_bytes, item.crc32] for name, item in written.items()}
    files.write_json(aside / COMMIT, {"format": FORMAT, "step": step, "run": run, "files": sizes})
    files.sync_dir(aside)
    names = (root / dir_name(step, ordinal) for ordinal in itertools.count(1))
    path = next(name for name in names if not name.exists())
    files.rename(aside, path)
    files.sync_dir(root)
    return path
