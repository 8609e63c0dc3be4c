"""Routers in a running job: what they add to the loss, in gradient and in figures, and that a recomputed forward is the
same: whatever the layout.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.tiny import tiny_batches, tiny_job
from torch import Tensor

from heptad.config.schema import Job
from heptad.launch.forked import forked
from heptad.mesh.layout import Layout
from heptad.models.batch import IGNORED
from heptad.models.router import routers
from heptad.train.step import StepResult, Trainer

MODEL: dict[str, Any] = dict(
    experts=6, experts_per_token=2, expert_width=5, dense_layers=1, jitter=0.2, capacity_factor=0.9
)
NAMES = ("blocks.1.mlp.router.gate.weight", "blocks.2.mlp.router.gate.weight")
LAYOUTS: dict[str, dict[str, Any]] = {
    "two data ranks": dict(dp_shard=2, zero=2),
    "a pipeline": dict(pp=2, zero=1),
    "tensor": dict(tp=2),
    "a cut stream": dict(tp=2, sequence_parallel=True),
    "context": dict(cp=3),
    "dualpipe, context": dict(pp=2, cp=2, zero=1, schedule="dualpipe"),
    "both, recomputed": dict(cp=2, tp=2, sequence_parallel=True, recompute="full"),
}


def gate_grads(rank: int, job: Job) -> tuple[StepResult, list[tuple[str, int, Tensor]]]:
    """One step of batches without any target: what is left are the losses of the routers."""
    trainer = Trainer(job, rank, torch.device("cpu"))
    layout = trainer.mesh.layout
    batches = tiny_batches(job, layout.data_rank(rank), layout.data_ranks, 1)
    batches = [replace(batch, labels=torch.full_like(batch.labels, IGNORED)) for batch in batches]
    result = trainer.step(1, batches)
    shards = [shard for shard in trainer.engine.shards if shard.spec.name in NAMES and shard.counted]
    return result, [(shard.spec.name, shard.start, shard.gradient().clone()) for shard in shards]


def run(model: dict[str, Any], **layout: Any) -> tuple[StepResult, dict[str, Tensor]]:
    """The step's figures, equal on all ranks, and the gates' whole gradients."""
    job = tiny_job({**MODEL, **model}, **layout)
    reports = forked(Layout.of(job.layout).world, gate_grads, job)
    whole = {name: torch.full((60,), torch.nan, dtype=torch.float64) for name in NAMES}
    for result, parts in reports:
        assert (result.balance_loss, result.z_loss) == (reports[0][0].balance_loss, reports[0][0].z_loss)
        for name, start, grad in parts:
            whole[name][start : start + grad.numel()] = grad
    assert all(not grad.isnan().any() for grad in whole.values())
    return reports[0][0], whole


@pytest.fixture(scope="module")
def alone() -> tuple[StepResult, dict[str, Tensor]]:
    """One device, a coefficient of a thousand."""
    return run({"aux_loss": 1e3, "z_loss": 0.5})


@pytest.mark.parametrize("name", LAYOUTS)
def test_c_044_the_losses_of_routers_and_their_gradients_are_the_same(
    name: str, alone: tuple[StepResult, dict[str, Tensor]]
) -> None:
    right, grads = alone
    assert right.loss == 0.0 and right.skipped and right.balance_loss is not None and right.z_loss is not None
    assert right.balance_loss > 2e3  # of two blocks: 1e3 each where the load is even
    found, got = run({"aux_loss": 1e3, "z_loss": 0.5}, **LAYOUTS[name])
    assert found.balance_loss == pytest.approx(right.balance_loss, rel=1e-12)
    assert found.z_loss == pytest.approx(right.z_loss, rel=1e-12)
    for gate, grad in grads.items():
        assert grad.abs().max() > 1.0
        torch.testing.assert_close(got[gate], grad, rtol=1e-10, atol=1e-10 * float(grad.abs().max()))


def test_c_044_a_coefficient_of_zero_is_none() -> None:
    found, grads = run({"aux_loss": 0.0}, tp=2)
    assert found.balance_loss is None and found.z_loss is None
    assert all(float(grad.abs().max()) == 0.0 for grad in grads.values())
    some, _ = run({"z_loss": 0.5}, tp=2)
    assert some.balance_loss is None and some.z_loss is not None and some.z_loss > 0


class Written(dict[int, Tensor]):
    """Every value that was ever written under a key."""

    def __init__(self) -> None:
        super().__init__()
        self.every: dict[int, list[Tensor]] = {}

    def __setitem__(self, key: int, value: Tensor) -> None:
        self.every.setdefault(key, []).append(value.clone())
        super().__setitem__(key, value)


def choices_twice(rank: int, job: Job) -> list[list[list[int]]]:
    """Of each forward and its repetition, the choices of a model whose experts have equal logits in pairs."""
    trainer = Trainer(job, rank, torch.device("cpu"))
    for shard in trainer.engine.shards:
        if shard.spec.name in NAMES:
            rows = shard.master.view(6, 10)
            rows[1::2] = rows[0::2]
    trainer.engine.refresh()
    found = []
    for router in routers(trainer.parallel.model.module).values():
        router.choices = Written()
        found.append(router.choices)
    trainer.step(1, tiny_batches(job, 0, 1, 1))
    return [[value.flatten().tolist() for value in both] for written in found for both in written.every.values()]


@pytest.mark.parametrize("layout", [{}, dict(tp=2, sequence_parallel=True), dict(cp=2)], ids=["one", "tp", "cp"])
def test_c_023_a_forward_that_runs_again_makes_the_same_choices(layout: dict[str, Any]) -> None:
    """Logits are tied, rows are scaled by keyed noise, and choices beyond the capacity are dropped."""
    job = tiny_job(MODEL, recompute="full", zero=0, **layout)
    for both in forked(Layout.of(job.layout).world, choices_twice, job):
        assert len(both) == 16
        assert all(first == again for first, again in both)
        kept = [choice >= 0 for first, _ in both for choice in first]
        assert any(kept) and not all(kept)
