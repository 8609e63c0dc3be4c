"""The load of the whole step, what is shown of it, the bias that it moves: on every rank alike, whatever the layout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.tiny import tiny_batches, tiny_job
from tests.verify.several import fast
from torch import Tensor

from heptad.checkpoint.read import Reader
from heptad.checkpoint.save import save
from heptad.config.schema import Job
from heptad.launch.forked import forked
from heptad.loader.loader import Loader
from heptad.loader.synthetic import synthetic
from heptad.mesh.collectives import barrier
from heptad.mesh.layout import Layout
from heptad.models.batch import IGNORED
from heptad.models.build import build
from heptad.models.router import routers
from heptad.train.balance import figures, moved
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
    return [torch.stack([*router.loads.values()]).sum(0)[:-1] for router in routers]  # type: ignore[union-attr, operator]


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


SOFTMAX: dict[str, Any] = dict(experts=6, experts_per_token=2, expert_width=5, dense_layers=1, capacity_factor=0.8)
SHOWN: dict[str, dict[str, Any]] = {
    "one": {},
    "data": dict(dp_shard=2),
    "hsdp": dict(dp_replicate=2, dp_shard=2, zero=1),
    "fsdp2": dict(dp_shard=2, engine="fsdp2"),
    "expert ranks": dict(dp_shard=4, ep=2, etp=2, zero=1),
    "tensor": dict(tp=2),
    "a cut stream": dict(tp=2, sequence_parallel=True),
    "context": dict(cp=3),
    "a pipeline": dict(pp=2, zero=1),
    "recomputed": dict(recompute="full"),
}


def shown(rank: int, job: Job) -> list[tuple[float | None, float | None, list[list[int]]]]:
    """Of two steps, the second one without any target."""
    trainer = Trainer(job, rank, torch.device("cpu"))
    place, ranks = trainer.mesh.layout.data_rank(rank), trainer.mesh.layout.data_ranks
    found = []
    for step in (1, 2):
        batches = tiny_batches(job, place, ranks, 1)
        if step == 2:
            batches = [replace(batch, labels=torch.full_like(batch.labels, IGNORED)) for batch in batches]
        result = trainer.step(step, batches)
        assert result.skipped == (step == 2)
        found.append((result.expert_load_max, result.dropped_share, trainer.balance.counts.tolist()))
    return found


@pytest.mark.parametrize("name", fast(SHOWN, lambda name: name not in ("hsdp", "fsdp2", "a cut stream", "recomputed")))
def test_what_is_shown_of_experts_is_of_the_whole_batch(name: str) -> None:
    """Of the first step, before an update; a step without one shows its load too. In the cover of all axes `verify`
    compares the same counts."""
    job = tiny_job(SOFTMAX, **SHOWN[name])
    model = build(tiny_job(SOFTMAX))
    model.materialise(job.train.seed, torch.device("cpu"), torch.float64)
    every = routers(model.module)
    for router in every.values():
        router.loads, router.choices = {}, {}
    for batch in tiny_batches(job, 0, 1, 1):
        model.loss(batch)
    counts = [torch.stack([*router.loads.values()]).sum(0).tolist() for router in every.values()]  # type: ignore[union-attr]
    kept = [sum(int((one >= 0).sum()) for one in router.choices.values()) for router in every.values()]  # type: ignore[union-attr]
    assert [sum(one[:-1]) for one in counts] == [8 * 11 * 2] * 2
    assert [sum(one[:-1]) - one[-1] for one in counts] == kept and sum(kept) < 8 * 11 * 4
    for first, second in forked(Layout.of(job.layout).world, shown, job):
        busiest = max(max(one[:-1]) for one in counts) * 6 / (8 * 11 * 2)
        assert first == (pytest.approx(busiest), pytest.approx(1 - sum(kept) / (8 * 11 * 4)), counts)
        assert second[0] is not None and second[0] > 1 and second[1] is not None


def test_without_a_capacity_nothing_is_dropped_and_without_experts_nothing_is_shown() -> None:
    (((busiest, dropped, counts), _),) = forked(1, shown, tiny_job({**SOFTMAX, "capacity_factor": None}))
    assert busiest is not None and dropped is None and [one[-1] for one in counts] == [0, 0]
    assert figures(torch.zeros(2, 7, dtype=torch.int64), True) == (None, None)
    assert figures(torch.tensor([[1, 1, 4, 3], [2, 2, 2, 0]]), True) == (2.0, 0.25)
    assert figures(torch.tensor([[1, 1, 4, 0], [2, 2, 2, 0]]), False) == (2.0, None)


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
    model = job.model.model_copy(update={"bias_update_speed": 0.0})
    other = Trainer(job.model_copy(update={"model": model}), rank, torch.device("cpu"))
    (commit,) = Path(folder).rglob("COMMIT")
    with Reader(commit.parent) as reader:
        restore(other, reader)
    other.step(2, tiny_batches(job, rank, 2, 2))
    return [[value for piece in item.balance.pieces() for value in piece.tensor.tolist()] for item in (trainer, other)]


def test_they_are_saved_with_the_weights_and_stay_where_a_run_goes_on_without_a_speed(tmp_path: Path) -> None:
    """DeepSeek-V3's last 500 B tokens: a speed of 0, the biases as they are."""
    for left, right in forked(2, saved_and_loaded, tiny_job(MODEL, dp_shard=2), str(tmp_path)):
        assert left == right and any(left)
