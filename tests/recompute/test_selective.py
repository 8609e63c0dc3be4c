"""Selective recompute: the same bits, the core once more, and the part that is named is what is not kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.recompute.test_run import job_of, step
from tests.tiny import GPT, tiny_batches
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from heptad.config.describe import summary
from heptad.config.schema import Job, ModelSection
from heptad.errors import ConfigError
from heptad.launch.forked import forked
from heptad.models.batch import Batch
from heptad.models.build import wrap
from heptad.models.resolve import derived
from heptad.train.step import Trainer

CPU = torch.device("cpu")
SELECTIVE = {"mode": "selective"}
MODELS: dict[str, dict[str, Any]] = {
    "llama math": {"attention": "math", "attention_dropout": 0.1},
    "llama flash": {"attention": "flash", "attention_dropout": 0.0},
    "gpt math": GPT | {"attention": "math", "attention_dropout": 0.1},
    "gpt flash": GPT | {"attention": "flash", "attention_dropout": 0.0},
}


def job_with(model: dict[str, Any], recompute: dict[str, Any], offload: str = "none", **layout: Any) -> Job:
    job = job_of(recompute, offload, layers=4, **layout)
    return job.model_copy(update={"model": job.model.model_copy(update=model)})


SHARDED, TENSOR = {"zero": 3, "dp_shard": 2}, {"tp": 2, "sequence_parallel": True}


@pytest.mark.parametrize(
    ("name", "layout"),
    [(name, {}) for name in MODELS]
    + [("llama math", SHARDED), ("gpt flash", SHARDED), ("llama flash", TENSOR), ("gpt math", TENSOR)],
)
def test_c_022_selective_changes_no_bit(name: str, layout: dict[str, Any]) -> None:
    """With whole and with split backward, beside offload, and on some blocks only; dropout 0.1."""
    ranks, model = layout.get("dp_shard", 1) * layout.get("tp", 1), MODELS[name]
    plain = forked(ranks, step, job_with(model, {}, **layout))
    for recompute, offload, split in [
        (SELECTIVE, "none", False),
        (SELECTIVE | {"layers": (0, 2)}, "cpu", True),
    ]:
        found = forked(ranks, step, job_with(model, recompute, offload, **layout), split)
        for want, have in zip(plain, found, strict=True):
            where = f"{recompute}, offload {offload}, split {split}"
            assert have["loss"] == want["loss"], where
            assert all(map(torch.equal, have["tensors"], want["tensors"])), where
            assert have["counted"] == want["counted"], where
            assert set(have["forwards"].values()) == {1.0}, where


def kept_shapes(job: Job, unit: int) -> list[tuple[int, ...]]:
    """Shapes of what autograd saves of `unit` on the last micro-batch, each storage once."""
    trainer = Trainer(job, 0, CPU)
    found: dict[int, tuple[int, ...]] = {}

    def pack(tensor: Tensor) -> Tensor:
        found[tensor.untyped_storage()._cdata] = tuple(tensor.shape)
        return tensor

    forward = trainer.parallel.executor.forward

    def seen(index: int, *args: Any, **options: Any) -> Any:
        if index != unit:
            return forward(index, *args, **options)
        found.clear()
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            return forward(index, *args, **options)

    trainer.parallel.executor.forward = seen  # type: ignore[method-assign]
    trainer.step(1, tiny_batches(job, 0, 1, 1)[:1] * 2)
    return list(found.values())


@pytest.mark.parametrize("name", ["llama math", "gpt math"])
def test_with_scores_nothing_quadratic_is_kept(name: str) -> None:
    plain, selective = (kept_shapes(job_with(MODELS[name], mode), 2) for mode in ({}, SELECTIVE))
    length = 11
    assert any(shape[-2:] == (length, length) for shape in plain)
    assert not any(shape[-2:] == (length, length) for shape in selective)
    assert sum(shape[-1] == 23 for shape in plain) == sum(shape[-1] == 23 for shape in selective)


@pytest.mark.parametrize(("name", "parts"), [("llama flash", 2), ("gpt flash", 1)])
def test_with_flash_of_the_mlp_only_what_the_activation_reads_is_kept(name: str, parts: int) -> None:
    plain, selective = (kept_shapes(job_with(MODELS[name], mode), 2) for mode in ({}, SELECTIVE))
    assert sum(shape[-1] == 23 for shape in plain) == parts + 1  # gate, up, product | up, act(up)
    assert sum(shape[-1] == 23 for shape in selective) == parts
    assert len(plain) - len(selective) == 1


@pytest.mark.parametrize(
    ("name", "said"), [("llama math", "attention's scores and probabilities"), ("llama flash", "the MLP's activation")]
)
def test_the_summary_names_what_is_dropped(name: str, said: str) -> None:
    job = job_with(MODELS[name], SELECTIVE)
    assert f"recompute         selective: a block drops {said}" in summary(job, derived(job)).splitlines()


class Doubling(nn.Module):
    def __init__(self, section: ModelSection) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(section.width, section.width) for _ in range(3)])

    def units(self) -> list[nn.Module]:
        return list(self.parts)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        return x


def test_a_custom_block_is_refused() -> None:
    job = job_of(SELECTIVE)
    with torch.device("meta"):
        model = wrap(Doubling(job.model), job.model)
    with pytest.raises(ConfigError, match=r"recompute\.mode[\s\S]*Linear is large[\s\S]*full"):
        Trainer(job, 0, CPU, model)
