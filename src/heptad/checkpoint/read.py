"""Reading a checkpoint: any flat range of any tensor, from whatever pieces another layout wrote.

Files are memory-mapped and only the slices asked for are copied, so a rank's memory is its own pieces plus a block,
whatever the layout that saved (C-055, C-057). Sizes of all files are verified on opening; a tensor file's CRC-32 on its
first use, so each rank reads through only the files it needs. Nothing is unpickled: safetensors and JSON. Read next:
`find.py` (which checkpoint), `save.py` (how it came to be).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from heptad.checkpoint.files import BLOCK_BYTES, DTYPE_NAMES
from heptad.checkpoint.form import (
    COMMIT,
    INDEX,
    META,
    CheckpointError,
    Part,
    broken,
    parse_index,
    read_commit,
    read_json,
)
from heptad.errors import Problem
from heptad.mesh.piece import Piece

_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Skipped:
    """What a partial load leaves out: `missing` is wanted but not stored, `extra` stored but not wanted."""

    missing: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()


class Reader:
    """An open checkpoint. `step`, `run`; `meta`: what `save` was given; `shapes`: name -> global shape.

    Raises CheckpointError, which names the file, when the directory is not complete and undamaged.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        if not (self.path / COMMIT).exists():
            raise broken(self.path, "there is no COMMIT in it, so it is not a complete checkpoint")
        self._commit = read_commit(self.path)
        for name, (num_bytes, _) in self._commit.files.items():
            self._check_size(self.path / name, num_bytes)
        for name in (INDEX, META):
            if name not in self._commit.files:
                raise broken(self.path / COMMIT, f"does not list {name}")
            self._check_sum(name)
        self._index = parse_index(read_json(self.path / INDEX), self._commit, self.path / INDEX)
        self.step, self.run = self._commit.step, self._commit.run
        self.meta: dict[str, Any] = read_json(self.path / META)["meta"]
        self.shapes: Mapping[str, tuple[int, ...]] = {name: stored.shape for name, stored in self._index.items()}
        self._open: dict[str, Any] = {}

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Unmap the files; the reader can still be used and maps them again."""
        self._open.clear()

    def dtype(self, name: str) -> torch.dtype:
        """The dtype in which `name` is stored."""
        return _DTYPES[self._index[name].dtype]

    def verify(self) -> None:
        """Read every file and compare its CRC-32."""
        for name in self._commit.files:
            self._check_sum(name)

    def check(self, wanted: Mapping[str, tuple[int, ...]], partial: bool = False) -> Skipped:
        """Compare the stored tensors with those wanted (all of them, of all ranks): name -> global shape.

        Strict both ways: raises CheckpointError with each missing and each extra name and each shape that differs (with
        both shapes). `partial` allows missing and extra names and returns them for the user to see; shapes must agree.
        """
        skipped = Skipped(
            tuple(name for name in wanted if name not in self.shapes),
            tuple(name for name in self.shapes if name not in wanted),
        )
        differ = [name for name in wanted if name in self.shapes and tuple(wanted[name]) != self.shapes[name]]
        problems = [self._problem(_differs(name, self.shapes[name], wanted[name])) for name in differ[:_SHOWN]]
        if not partial:
            problems += [self._problem(f"{name} is not in the checkpoint") for name in skipped.missing[:_SHOWN]]
            problems += [self._problem(f"{name} is in the checkpoint only") for name in skipped.extra[:_SHOWN]]
            hidden = sum(max(0, len(names) - _SHOWN) for names in (differ, skipped.missing, skipped.extra))
        else:
            hidden = max(0, len(differ) - _SHOWN)
        if hidden:
            problems.append(self._problem(f"{hidden} more tensors"))
        if problems:
            raise CheckpointError(*problems)
        return skipped

    def load(self, pieces: Iterable[Piece], skipped: Skipped | None = None) -> None:
        """Fill this rank's `pieces` in place; those that `skipped.missing` names are left as they are."""
        missing = set(skipped.missing if skipped else ())
        for piece in pieces:
            if piece.name not in missing:
                self._same_shape(piece)
                self.fill(piece.name, piece.start, piece.stop, piece.tensor)

    def fill(self, name: str, start: int, stop: int, out: Tensor) -> None:
        """Copy elements [start, stop) of the flattened tensor `name` into `out` (1-D, any device).

        `out`'s dtype must hold every stored value exactly (fp32 into fp64, not into bf16): raises CheckpointError else,
        and for a name or a range that is not stored.
        """
        assert out.ndim == 1 and out.numel() == stop - start, (name, start, stop, out.shape)
        if name not in self._index:
            raise CheckpointError(self._problem(f"{name} is not in the checkpoint"))
        stored = self.dtype(name)
        if torch.promote_types(stored, out.dtype) != out.dtype:
            raise CheckpointError(self._problem(f"{name} is stored as {stored}, which {out.dtype} cannot hold exactly"))
        at = start
        while at < stop:
            part = next((part for part in self._index[name].parts if part.start <= at < part.stop), None)
            if part is None:
                raise broken(self.path / INDEX, f"element {at} of {name} is in no file")
            end = min(stop, part.stop)
            self._copy(part, at, end, out[at - start : end - start])
            at = end

    def _same_shape(self, piece: Piece) -> None:
        stored = self.shapes.get(piece.name, piece.shape)
        if stored != tuple(piece.shape):
            raise CheckpointError(self._problem(_differs(piece.name, stored, piece.shape)))

    def _copy(self, part: Part, start: int, stop: int, out: Tensor) -> None:
        step = BLOCK_BYTES // out.element_size()
        try:
            source = self._file(part.file).get_slice(part.key)
            for at in range(start, stop, step):
                end = min(stop, at + step)
                block = source[at - part.start : end - part.start]
                out[at - start : end - start].copy_(block)
        except (SafetensorError, RuntimeError) as error:
            raise broken(self.path / part.file, f"{part.key}: {error}") from error

    def _file(self, name: str) -> Any:
        if name not in self._open:
            self._check_sum(name)
            self._open[name] = safe_open(self.path / name, framework="pt")
        return self._open[name]

    def _check_size(self, path: Path, expected: int) -> None:
        try:
            found = path.stat().st_size
        except OSError as error:
            raise broken(path, f"{type(error).__name__}: {error.strerror}") from error
        if found != expected:
            raise broken(path, f"{found} bytes where {expected} were committed")

    def _check_sum(self, name: str) -> None:
        crc = 0
        try:
            with open(self.path / name, "rb", buffering=0) as source:
                while block := source.read(BLOCK_BYTES):
                    crc = zlib.crc32(block, crc)
        except OSError as error:
            raise broken(self.path / name, f"{type(error).__name__}: {error.strerror}") from error
        if crc != self._commit.files[name][1]:
            raise broken(self.path / name, "its checksum is not the committed one: the content was changed or damaged")

    def _problem(self, what: str) -> Problem:
        fix = "load it into the model that wrote it, or ask for a partial load"
        return Problem("checkpoint.dir", str(self.path), f"checkpoint and model must agree: {what}", fix)


def _differs(name: str, stored: tuple[int, ...], wanted: tuple[int, ...]) -> str:
    return f"{name} has shape {tuple(stored)} in the checkpoint and {tuple(wanted)} in the model"
