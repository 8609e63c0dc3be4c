"""Ranks as threads of one process: `save` needs a barrier and a file system, nothing of torch.distributed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch

from heptad.checkpoint.files import Files
from heptad.checkpoint.read import Reader
from heptad.checkpoint.save import Saved, save
from heptad.mesh.piece import Piece

T = TypeVar("T")

# Sizes are distinct primes, so no cut falls on a boundary; a scalar and an empty tensor are legal.
SHAPES = {
    "embed.tokens.weight": (13, 7),
    "blocks.0.mlp.up.weight": (11, 5),
    "exp_avg/blocks.0.mlp.up.weight": (11, 5),
    "head.norm.weight": (3,),
    "count": (),
    "nothing": (0, 17),
}


class Unsynced(Files):
    """Without fsync, which only a power cut needs: what a killed process wrote is in the system's cache."""

    def do(self, operation: str, path: Path, act: Callable[[], T]) -> T:
        return Files.do(self, operation, path, act if operation != "fsync" else lambda: None)  # type: ignore[arg-type, return-value]


def whole(name: str, step: int = 0) -> torch.Tensor:
    """Distinct values everywhere, so an error of order shows; the embedding in bf16."""
    shape = SHAPES[name]
    values = torch.arange(max(1, torch.Size(shape).numel()))[: torch.Size(shape).numel()] + 1000 * step
    return values.to(torch.bfloat16 if name.startswith("embed") else torch.float32)


def cut(num_elements: int, rank: int, world: int) -> tuple[int, int]:
    """Uneven: the first ranks hold more, the last may hold nothing."""
    size = -(-num_elements // world)
    return min(num_elements, rank * size), min(num_elements, (rank + 1) * size)


def pieces_of(rank: int, world: int, step: int = 0) -> list[Piece]:
    """Every tensor split over the ranks, but for the norm, which each rank holds whole."""
    pieces = []
    for name, shape in SHAPES.items():
        flat = whole(name, step)
        start, stop = (0, flat.numel()) if "norm" in name else cut(flat.numel(), rank, world)
        pieces.append(Piece(name, shape, start, stop, flat[start:stop].clone()))
    return pieces


def save_all(
    root: Path,
    step: int,
    world: int = 1,
    *,
    run: str = "a",
    keep: int = 100,
    files: Files | None = None,
    meta: Any = None,
) -> Saved:
    """All ranks save; what rank 0 got."""
    barrier = threading.Barrier(world)
    pieces = [pieces_of(rank, world, step) for rank in range(world)]  # before the threads: torch's pool races in a fork

    def wait() -> None:
        barrier.wait(20)

    def one(rank: int) -> Saved | None:
        try:
            disk = files or Unsynced()
            return save(root, step, pieces[rank], meta or {}, rank, world, wait, run=run, keep=keep, files=disk)
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(world) as pool:
        results = list(pool.map(one, range(world)))
    assert results[0] is not None and all(result is None for result in results[1:])
    return results[0]


def assert_holds(path: Path, step: int, world: int = 1) -> None:
    """Every rank of `world` finds exactly what was saved at `step`."""
    with Reader(path) as reader:
        assert reader.step == step
        reader.verify()
        reader.check(SHAPES)
        for rank in range(world):
            wanted = pieces_of(rank, world, step)
            found = [Piece(p.name, p.shape, p.start, p.stop, torch.full_like(p.tensor, -1)) for p in wanted]
            reader.load(found)
            for old, new in zip(wanted, found, strict=True):
                assert torch.equal(old.tensor, new.tensor), (old.name, rank)
