"""The one seam through which a checkpoint reaches the disk: seven operations, each a point where a job can be killed.

Every write goes through `Files.do`, so a test can count the operations and kill the process before, inside or after
any of them (C-061, C-062, C-070). A file is written, then fsynced, then closed; its size and CRC-32 come from the
bytes as they are handed to the system. Tensors are streamed, so saving needs one block of memory beside what is saved.
Read next: `save.py` (in which order), `read.py` (the way back).
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import torch
from torch import Tensor

BLOCK_BYTES = 8_000_000
T = TypeVar("T")

# Names of the safetensors format (https://github.com/huggingface/safetensors, "Format").
DTYPE_NAMES: Mapping[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True, slots=True)
class Written:
    """What the commit marker says of a file: size in bytes and CRC-32 of its content."""

    num_bytes: int
    crc32: int


class Files:
    """Disk operations of a save. `do` runs each of them; a test's subclass may kill the process there."""

    def do(self, operation: str, path: Path, act: Callable[[], T]) -> T:
        """Run one operation ("mkdir", "open", "write", "fsync", "rename", "unlink", "rmdir") on `path`."""
        return act()

    def make_dir(self, path: Path) -> None:
        """Create a directory (and its parents); an existing one is fine."""
        self.do("mkdir", path, lambda: path.mkdir(parents=True, exist_ok=True))

    def write(self, path: Path, blocks: Iterable[bytes | memoryview]) -> Written:
        """Write a new file of `blocks` and fsync it."""
        num_bytes = crc32 = 0
        with self.do("open", path, lambda: open(path, "wb", buffering=0)) as out:
            for block in blocks:
                self.do("write", path, lambda block=block, out=out: _write_all(out, block))  # type: ignore[misc]
                num_bytes, crc32 = num_bytes + len(block), zlib.crc32(block, crc32)
            self.do("fsync", path, lambda: os.fsync(out.fileno()))
        return Written(num_bytes, crc32)

    def write_json(self, path: Path, value: Any) -> Written:
        """Write `value` as JSON with sorted keys: equal values give equal files."""
        return self.write(path, [json.dumps(value, sort_keys=True, indent=1).encode()])

    def sync_dir(self, path: Path) -> None:
        """Make the entries of a directory durable."""
        self.do("fsync", path, lambda: _fsync_dir(path))

    def rename(self, source: Path, target: Path) -> None:
        """Atomic on one file system."""
        self.do("rename", source, lambda: os.rename(source, target))

    def remove(self, path: Path) -> None:
        """Delete a file."""
        self.do("unlink", path, path.unlink)

    def remove_tree(self, path: Path) -> None:
        """Delete a directory of files, one file at a time."""
        for child in sorted(path.iterdir()):
            if child.is_dir():
                self.remove_tree(child)
            else:
                self.remove(child)
        self.do("rmdir", path, path.rmdir)


def safetensors_blocks(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """A safetensors file of 1-D `tensors` in blocks of at most `BLOCK_BYTES`, one at a time off the device."""
    header: dict[str, Any] = {}
    end = 0
    for key, tensor in tensors.items():
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[key] = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": [tensor.numel()], "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for tensor in tensors.values():
        step = BLOCK_BYTES // tensor.element_size()
        for start in range(0, tensor.numel(), step):
            block = tensor.detach()[start : start + step].to("cpu", copy=False).contiguous()
            yield memoryview(block.view(torch.uint8).numpy())  # type: ignore[arg-type]


def _write_all(out: BinaryIO, block: bytes | memoryview) -> None:
    rest = memoryview(block)
    while rest:
        rest = rest[out.write(rest) :]


def _fsync_dir(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
