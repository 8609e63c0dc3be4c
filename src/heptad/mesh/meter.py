"""Bytes of live storages, not RSS: what a program holds, whatever the allocator and the system do with it.

A dispatch mode sees every tensor an operator reads or makes and remembers its *storage* by a weak reference, so that
watching keeps nothing alive. Storages are resized in place (a dropped bucket is one of zero bytes), so whenever an
operator made a new one, or met one of another size than before, all of them are asked for their size again: O(live
storages), for tests, `verify` and benchmarks, not training; never measured together with speed. Not seen: what an
operator frees before it returns, and what a library holds outside of torch's operators, such as gloo's copies. Two
tensors over one storage count once; of a DTensor its part here counts. Beside the ledger, which counts what is sent.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class MemoryMeter(TorchDispatchMode):
    """`with meter:` as often as wanted; storages seen once stay watched. Bytes of all devices together."""

    def __init__(self, watch: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self._storages: dict[int, StorageWeakRef] = {}
        self._sizes: dict[int, int] = {}  # when they were last asked for
        self.peak_bytes = 0
        for tensor in watch:
            self._see(tensor)
        self.sample()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: guarding this mode against torch's compiler would load the compiler, seconds on each rank."""
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """True: compiled code runs as it is under this mode, which sees what goes in and comes out."""
        return True

    def current_bytes(self) -> int:
        """Bytes of the watched storages that are alive now, at their size of now."""
        total = 0
        for key, ref in list(self._storages.items()):
            storage: Any = torch.UntypedStorage._new_with_weak_ptr(ref.cdata)
            if storage is None:
                del self._storages[key], self._sizes[key]
            else:
                self._sizes[key] = storage.nbytes()
                total += self._sizes[key] if storage.device.type != "meta" else 0
        return total

    def sample(self) -> int:
        """Current bytes, counted into the peak: for a change no operator made (a resize by hand)."""
        now = self.current_bytes()
        self.peak_bytes = max(self.peak_bytes, now)
        return now

    def reset_peak(self) -> None:
        """The peak starts again at the current bytes."""
        self.peak_bytes = self.current_bytes()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run, then look."""
        out = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, Tensor)]
        changed = [tensor for tensor in tensors if self._see(tensor)]
        if changed:
            self.sample()
        return out

    def _see(self, tensor: Tensor) -> bool:
        """Watch the tensor's storage; whether it is a new one, or of a new size."""
        try:
            storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
        except (NotImplementedError, RuntimeError):  # a tensor without one (sparse, wrapper): its parts are seen alone
            return False
        ref, num_bytes = StorageWeakRef(storage), storage.nbytes()
        new = self._storages.setdefault(ref.cdata, ref) is ref
        before, self._sizes[ref.cdata] = self._sizes.get(ref.cdata), num_bytes
        return new or before != num_bytes


def everything_alive() -> Iterator[Tensor]:
    """Every tensor that Python holds, but those without memory: what a meter watches to count a process whole."""
    for thing in gc.get_objects():
        if issubclass(type(thing), Tensor) and thing.device.type != "meta":
            yield thing
