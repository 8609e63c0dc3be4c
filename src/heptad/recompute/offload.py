"""Activation offload: what a unit keeps for its backward moves to the host's memory and comes back before it is read.

Nothing is cut and no rank sends anything: the moves are actions of the program (O and o out, P and p back), placed by
`schedule/lower.py`, proven by `schedule/check.py`. What moves is every storage the unit's graph saved, seen by torch's
saved-tensor hooks and counted once whichever views of it were saved; of a recomputed segment, the input that is kept.
What is alive anyway stays: parameters (their buckets free them), the batch, tables that blocks share (rotary, mask).

Cost: each byte crosses the host link twice a micro-batch. On CUDA a side stream copies to and from pinned memory while
the main one computes; both wait for each other by events, never the host. On a CPU the same code copies into other
host memory: it saves nothing there, and proves that bits and bytes are right.
Read next: `policy.py`, `schedule/executor.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from heptad.models.attention import MaskBias
from heptad.models.batch import Batch
from heptad.models.build import Model
from heptad.models.rotary import Rotary
from heptad.models.taps import Tape
from heptad.schedule.action import Action, Kind

Key = tuple[int, int]
"""Unit and micro-batch."""


@dataclass(slots=True)
class _Parcel:
    """The bytes of one storage, as uint8 [nbytes]: on the device, on the host, or both while they are on the way."""

    device: Tensor | None
    host: Tensor | None = None


@dataclass(frozen=True, slots=True)
class _Packed:
    """A saved tensor: where its bytes are, and how it reads them."""

    parcel: _Parcel
    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]
    offset: int

    def tensor(self) -> Tensor:
        """The tensor again, over the bytes on the device."""
        device = self.parcel.device
        assert device is not None, "read while it is on the host"
        empty = torch.empty(0, dtype=self.dtype, device=device.device)
        return empty.set_(device.untyped_storage(), self.offset, self.shape, self.strides)


@dataclass(slots=True)
class _Kept:
    """What one key keeps: parcels by storage; the unit's input, a leaf that must not hold its bytes either; and what
    taps hold for W (a backward in two parts), which autograd does not see. `stays`: storages that are not moved."""

    stays: set[int]
    leaf: Tensor | None = None
    home: _Packed | None = None  # of the leaf, where its bytes are in a parcel
    parcels: dict[int, _Parcel] = field(default_factory=dict)
    tape: Tape | None = None
    taped: list[tuple[Tensor | _Packed, ...]] = field(default_factory=list)
    done: torch.cuda.Event | None = None  # of the copies last started


class Mover:
    """Moves of one rank. `bytes_out` and `bytes_back`: moved since the last `reset`; `bytes_away`: on the host now."""

    def __init__(self, model: Model, device: torch.device) -> None:
        self.device = device
        self.bytes_out = self.bytes_back = self.bytes_away = 0
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._params = _storages(model.params.values())
        names = ("rotary", "mask_bias")
        found = (getattr(module, name, None) for module in model.module.modules() for name in names)
        self._shared = list({id(item): item for item in found if isinstance(item, Rotary | MaskBias)}.values())
        self._kept: dict[Key, _Kept] = {}

    def reset(self) -> None:
        """Count from nothing again."""
        self.bytes_out = self.bytes_back = 0

    def packing(self, key: Key, inputs: Tensor | None, batch: Batch) -> AbstractContextManager[object]:
        """See `schedule.compute.Mover`."""
        kept = self._begin(key, inputs, batch)

        def pack(tensor: Tensor) -> Tensor | _Packed:
            return self._pack(tensor, kept)

        return saved_tensors_hooks(pack, _unpack)

    def stow(self, key: Key, tape: Tape) -> None:
        """See `schedule.compute.Mover`."""
        kept = self._kept[key]
        kept.tape = tape
        kept.taped = [tuple(self._pack(tensor, kept) for tensor in saved) for _, saved, _ in tape.taps]
        tape.taps = [(module, (), probes) for module, _, probes in tape.taps]

    def keep(self, key: Key, inputs: Tensor, batch: Batch) -> None:
        """See `schedule.compute.Mover`."""
        kept = self._begin(key, inputs, batch)
        if isinstance(self._pack(inputs, kept), Tensor):
            kept.leaf = None  # its bytes stay, and so does it

    def forget(self, key: Key) -> None:
        """See `schedule.compute.Mover`."""
        kept = self._kept.pop(key)
        if kept.tape is not None:
            taps = zip(kept.tape.taps, kept.taped, strict=True)
            kept.tape.taps = [(module, tuple(map(_unpack, saved)), probes) for (module, _, probes), saved in taps]

    def act(self, action: Action) -> None:
        """See `schedule.compute.Mover`."""
        kept = self._kept[action.index, action.microbatch]
        match action.kind:
            case Kind.OUT:
                self._start_out(kept)
            case Kind.WAIT_OUT:
                self._wait_out(kept)
            case Kind.FETCH:
                self._start_fetch(kept)
            case Kind.WAIT_FETCH:
                self._wait_fetch(kept)

    def _begin(self, key: Key, inputs: Tensor | None, batch: Batch) -> _Kept:
        self._kept[key] = _Kept(self._params | _storages(_tensors(batch)), inputs)
        return self._kept[key]

    def _pack(self, tensor: Tensor, kept: _Kept) -> Tensor | _Packed:
        """The parcel of a tensor's bytes and how it reads them; the tensor itself where they are not moved."""
        if tensor.layout != torch.strided or tensor.device.type != self.device.type or tensor.is_conj():
            return tensor
        storage = tensor.untyped_storage()
        if not storage.nbytes() or storage._cdata in kept.stays or storage._cdata in self._tables():
            return tensor
        parcel = kept.parcels.get(storage._cdata)
        if parcel is None:
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            parcel = kept.parcels[storage._cdata] = _Parcel(whole)
        return _packed(parcel, tensor)

    def _tables(self) -> set[int]:
        return _storages(table for item in self._shared for table in item.kept())

    def _start_out(self, kept: _Kept) -> None:
        pinned = self._side is not None
        for parcel in kept.parcels.values():
            assert parcel.device is not None
            parcel.host = torch.empty(parcel.device.numel(), dtype=torch.uint8, pin_memory=pinned)
            self.bytes_out += parcel.host.numel()
        if kept.leaf is not None:
            held = kept.parcels.get(kept.leaf.untyped_storage()._cdata)
            kept.home = None if held is None else _packed(held, kept.leaf)
        self._copy([(parcel.host, parcel.device) for parcel in kept.parcels.values()], kept)

    def _wait_out(self, kept: _Kept) -> None:
        self._wait(kept)
        for parcel in kept.parcels.values():
            assert parcel.host is not None
            parcel.device = None
            self.bytes_away += parcel.host.numel()
        if kept.leaf is not None:  # a shape without bytes: autograd asks for the shape alone
            kept.leaf.data = torch.zeros((), dtype=kept.leaf.dtype, device=kept.leaf.device).expand(kept.leaf.shape)

    def _start_fetch(self, kept: _Kept) -> None:
        for parcel in kept.parcels.values():
            assert parcel.host is not None
            parcel.device = torch.empty(parcel.host.numel(), dtype=torch.uint8, device=self.device)
            self.bytes_back += parcel.host.numel()
        self._copy([(parcel.device, parcel.host) for parcel in kept.parcels.values()], kept)

    def _wait_fetch(self, kept: _Kept) -> None:
        self._wait(kept)
        for parcel in kept.parcels.values():
            assert parcel.host is not None
            self.bytes_away -= parcel.host.numel()
            parcel.host = None  # torch's allocator hands pinned memory on once the copy from it has ended
        if kept.leaf is not None and kept.home is not None:
            kept.leaf.data = kept.home.tensor()

    def _copy(self, pairs: Iterable[tuple[Tensor | None, Tensor | None]], kept: _Kept) -> None:
        """Start the copies (to, from): on the side stream after what the main one has been given so far."""
        if self._side is not None:
            self._side.wait_stream(torch.cuda.current_stream(self.device))
        with nullcontext() if self._side is None else torch.cuda.stream(self._side), torch.no_grad():
            for target, source in pairs:
                assert target is not None and source is not None
                target.copy_(source, non_blocking=self._side is not None)
        if self._side is not None:
            kept.done = self._side.record_event()

    def _wait(self, kept: _Kept) -> None:
        """What the main stream is given from now on runs after the copies."""
        if kept.done is not None:
            torch.cuda.current_stream(self.device).wait_event(kept.done)
            kept.done = None


def _packed(parcel: _Parcel, tensor: Tensor) -> _Packed:
    return _Packed(parcel, tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))


def _unpack(packed: Tensor | _Packed) -> Tensor:
    return packed if isinstance(packed, Tensor) else packed.tensor()


def _storages(tensors: Iterable[Tensor]) -> set[int]:
    return {tensor.untyped_storage()._cdata for tensor in tensors}


def _tensors(batch: Batch) -> list[Tensor]:
    """Everything of a batch that has memory."""
    found = [batch.ids, batch.labels, batch.positions, batch.documents, batch.index]
    return found + [tensor for tensor in (batch.mask, batch.real) if tensor is not None]
