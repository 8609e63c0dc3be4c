"""Offload on a CUDA device: the side stream and pinned memory give the same bits, and the device holds fewer bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.recompute.test_run import job_of
from tests.tiny import tiny_batches

from heptad.schedule.action import Action, Kind
from heptad.train.step import Trainer

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


def run(offload: str, recompute: dict[str, Any]) -> tuple[list[torch.Tensor], int]:
    """Gradients of one step of a wider model, and the most bytes allocated on the device during it."""
    job = job_of(recompute, offload, layers=6)
    wider = job.model.model_copy(update={"width": 256, "mlp_width": 1024})
    trainer = Trainer(job.model_copy(update={"model": wider}), 0, CUDA)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    trainer.step(1, tiny_batches(trainer.job, 0, 1, 1))
    torch.cuda.synchronize()
    mover: Any = trainer.parallel.executor.mover
    assert mover is None or mover.bytes_out == mover.bytes_back > 0 == mover.bytes_away
    grads = [shard.grad.clone() for shard in trainer.engine.shards if shard.grad is not None]
    return grads, torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("recompute", [{}, {"mode": "full", "segment": 2}, {"mode": "selective"}], ids=str)
def test_offload_changes_no_bit(recompute: dict[str, Any]) -> None:
    plain, _ = run("none", recompute)
    moved, _ = run("cpu", recompute)
    assert all(map(torch.equal, plain, moved))


def test_offload_lowers_the_peak() -> None:
    assert run("cpu", {})[1] < run("none", {})[1]


def test_host_memory_is_pinned_while_bytes_are_away() -> None:
    trainer = Trainer(job_of({}, "cpu"), 0, CUDA)
    mover: Any = trainer.parallel.executor.mover
    act, seen = mover.act, []

    def watched(action: Action) -> None:
        act(action)
        if action.kind is Kind.WAIT_OUT and action.index > 0:
            parcels = mover._kept[action.index, action.microbatch].parcels.values()
            seen.append(all(parcel.host.is_pinned() and parcel.device is None for parcel in parcels))

    mover.act = watched
    trainer.step(1, tiny_batches(trainer.job, 0, 1, 1))
    assert seen and all(seen)
