"""Token stores: one flat run of token ids, the ends of its documents, and which tokens may be targets.

On disk a store is a folder of raw little-endian files, memory-mapped when read, so a corpus may be larger than memory:
    tokens.bin     uint16 (vocabulary up to 65,536) or uint32, all documents one after another
    documents.bin  int64, end of each document (exclusive), rising; no document is empty
    targets.bin    one bit a token (numpy.packbits order): may it be a target? prompts have 0
    manifest.json  counts, vocabulary, and size and SHA-256 of each file; written last
`digest` is a hash of the content, not of names or times: equal corpora have equal digests on every node.
Read next: `cache.py` (who writes it), `pack.py` (how samples are cut from it).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from heptad.errors import ConfigError
from heptad.loader.order import Ints

FILES = ("tokens.bin", "documents.bin", "targets.bin")
VERSION = 1


@dataclass(frozen=True)
class Tokens:
    """`tokens` [T] unsigned ids, `ends` [D] int64 document ends, `targets` [ceil(T/8)] uint8 packed bits."""

    tokens: NDArray[Any]
    ends: NDArray[Any]
    targets: NDArray[Any]
    max_id: int
    digest: str

    @property
    def num_tokens(self) -> int:
        """Tokens in all documents, their end tokens included."""
        return len(self.tokens)

    @property
    def num_documents(self) -> int:
        """Documents; none is empty."""
        return len(self.ends)

    def ids(self, start: int, stop: int) -> Ints:
        """Token ids [stop - start], int64."""
        return self.tokens[start:stop].astype(np.int64)

    def may_be_target(self, start: int, stop: int) -> NDArray[np.bool_]:
        """Which tokens of [start, stop) may be targets, bool."""
        first = start // 8
        bits = np.unpackbits(self.targets[first : -(-stop // 8)])
        return bits[start - first * 8 : stop - first * 8].astype(np.bool_)

    @classmethod
    def from_arrays(cls, tokens: Ints, ends: Ints, targets: NDArray[np.bool_] | None = None) -> Tokens:
        """A store in memory: `tokens` [T] ids, `ends` [D] rising document ends, the last T, `targets` [T] or all."""
        assert len(tokens) == 0 or int(tokens.min()) >= 0
        assert np.all(np.diff(ends, prepend=0) > 0) and (int(ends[-1]) if len(ends) else 0) == len(tokens)
        bits = np.packbits(np.ones(len(tokens), dtype=np.bool_) if targets is None else targets)
        wide = tokens.astype(np.uint32)
        max_id = int(wide.max()) if len(wide) else -1
        parts = [wide.tobytes(), ends.astype(np.int64).tobytes(), bits.tobytes()]
        return cls(
            wide, ends.astype(np.int64), bits, max_id, _digest(hashlib.sha256(part).hexdigest() for part in parts)
        )

    @classmethod
    def open(cls, folder: Path) -> Tokens:
        """Map a store's files. Raises ConfigError naming the file that is missing or is not of the recorded size."""
        manifest = read_manifest(folder)
        arrays = []
        for name, dtype in zip(FILES, (manifest["dtype"], "<i8", "|u1"), strict=True):
            path, size = folder / name, manifest["files"][name]["num_bytes"]
            if not path.exists() or path.stat().st_size != size:
                raise damaged(path, f"{size} bytes, found {path.stat().st_size if path.exists() else 'no file'}")
            arrays.append(np.memmap(path, dtype=dtype, mode="r") if size else np.zeros(0, dtype=dtype))
        tokens, ends, targets = arrays
        return cls(tokens, ends, targets, manifest["max_id"], manifest["digest"])


def verify_files(folder: Path) -> None:
    """Read a store's files whole against their checksums. Raises ConfigError naming the file that differs."""
    for name, entry in read_manifest(folder)["files"].items():
        with (folder / name).open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != entry["sha256"]:
            raise damaged(folder / name, f"SHA-256 {entry['sha256'][:12]}…, found {found[:12]}…")


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a store. Raises ConfigError when it cannot be read."""
    path = folder / "manifest.json"
    try:
        manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise damaged(path, f"JSON ({error})") from error
    if manifest.get("version") != VERSION:
        raise damaged(path, f"version {VERSION}, found {manifest.get('version')}")
    return manifest


def damaged(path: Path, expected: str) -> ConfigError:
    """The error for a cache file that is not what its manifest says."""
    return ConfigError.of(
        "data.cache_dir", str(path), f"a file of the token cache is damaged: expected {expected}",
        f"delete {path.parent} and start again; it is rebuilt from the corpus",
    )  # fmt: skip


@dataclass
class StoreWriter:
    """Appends documents to a store's files; `close` writes the manifest. Holds one partial byte of bits, no tokens."""

    folder: Path
    vocab: int
    num_tokens: int = 0
    num_documents: int = 0
    _max_id: int = -1
    _bits: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, dtype=np.bool_))
    _files: dict[str, IO[bytes]] = field(default_factory=dict)
    _hashes: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True)
        self.dtype = np.dtype("<u2" if self.vocab <= 1 << 16 else "<u4")
        self._files = {name: (self.folder / name).open("wb") for name in FILES}
        self._hashes = {name: hashlib.sha256() for name in FILES}

    def add(self, ids: Ints, prompt_length: int = 0) -> None:
        """Append one document of token ids [n], n > 0, whose first `prompt_length` tokens are no targets.

        Raises ConfigError when an id lies outside the vocabulary.
        """
        assert len(ids) > 0
        high = int(ids.max())
        if high >= self.vocab or int(ids.min()) < 0:
            raise outside(sorted({int(i) for i in ids if i >= self.vocab or i < 0}), self.vocab)
        self._max_id = max(self._max_id, high)
        self.num_tokens += len(ids)
        self.num_documents += 1
        self._put("tokens.bin", ids.astype(self.dtype).tobytes())
        self._put("documents.bin", np.asarray([self.num_tokens], dtype="<i8").tobytes())
        bits = np.concatenate([self._bits, np.arange(len(ids)) >= prompt_length])
        whole = len(bits) // 8 * 8
        self._put("targets.bin", np.packbits(bits[:whole]).tobytes())
        self._bits = bits[whole:]

    def close(self, facts: dict[str, Any]) -> None:
        """Flush and fsync the files, then write the manifest with `facts` added."""
        self._put("targets.bin", np.packbits(self._bits).tobytes())
        files = {}
        for name, file in self._files.items():
            sync(file)
            files[name] = {"num_bytes": file.tell(), "sha256": self._hashes[name].hexdigest()}
            file.close()
        manifest = {
            "version": VERSION, "vocab": self.vocab, "dtype": self.dtype.str, "tokens": self.num_tokens,
            "documents": self.num_documents, "max_id": self._max_id, "files": files,
            "digest": _digest(entry["sha256"] for entry in files.values()), **facts,
        }  # fmt: skip
        with (self.folder / "manifest.json").open("w", encoding="utf-8") as text:
            json.dump(manifest, text, indent=1)
            sync(text)

    def abort(self) -> None:
        """Close the files as they are; the folder is the caller's to remove."""
        for file in self._files.values():
            file.close()

    def _put(self, name: str, data: bytes) -> None:
        self._files[name].write(data)
        self._hashes[name].update(data)


def outside(ids: list[int], vocab: int) -> ConfigError:
    """The error for token ids the model has no row for."""
    shown = ", ".join(map(str, ids[:5])) + (f" and {len(ids) - 5} more" if len(ids) > 5 else "")
    return ConfigError.of(
        "model.vocab", vocab, f"token ids lie in [0, {vocab}); the data holds {shown}",
        f"set model.vocab to at least {max(ids) + 1}, or use the tokenizer the data was made with",
    )  # fmt: skip


def sync(file: IO[Any]) -> None:
    """Flush a file to the disk itself, so that a rename cannot outlive its content."""
    file.flush()
    os.fsync(file.fileno())


def _digest(parts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
