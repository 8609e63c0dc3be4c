"""Which checkpoints a folder holds, and which one a run goes on from.

Newest means the highest step in the commit marker (C-069), of this run only (C-071). Nothing is guessed: a folder
without checkpoints of this run is a fresh start and said to be one, a newest checkpoint that cannot be read is an
error (C-074).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from heptad.checkpoint.form import COMMIT, CheckpointError, check_run, leftover_of, ordinal_of, read_commit
from heptad.checkpoint.read import Reader
from heptad.errors import Problem


@dataclass(frozen=True, slots=True)
class Entry:
    """A committed checkpoint; `problem` when its marker cannot be read (then `step` is -1 and `run` empty)."""

    path: Path
    step: int
    run: str
    ordinal: int
    problem: CheckpointError | None = None


@dataclass(frozen=True, slots=True)
class Scan:
    """`entries` by (step, ordinal); `leftovers`: (path, run) of saves and deletions that were cut short."""

    entries: tuple[Entry, ...]
    leftovers: tuple[tuple[Path, str], ...]

    def of_run(self, run: str | None) -> list[Entry]:
        """Entries of `run` (None: of any), oldest first; raises the problem of a marker that cannot be read."""
        for entry in self.entries:
            if entry.problem is not None:
                raise entry.problem
        return [entry for entry in self.entries if run is None or entry.run == run]


@dataclass(frozen=True, slots=True)
class Resume:
    """`reader`: the checkpoint to go on from, None for a fresh start; `notes`: what to tell the user, a line each."""

    reader: Reader | None
    notes: tuple[str, ...]


def scan(root: Path) -> Scan:
    """Read the names and commit markers in `root` (which need not exist)."""
    entries, leftovers = [], []
    for path in sorted(root.iterdir()) if root.is_dir() else []:
        run, ordinal = leftover_of(path.name), ordinal_of(path.name)
        if run is not None:
            leftovers.append((path, run))
        elif ordinal is not None and (path / COMMIT).exists():
            try:
                commit = read_commit(path)
                entries.append(Entry(path, commit.step, commit.run, ordinal))
            except CheckpointError as error:
                entries.append(Entry(path, -1, "", ordinal, error))
    return Scan(tuple(sorted(entries, key=lambda entry: (entry.step, entry.ordinal))), tuple(leftovers))


def resume(root: Path | str, run: str, mode: Literal["auto", "must", "never"]) -> Resume:
    """What `checkpoint.resume` asks for.

    never: fresh. auto: the newest committed step of `run`, fresh when there is none. must: the same, an error when
    there is none. Raises CheckpointError when a checkpoint is there but cannot be read: a run never starts afresh by
    accident.
    """
    check_run(run)
    root = Path(root)
    if mode == "never":
        return Resume(None, ('fresh start: checkpoint.resume = "never"',))
    found = scan(root)
    mine = found.of_run(run)
    notes = [f"ignored {path.name}: cut short while it was written or deleted" for path, _ in found.leftovers]
    others = sorted({entry.run for entry in found.entries} - {run})
    if others:
        notes.append(f"{root} also holds checkpoints of {', '.join(others)}: left alone")
    if mine:
        reader = Reader(mine[-1].path)
        return Resume(reader, (f"resuming from step {mine[-1].step}: {mine[-1].path}", *notes))
    if mode == "must":
        rule = f'must hold a complete checkpoint of run {run!r} (resume = "must"); it holds {others or "none at all"}'
        fix = 'give the folder that holds one, or resume = "auto" to start afresh'
        raise CheckpointError(Problem("checkpoint.dir", str(root), rule, fix))
    return Resume(None, (f"fresh start: no checkpoint of run {run!r} in {root}", *notes))
