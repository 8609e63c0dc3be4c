"""The bias of a router's choice: moved by the load of the whole step, on every rank alike, saved with the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tests.tiny import tiny_batches, tiny_job
from torch import Tensor

from heptad.checkpoint.read import Reader
from heptad.checkpoint.save import save
from heptad.config.schema import Job
from heptad.launch.forked import forked
from heptad.loader.loader import Loader
from heptad.loader.synthetic import synthetic
from heptad.mesh.collectives import barrier
from heptad.models.build import build
from heptad.train.balance import moved
from heptad.train.state import restore
from heptad.train.step import Trainer

MODEL: dict[str, Any] = dict(
    kv_heads=None, head_dim=None, attention_kind="mla", kv_lora_rank=7, qk_nope_head_dim=5, qk_rope_head_dim=4,
    v_head_dim=3, experts=6, experts_per_token=2, expert_width=5, dense_layers=1, router="deepseek",
    bias_update_speed=0.25,
)  # fmt: skip
NAMES = ["blocks.1.mlp.router.bias", "blocks.2.mlp.router.bias"]


def test_overloaded_experts_fall_and_others_rise() -> None:
    bias = torch.tensor([0.5, 0.0, 0.0, -1.0])
    counts = torch.tensor([5, 2, 1, 0])
    assert moved(bias, counts, 0.25).tolist() == [0.25, 0.0, 0.25, -0.75]
    assert moved(bias, torch.tensor([0, 0, 0, 0]), 0.25).tolist() == bias.tolist()


def biases(rank: int, job: Job, ranks: int, steps: int) -> dict[str, list[float]]:
    trainer = Trainer(job, rank, torch.device("cpu"))
    place = trainer.mesh.layout.data_rank(rank)
    for step in range(1, steps + 1):
        batches = tiny_batches(job, place, ranks, step)
        trainer.evaluate(batches)  # counts nothing
        trainer.step(step, batches)
    return {piece.name: piece.tensor.tolist() for piece in trainer.balance.pieces()}


def loads_of(job: Job) -> list[Tensor]:
    """Choices of the first step's tokens, by a model without engine: by router."""
    model = build(job)
    model.materialise(job.train.seed, torch.device("cpu"), torch.float64)
    routers = [model.module.get_submodule(name.removesuffix(".bias")) for name in NAMES]
    for router in routers:
        router.loads = {}  # type: ignore[assignment]
    batches = tiny_batches(job, 0, 1, 1)
    for batch in batches:
        model.loss(batch)
    return [torch.stack([*router.loads.values()]).sum(0) for router in routers]  # type: ignore[union-attr, operator]


def test_each_layout_moves_them_by_the_global_load() -> None:
    job = tiny_job(MODEL)
    expected = {
        name: (0.25 * (counts.double().mean() - counts.double()).sign()).tolist()
        for name, counts in zip(NAMES, loads_of(job), strict=True)
    }
    assert any(value != 0.0 for values in expected.values() for value in values)
    assert forked(1, biases, job, 1, 1) == [expected]
    (three,) = forked(1, biases, job, 1, 3)
    for layout in (dict(dp_shard=2), dict(dp_replicate=2, dp_shard=2, zero=1)):
        cut = tiny_job(MODEL, **layout)
        ranks = layout.get("dp_replicate", 1) * layout["dp_shard"]
        assert forked(ranks, biases, cut, ranks, 3) == [three] * ranks
    recomputed = tiny_job(MODEL, recompute="full")
    assert forked(1, biases, recomputed, 1, 3) == [three]
    for layout in (dict(tp=2), dict(tp=2, sequence_parallel=True), dict(cp=2)):
        assert forked(2, biases, tiny_job(MODEL, **layout), 1, 3) == [three] * 2
    piped = forked(2, biases, tiny_job(MODEL, pp=2, zero=1), 1, 3)
    assert piped[0] | piped[1] == three and not piped[0].keys() & piped[1].keys()


def without_targets(rank: int, job: Job) -> tuple[bool, dict[str, list[float]]]:
    trainer = Trainer(job, rank, torch.device("cpu"))
    result = trainer.step(1, tiny_batches(job, 0, 1, 1)[:1] * 8)  # sequence 0 has no target
    return result.skipped, {piece.name: piece.tensor.tolist() for piece in trainer.balance.pieces()}


def test_a_step_without_an_update_moves_none() -> None:
    ((skipped, found),) = forked(1, without_targets, tiny_job(MODEL))
    assert skipped and all(value == 0.0 for values in found.values() for value in values)


def saved_and_loaded(rank: int, job: Job, folder: str) -> list[list[float]]:
    trainer = Trainer(job, rank, torch.device("cpu"))
    trainer.step(1, tiny_batches(job, rank, 2, 1))
    state = Loader(job, rank, 2, synthetic(job)).state(1)
    meta = {"optimizer": trainer.optimizer.meta(), "loader": state, "tokens": 0, "targets": 0}
    world = trainer.loss_group

    def wait() -> None:
        barrier(world, 60.0)

    save(Path(folder), 1, trainer.pieces(), meta, world.index, world.size, wait, run="r", keep=2)
    wait()
    other = Trainer(job, rank, torch.device("cpu"))
    (commit,) = Path(folder).rglob("COMMIT")
    with Reader(commit.parent) as reader:
        restore(other, reader)
    return [[value for piece in item.balance.pieces() for value in piece.tensor.tolist()] for item in (trainer, other)]


def test_they_are_saved_with_the_weights(tmp_path: Path) -> None:
    for left, right in forked(2, saved_and_loaded, tiny_job(MODEL, dp_shard=2), str(tmp_path)):
        assert left == right and any(left)
