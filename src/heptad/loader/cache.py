"""Folders that are complete or absent, built once per filesystem however many processes ask at once (C-134).

`built` returns <cache>/<name>/complete. A builder writes a sibling folder of its own, syncs it and renames it, so
readers see all of it or nothing, and two builders can only waste work: the second finds the name taken and drops its
copy.
To save that work, builders of one name queue on a lock of the folder's file descriptor. The kernel releases it with its
process, no file of it stays behind, and where a filesystem has no locks everybody simply builds.
What a killed builder left is removed by the next one on the same host.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from heptad.errors import ConfigError


def cache_folder(cache_dir: str | None) -> Path:
    """`data.cache_dir`, or .cache/heptad in the user's home. Creates nothing."""
    if cache_dir is not None:
        return Path(cache_dir).expanduser()
    try:
        return Path.home() / ".cache" / "heptad"
    except RuntimeError as error:
        raise unwritable("the user's home folder", error) from error


def built(cache: Path, name: str, build: Callable[[Path], None]) -> Path:
    """The complete folder `name` of the cache, made by `build(empty folder)` if it is not there.

    Raises ConfigError when the cache cannot be written; what `build` raises passes through and leaves nothing behind.
    """
    complete = cache / name / "complete"
    try:
        if not complete.is_dir():
            complete.parent.mkdir(parents=True, exist_ok=True)
            with _queue(complete.parent) as alone:
                if not complete.is_dir():
                    _build(complete, build, alone)
    except OSError as error:
        raise unwritable(str(cache), error) from error
    return complete


def _build(complete: Path, build: Callable[[Path], None], alone: bool) -> None:
    """Build beside `complete`, then take its name. `alone`: what other builders of this host left is dead."""
    if alone:
        for left in complete.parent.glob(f"{_prefix()}*"):
            shutil.rmtree(left, ignore_errors=True)
    own = complete.parent / f"{_prefix()}{os.getpid()}-{uuid.uuid4().hex[:8]}"
    own.mkdir()
    try:
        build(own)
        _sync_folder(own)
        _take_name(own, complete)
        _sync_folder(complete.parent)
    finally:
        shutil.rmtree(own, ignore_errors=True)


def unwritable(path: str, error: Exception) -> ConfigError:
    """The error for a cache that cannot be written."""
    return ConfigError.of(
        "data.cache_dir", path, f"the tokenised corpus is kept here, so it must be a writable folder ({error})",
        "set data.cache_dir to a writable folder with enough space",
    )  # fmt: skip


def _prefix() -> str:
    return f"building-{socket.gethostname()}-"


def _take_name(own: Path, complete: Path) -> None:
    """Rename, unless another builder was first: same content, since the name is a fingerprint of the input."""
    try:
        own.rename(complete)
    except OSError:
        if not complete.is_dir():
            raise


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _queue(folder: Path) -> Iterator[bool]:
    """Hold the folder's lock, waiting for a live holder; yields False where the filesystem has no locks."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            alone = True
        except OSError:
            alone = False
        yield alone
    finally:
        os.close(descriptor)
