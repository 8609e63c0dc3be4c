"""Offload: bytes moved equal the prediction, the device's copies are gone while they are away, odd units stay right."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.recompute.test_run import job_of
from tests.tiny import tiny_batches
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from heptad.cli.job import ready
from heptad.config.schema import ModelSection
from heptad.errors import ConfigError
from heptad.launch.forked import forked
from heptad.models.batch import IGNORED, Batch
from heptad.models.build import wrap
from heptad.recompute.policy import moved_bytes
from heptad.schedule.action import Action, Kind
from heptad.train.step import Trainer

CPU = torch.device("cpu")


class Kept:
    """Bytes that units keep, seen from outside: storages of what autograd saved and taps hold, each once."""

    def __init__(self, trainer: Trainer) -> None:
        self.bytes: dict[tuple[int, Kind], int] = {}
        self.storages: dict[int, list[StorageWeakRef]] = {}
        self.executor, self.model = trainer.parallel.executor, trainer.parallel.model
        forward = self.executor.forward

        def seen(unit: int, inputs: Any, batch: Batch, taped: bool, sink: Any = None) -> Any:
            again = self.executor.phase == "backward"
            with self._watched(unit, again, batch) if taped else self._input(unit, inputs):
                return forward(unit, inputs, batch, taped, sink)

        self.executor.forward = seen  # type: ignore[method-assign]

    @contextmanager
    def _input(self, unit: int, inputs: Tensor) -> Iterator[None]:
        self._note(unit, Kind.FORWARD, {inputs.untyped_storage()._cdata: inputs})
        yield

    @contextmanager
    def _watched(self, unit: int, again: bool, batch: Batch) -> Iterator[None]:
        found: dict[int, Tensor] = {}

        def pack(tensor: Tensor) -> Tensor:
            found[tensor.untyped_storage()._cdata] = tensor
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            yield
        mask = [] if batch.mask is None else [batch.mask]
        rotary: Any = self.model.module
        tables = rotary.blocks[0].attention.rotary.kept()
        stays = [batch.ids, batch.labels, batch.positions, batch.documents, batch.index, *mask, *tables]
        for tensor in [*stays, *self.model.params.values()]:
            found.pop(tensor.untyped_storage()._cdata, None)
        self._note(unit, Kind.RECOMPUTE if again else Kind.FORWARD, found)

    def _note(self, unit: int, kind: Kind, found: dict[int, Tensor]) -> None:
        self.bytes[unit, kind] = sum(tensor.untyped_storage().nbytes() for tensor in found.values())
        self.storages[unit] = [StorageWeakRef(tensor.untyped_storage()) for tensor in found.values()]

    def alive(self, unit: int) -> int:
        """How many of the storages that `unit` kept last are alive."""
        return sum(not storage.expired() for storage in self.storages[unit])


@pytest.mark.parametrize(
    "recompute", [{}, {"mode": "full"}, {"mode": "full", "segment": 2}], ids=["none", "full", "segments of 2"]
)
def test_bytes_out_and_back_are_what_the_program_predicts(recompute: dict[str, Any]) -> None:
    """What units keep is measured in a run that moves nothing; the prediction needs the program and that alone."""
    plain = Trainer(job_of(recompute), 0, CPU)
    kept = Kept(plain)
    plain.step(1, tiny_batches(plain.job, 0, 1, 1)[1:] * 2)  # the same micro-batch twice: bytes differ with its mask
    trainer = Trainer(job_of(recompute, "cpu"), 0, CPU)
    trainer.step(1, tiny_batches(plain.job, 0, 1, 1)[1:] * 2)
    mover: Any = trainer.parallel.executor.mover
    predicted = moved_bytes(trainer.program, lambda unit, kind: kept.bytes[unit, kind])
    assert mover.bytes_out == mover.bytes_back == predicted > 0
    assert mover.bytes_away == 0
    mover.reset()
    assert mover.bytes_out == mover.bytes_back == 0


def test_the_devices_copy_is_gone_while_the_bytes_are_away() -> None:
    """Between o and P of a unit none of the storages it kept is alive, its input's neither."""
    trainer = Trainer(job_of({}, "cpu"), 0, CPU)
    executor = trainer.parallel.executor
    mover: Any = executor.mover
    storages: dict[tuple[int, int], list[StorageWeakRef]] = {}
    seen: list[str] = []
    act = mover.act

    def watched(action: Action) -> None:
        key = action.index, action.microbatch
        if action.kind is Kind.OUT:
            parcels = mover._kept[key].parcels.values()
            storages[key] = [StorageWeakRef(parcel.device.untyped_storage()) for parcel in parcels]
        if action.kind is Kind.FETCH and action.index > 0:
            assert storages[key] and all(storage.expired() for storage in storages[key]), action
            seen.append(str(action))
        act(action)

    mover.act = watched
    trainer.step(1, tiny_batches(trainer.job, 0, 1, 1))
    assert seen == ["4P0", "3P0", "2P0", "1P0", "4P1", "3P1", "2P1", "1P1"]


class Odd(nn.Module):
    """A unit whose graph keeps its own output, and weights that no tap covers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.mix = nn.Linear(width, width)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        return torch.tanh(F.linear(x * self.scale, self.mix.weight))


class Same(nn.Module):
    """A unit that returns its input."""

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        return x


class First(nn.Module):
    def __init__(self, vocab: int, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(vocab, width)

    def forward(self, x: None, batch: Batch) -> Tensor:
        found: Tensor = self.table(batch.ids)
        return found


class Last(nn.Module):
    def __init__(self, vocab: int, width: int) -> None:
        super().__init__()
        self.out = nn.Linear(width, vocab)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        logits = self.out(x).flatten(0, -2)
        return F.cross_entropy(logits, batch.labels.flatten(), ignore_index=IGNORED, reduction="sum")


class OddModel(nn.Module):
    def __init__(self, section: ModelSection) -> None:
        super().__init__()
        vocab, width = section.vocab, section.width
        middle = [Odd(width), Odd(width), Same(), Odd(width), Odd(width), Odd(width)]
        self.parts = nn.ModuleList([First(vocab, width), *middle, Last(vocab, width)])

    def units(self) -> list[nn.Module]:
        return list(self.parts)


def odd_step(rank: int, offload: str, recompute: dict[str, Any]) -> tuple[list[Tensor], int]:
    job = job_of(recompute, offload, zero=3, dp_shard=2)
    with torch.device("meta"):
        module = OddModel(job.model)
    trainer = Trainer(job, rank, CPU, wrap(module, job.model))
    trainer.step(1, tiny_batches(job, rank, 2, 1))
    mover: Any = trainer.parallel.executor.mover
    return [shard.grad.clone() for shard in trainer.engine.shards if shard.grad is not None], mover and mover.bytes_out


@pytest.mark.parametrize("recompute", [{}, {"mode": "full", "segment": 2}], ids=["none", "segments of 2"])
def test_units_that_keep_their_output_and_weights_without_taps_stay_right(recompute: dict[str, Any]) -> None:
    """Stage 3 frees weights that autograd saved here: they are not moved, and the gradients stay the same bits."""
    plain, moved = forked(2, odd_step, "none", recompute), forked(2, odd_step, "cpu", recompute)
    for (want, _), (found, num_bytes) in zip(plain, moved, strict=True):
        assert num_bytes > 0 and all(map(torch.equal, found, want))


def test_offload_that_would_move_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"offload\.activations[\s\S]*no effect"):
        Trainer(job_of({}, "cpu", layers=1), 0, CPU)


def test_a_verb_refuses_it_before_any_process_starts() -> None:
    ready("debug", ["offload.activations=cpu"])
    for sets, why in (
        (["model.layers=1", "layout.zero=2", "layout.prefetch=2"], "no effect: with prefetch = 2"),
        (["layout.engine=fsdp2"], "fsdp2"),
    ):
        with pytest.raises(ConfigError, match=rf"offload\.activations[\s\S]*{why}"):
            ready("debug", ["offload.activations=cpu", *sets])
