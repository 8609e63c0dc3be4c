"""What a checkpoint directory is called and what its three JSON files say; no tensors here.

    root/step-00000012/rank-00000-of-00004.safetensors   1-D tensors, key "<name>@<start>"
                       index.json    for each tensor: shape, dtype, parts (file, key, start, stop)
                       meta.json     what the training loop needs to go on
                       COMMIT        step, run, size and CRC-32 of every file; written last

A directory of that name with a COMMIT is a checkpoint; everything else is not. Names beside it, all ignored by readers:
`step-….tmp-RUN` (being written), `step-….gone-RUN` (being deleted), `step-….aside-RUN` (a later step of a run that was
resumed from an earlier one; kept for its owner). A second checkpoint of the same step is `step-00000012-2`. The step
comes from COMMIT, never from a directory's name (C-069).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heptad.errors import ConfigError, Problem

FORMAT = 2
"""2: weights whose input features are cut (`ParamSpec.input_first`) lie (in, out). In 1 they lay (out, in)."""

COMMIT, INDEX, META = "COMMIT", "index.json", "meta.json"
_COMMITTED = re.compile(r"step-\d{8,}(?:-(\d+))?")
_LEFTOVER = re.compile(r"step-\d{8,}(?:-\d+)?\.(?:tmp|gone)-(.+)")
_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class CheckpointError(ConfigError):
    """A checkpoint that cannot be used as asked: unreadable, damaged, or of another model."""


@dataclass(frozen=True, slots=True)
class Part:
    """Flat range [start, stop) of a tensor: key `key` of `file`."""

    file: str
    key: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of the index: global shape, safetensors' name of the dtype, parts in order of `start`."""

    shape: tuple[int, ...]
    dtype: str
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Commit:
    """The marker. `files`: name -> (bytes, CRC-32)."""

    step: int
    run: str
    files: Mapping[str, tuple[int, int]]


def check_run(run: str) -> None:
    """A run's name becomes part of file names: letters, digits, '.', '_', '-'."""
    if not _RUN.fullmatch(run):
        rule = "a run's name has letters, digits, '.', '_' and '-' only"
        raise CheckpointError(Problem("log.name", run, rule, "rename it"))


def dir_name(step: int, ordinal: int = 1) -> str:
    """`step-00000012`; the second checkpoint of that step in a folder is `step-00000012-2`."""
    return f"step-{step:08d}" + (f"-{ordinal}" if ordinal > 1 else "")


def ordinal_of(name: str) -> int | None:
    """1, 2, … for the name of a committed directory; None for any other name."""
    match = _COMMITTED.fullmatch(name)
    return None if match is None else int(match[1] or 1)


def leftover_of(name: str) -> str | None:
    """The run whose unfinished save or deletion a directory of this name is, if it is one."""
    match = _LEFTOVER.fullmatch(name)
    return None if match is None else match[1]


def rank_file(rank: int, world: int) -> str:
    """The file that `rank` writes its tensors to."""
    return f"rank-{rank:05d}-of-{world:05d}.safetensors"


def broken(path: Path, what: str) -> CheckpointError:
    """The one form in which damage is reported: which file, what is wrong, what to do."""
    rule = f"a checkpoint must be readable: {what}"
    fix = 'move that step away (the one before it is used then), or start afresh with checkpoint.resume = "never"'
    return CheckpointError(Problem("checkpoint.dir", str(path), rule, fix))


def read_commit(path: Path) -> Commit:
    """Parse `path`/COMMIT. Raises CheckpointError naming the file."""
    raw = read_json(path / COMMIT)
    try:
        files = {str(name): (int(size), int(crc)) for name, (size, crc) in raw["files"].items()}
        commit = Commit(int(raw["step"]), str(raw["run"]), files)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise broken(path / COMMIT, f"not a commit marker ({type(error).__name__}: {error})") from error
    if raw.get("format") != FORMAT:
        raise _other_format(path / COMMIT, raw.get("format"))
    for name in files:
        if Path(name).name != name:
            raise broken(path / COMMIT, f"{name!r} is not a plain file name")
    return commit


def _other_format(path: Path, found: object) -> CheckpointError:
    """Square matrices of format 1 would load transposed without a sign of it: refused whatever the shapes."""
    if found == 1:
        rule = f"format 1 keeps attention.out and mlp.down output first, format {FORMAT}, which this version reads, not"
        fix = 'go on with the version that wrote it, or start afresh with checkpoint.resume = "never"'
        return CheckpointError(Problem("checkpoint.dir", str(path), rule, fix))
    return broken(path, f"format {found!r} is not {FORMAT}, the one this version reads")


def read_json(path: Path) -> dict[str, Any]:
    """An object in a JSON file. Raises CheckpointError naming the file."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise broken(path, f"{type(error).__name__}: {error}") from error
    if not isinstance(value, dict):
        raise broken(path, "not a JSON object")
    return value


def parse_index(raw: Mapping[str, Any], commit: Commit, path: Path) -> dict[str, Stored]:
    """index.json as values; every part must lie in a file that the commit marker lists."""
    index = {}
    try:
        for name, entry in raw["tensors"].items():
            parts = tuple(Part(str(f), str(key), int(a), int(b)) for f, key, a, b in entry["parts"])
            index[name] = Stored(tuple(int(n) for n in entry["shape"]), str(entry["dtype"]), parts)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise broken(path, f"not an index ({type(error).__name__}: {error})") from error
    unknown = {part.file for stored in index.values() for part in stored.parts} - set(commit.files)
    if unknown:
        raise broken(path, f"names files that were not committed: {sorted(unknown)}")
    return index
