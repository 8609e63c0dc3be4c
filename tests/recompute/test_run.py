"""Recompute and offload on real steps: the same bits, each forward again once, as many live boundaries as predicted."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.tiny import tiny_batches, tiny_job
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from heptad.account.traffic import step_traffic
from heptad.config.schema import Job
from heptad.launch.forked import forked
from heptad.schedule.action import Action, Kind, Program, Segments
from heptad.trace import total
from heptad.train.step import Trainer

MODES: dict[str, dict[str, Any]] = {
    "none": {},
    "full": {"mode": "full"},
    "every other layer": {"mode": "full", "layers": (0, 2, 4)},
    "segments of 2": {"mode": "full", "segment": 2},
    "sqrt": {"mode": "full", "segment": "sqrt"},
    "segments of 4": {"mode": "full", "segment": 4},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "zero-3 2": {"zero": 3, "dp_shard": 2},
    "tensor 2, cut stream": {"tp": 2, "sequence_parallel": True},
}


def job_of(recompute: dict[str, Any], offload: str = "none", layers: int = 5, batch: int = 2, **layout: Any) -> Job:
    """`layers` blocks with dropout 0.1, one sequence a micro-batch."""
    job = tiny_job({"layers": layers, "dropout": 0.1, "attention_dropout": 0.1}, batch, **layout)
    sections = {
        "recompute": job.recompute.model_copy(update=recompute),
        "offload": job.offload.model_copy(update={"activations": offload}),
    }
    return job.model_copy(update=sections)


def step(rank: int, job: Job, split: bool = False) -> dict[str, Any]:
    """One step; `split`: its program has every B as I and W."""
    trainer = Trainer(job, rank, torch.device("cpu"))
    parallel, layout = trainer.parallel, trainer.mesh.layout
    if split:
        trainer.program = halves(trainer.program)
    forwards: list[int] = []
    forward = parallel.executor.forward

    def counted(unit: int, *args: Any, **options: Any) -> Any:
        forwards.append(unit)
        return forward(unit, *args, **options)

    parallel.executor.forward = counted  # type: ignore[method-assign]
    trainer.mesh.ledger.reset()
    batches = tiny_batches(job, layout.data_rank(rank), layout.data_ranks, 1)
    result = trainer.step(1, batches)
    mover: Any = parallel.executor.mover
    model = parallel.model
    return {
        "loss": result.loss,
        "tensors": [s.grad.clone() for s in trainer.engine.shards if s.grad is not None]
        + [s.master.clone() for s in trainer.engine.shards],
        "forwards": {unit: forwards.count(unit) / len(batches) for unit in range(len(model.units))},
        "counted": total(trainer.mesh.ledger.transfers()),
        "predicted": total(step_traffic(job, model.unit_specs, model.specs, parallel.recompute)),
        "moved": None if mover is None else (mover.bytes_out, mover.bytes_back, mover.bytes_away),
    }


def halves(program: Program) -> Program:
    """B as I, W; nothing else changes."""
    found: list[Action] = []
    for action in program:
        if action.kind is Kind.BACKWARD:
            found.append(Action(Kind.INPUT_GRAD, action.index, action.microbatch))
            action = Action(Kind.WEIGHT_GRAD, action.index, action.microbatch)
        found.append(action)
    return tuple(found)


@pytest.mark.parametrize("name", LAYOUTS)
def test_c_022_recompute_and_offload_change_no_bit(name: str) -> None:
    """Every mode, with and without offload, with the backward whole and split: loss, gradients, weights, traffic."""
    layout = LAYOUTS[name]
    ranks = layout.get("dp_shard", 1) * layout.get("tp", 1)
    plain = forked(ranks, step, job_of({}, **layout))
    for mode, recompute in MODES.items():
        both = [("none", True), ("cpu", False)] if mode == "segments of 2" else []
        for offload, split in [("none", False), ("cpu", True), *both]:
            where = f"{mode}, offload {offload}, split {split}"
            reports = forked(ranks, step, job_of(recompute, offload, **layout), split)
            for want, found in zip(plain, reports, strict=True):
                assert found["loss"] == want["loss"], where
                assert all(map(torch.equal, found["tensors"], want["tensors"])), where
                assert found["counted"] == found["predicted"], where
                again = recompute.get("layers", range(5)) if recompute else ()
                assert found["forwards"] == {unit: 1 + (unit - 1 in again) for unit in range(7)}, where
                assert (found["moved"] is None) == (offload == "none"), where
                if offload == "cpu":
                    out, back, away = found["moved"]
                    assert out == back > 0 == away, where


class Live:
    """Unit outputs whose bytes are alive, sampled before each action; by storage, at its size of then."""

    def __init__(self, trainer: Trainer) -> None:
        self.storages: list[StorageWeakRef] = []
        self.counts: list[int] = []
        executor = trainer.parallel.executor
        forward = executor.forward

        def seen(unit: int, inputs: Tensor | None, *args: Any, **options: Any) -> Any:
            self.sample()
            output, tape = forward(unit, inputs, *args, **options)
            if unit < len(trainer.parallel.model.units) - 1:
                self.storages.append(StorageWeakRef(output.untyped_storage()))
            return output, tape

        executor.forward = seen  # type: ignore[method-assign]

    def sample(self) -> None:
        self.counts.append(sum(not storage.expired() for storage in self.storages))


LAYERS = 9


def live_boundaries(recompute: dict[str, Any]) -> tuple[list[int], list[int], Segments]:
    """Counts at the start of each forward of the first micro-batch, of each forward again, and the segments."""
    trainer = Trainer(job_of(recompute, layers=LAYERS), 0, torch.device("cpu"))
    live = Live(trainer)
    trainer.step(1, tiny_batches(trainer.job, 0, 1, 1))
    segments = trainer.parallel.recompute
    first = live.counts[: LAYERS + 2 + sum(map(len, segments))]
    return first[: LAYERS + 2], first[LAYERS + 2 :], segments


def test_without_recompute_every_boundary_is_alive() -> None:
    assert live_boundaries({})[0][-1] == LAYERS + 1


@pytest.mark.parametrize("segment", [1, 2, 3, "sqrt", 9])
def test_live_boundaries_are_one_a_segment_and_one_a_block_of_the_segment_under_way(segment: int | str) -> None:
    forward, again, segments = live_boundaries({"mode": "full", "segment": segment})
    assert max(forward) == len(segments) + 1  # the segments' inputs, and the head's
    assert max(again) == max(below + len(units) for below, units in enumerate(segments))
    if segment == "sqrt":
        assert max(forward + again) <= 2 * math.sqrt(LAYERS)  # Chen et al., arXiv 1604.06174, §4.1
