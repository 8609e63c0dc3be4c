"""Bytes of live storages, not RSS: what a program holds, whatever the allocator and the system do with it.

A dispatch mode sees every tensor an operator reads or makes and remembers its *storage* by a weak reference, so that
watching keeps nothing alive. Storages are resized in place (a dropped bucket is one of zero bytes), so whenever an
operator made a new one all of them are asked for their size again: O(live storages), for tests and `verify`, not
training. What an operator frees before it returns is not seen. Two tensors over one storage count once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
                del self._storages[key]
            elif storage.device.type != "meta":
                total += storage.nbytes()
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
        new = [tensor for tensor in tensors if self._see(tensor)]
        if new:
            self.sample()
        return out

    def _see(self, tensor: Tensor) -> bool:
        """Watch the tensor's storage; whether it is a new one."""
        try:
            storage = tensor.untyped_storage()
        except NotImplementedError:  # a tensor without one (sparse, wrapper): its parts are seen on their own
            return False
        ref = StorageWeakRef(storage)
        return self._storages.setdefault(ref.cdata, ref) is ref
