"""Peak bytes of live tensor storages in a stretch of code: what a step really holds, not what the allocator keeps.

A dispatch mode sees every operator's tensors, also inside the backward, and keeps a weak reference to each storage.
After every operator it sums the sizes of those still alive (storages are resized in place by sharded engines, so
sizes are read anew). Not seen: buffers a library makes outside torch's operators, such as gloo's staging copies.
Costs time: never measured together with speed.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WeakStorage = Any


class Meter(TorchDispatchMode):
    """`peak_bytes`: the most bytes alive after any operator since it was entered; what lives on entry counts too."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, WeakStorage] = {}
        self.peak_bytes = 0

    def __enter__(self) -> Meter:
        for thing in gc.get_objects():
            if issubclass(type(thing), Tensor) and thing.device.type != "meta":
                self._see(thing)
        self.sample()
        super().__enter__()
        return self

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run, note the storages, add up what is alive."""
        result = func(*args, **(kwargs or {}))
        for leaf in (*tree_leaves(args), *tree_leaves(result)):
            if isinstance(leaf, Tensor):
                self._see(leaf)
        self.sample()
        return result

    def _see(self, tensor: Tensor) -> None:
        local = getattr(tensor, "_local_tensor", tensor)  # a DTensor wraps what it holds
        try:
            storage = local.untyped_storage()
        except (NotImplementedError, RuntimeError):  # wrappers without storage of their own
            return
        key = storage._cdata
        if key not in self._storages:
            self._storages[key] = torch.multiprocessing.reductions.StorageWeakRef(storage)

    def sample(self) -> int:
        """Bytes alive now."""
        alive = 0
        for key, reference in list(self._storages.items()):
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is None:
                del self._storages[key]
            else:
                alive += storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, alive)
        return alive
