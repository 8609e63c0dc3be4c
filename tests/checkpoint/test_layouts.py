"""Checkpoints of whole trainers between layouts of data and tensor axis: what lies on disk is the model's alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.tiny import GPT, tiny_batches, tiny_job
from torch import Tensor

from heptad.checkpoint.read import Reader
from heptad.checkpoint.save import save
from heptad.config.schema import Job
from heptad.launch.forked import forked
from heptad.mesh.collectives import barrier
from heptad.mesh.layout import Layout
from heptad.models.hf import to_hf
from heptad.models.spec import param_specs
from heptad.train.state import restore
from heptad.train.step import Trainer

Options = dict[str, Any]

LAYOUTS: dict[str, Options] = {
    "one": dict(zero=3),
    "tp 2": dict(tp=2, zero=0),
    "tp 4, shared kv heads": dict(tp=4, zero=1),
    "zero 3 on 4": dict(dp_shard=4, zero=3),
    "tp 2 x dp 2, cut stream": dict(tp=2, dp_shard=2, zero=2, sequence_parallel=True),
    "hsdp x tp 2, tensor axis outside": dict(
        tp=2, dp_shard=2, dp_replicate=2, zero=3, order="tp-pp-dp_shard-cp-dp_replicate"
    ),
}

EXPERTS: dict[str, Options] = {
    "one": dict(zero=3),
    "ep 2 x edp 2": dict(dp_shard=4, zero=3, ep=2),
    "ep 2 x etp 2": dict(dp_shard=4, zero=1, ep=2, etp=2),
    "etp 3, whole": dict(dp_shard=3, zero=0, etp=3),
    "ep 4, hsdp": dict(dp_replicate=2, dp_shard=4, zero=2, ep=4),
    "tp 2 x cp 2, an odd order": dict(
        tp=2, cp=2, dp_shard=2, zero=3, ep=2, etp=2, order="tp-cp-dp_replicate-dp_shard-pp"
    ),
}
MOE: Options = dict(
    layers=2, vocab=11, experts=7, experts_per_token=2, expert_width=7, dense_layers=1, shared_experts=1,
    router="deepseek", bias_update_speed=0.1,
)  # fmt: skip

EVERY_KIND = GPT | dict(mlp="gated", activation="silu", attention_bias=True, qk_norm=True, layers=1, vocab=11)
"""Every parameter that a decoder can have."""


def adamw(job: Job) -> Job:
    options = {"name": "adamw", "lr": 0.01, "weight_decay": 0.1, "clip_norm": 1.0}
    return job.model_copy(update={"optimizer": job.optimizer.model_copy(update=options)})


def world_of(job: Job) -> int:
    return Layout.of(job.layout).world


def write(trainer: Trainer, folder: Path) -> None:
    """What `save_state` writes, without a loader."""
    group = trainer.loss_group
    meta = {"optimizer": trainer.optimizer.meta(), "tokens": 0, "targets": 0}
    wait = lambda: barrier(group, 20.0)  # noqa: E731
    save(folder, 1, trainer.pieces(), meta, group.ranks[group.index], group.size, wait, run="run", keep=1)


def arange(names: list[str], name: str, start: int, stop: int) -> Tensor:
    """Distinct over all elements of all tensors, so an error of order shows."""
    return torch.arange(start, stop, dtype=torch.float64) + 10**6 * names.index(name)


def names_of(trainer: Trainer) -> list[str]:
    return sorted({piece.name for piece in trainer.pieces()})


def save_arange(rank: int, job: Job, folder: Path) -> None:
    trainer = Trainer(job, rank, torch.device("cpu"))
    for piece in trainer.pieces():
        piece.tensor.copy_(arange(names_of(trainer), piece.name, piece.start, piece.stop))
    write(trainer, folder)


def load_arange(rank: int, job: Job, path: Path) -> list[tuple[str, int, int]]:
    """Ranges this rank holds, each found bit-equal."""
    trainer = Trainer(job, rank, torch.device("cpu"))
    with Reader(path) as reader:
        restore(trainer, reader)
    pieces = trainer.pieces()
    for piece in pieces:
        assert torch.equal(piece.tensor, arange(names_of(trainer), piece.name, piece.start, piece.stop)), piece.name
    return [(piece.name, piece.start, piece.stop) for piece in pieces]


def shapes_of(job: Job) -> dict[str, tuple[int, ...]]:
    """Whole tensors of an AdamW checkpoint."""
    shapes = {spec.name: spec.shape for spec in param_specs(job.model)}
    state = {f"{slot}/{name}": shape for slot in ("exp_avg", "exp_avg_sq") for name, shape in shapes.items()}
    biases = {name.replace("gate.weight", "bias"): shape[:1] for name, shape in shapes.items() if ".router." in name}
    return shapes | state | biases


def stored(path: Path) -> tuple[dict[str, list[int]], dict[str, Tensor], int]:
    """Shapes in the index, whole flat tensors as any safetensors reader finds them, elements in all files."""
    index = json.loads((path / "index.json").read_text())["tensors"]
    files = {file.name: load_file(file) for file in path.glob("rank-*.safetensors")}
    flat = {name: torch.cat([files[f][key] for f, key, _, _ in item["parts"]]) for name, item in index.items()}
    total = sum(tensor.numel() for tensors in files.values() for tensor in tensors.values())
    return {name: item["shape"] for name, item in index.items()}, flat, total


@pytest.mark.parametrize("saved", LAYOUTS)
def test_c_056_parts_are_stored_in_global_order_and_load_under_every_layout(saved: str, tmp_path: Path) -> None:
    """q, k, v, gate and up of several tensor ranks, copied kv heads and padded rows: each element once, in place."""
    assert_loads_everywhere(EVERY_KIND, LAYOUTS, saved, tmp_path)


@pytest.mark.parametrize("saved", ["one", "ep 2 x etp 2", "tp 2 x cp 2, an odd order"])
def test_experts_are_stored_in_global_order_and_load_under_every_layout(saved: str, tmp_path: Path) -> None:
    """Experts of several ranks, rows of them, missing ones and missing rows: each element once, in place."""
    assert_loads_everywhere(MOE, EXPERTS, saved, tmp_path)


def assert_loads_everywhere(model: Options, layouts: dict[str, Options], saved: str, tmp_path: Path) -> None:
    job = adamw(tiny_job(model, **layouts[saved]))
    forked(world_of(job), save_arange, job, tmp_path)
    (path,) = tmp_path.iterdir()
    shapes, flat, total = stored(path)
    want = shapes_of(job)
    assert {name: tuple(shape) for name, shape in shapes.items()} == want
    assert total == sum(torch.Size(shape).numel() for shape in want.values())
    names = sorted(want)
    for name, values in flat.items():
        assert torch.equal(values, arange(names, name, 0, values.numel())), name
    for loaded, layout in layouts.items():
        other = adamw(tiny_job(model, **layout))
        held = [item for ranges in forked(world_of(other), load_arange, other, path) for item in ranges]
        for name, shape in want.items():
            ends = sorted({(start, stop) for held_name, start, stop in held if held_name == name and start < stop})
            assert [start for start, _ in ends] == [0, *(stop for _, stop in ends[:-1])], (loaded, name)
            assert ends[-1][1] == torch.Size(shape).numel(), (loaded, name)


WIDE = dict(vocab=11, heads=12, kv_heads=12, head_dim=2)
"""Heads for 1 to 4 tensor ranks; the vocabulary has a padded row on 2, 3 and 4, the MLP on 2 and 4 too."""


def train_and_save(rank: int, job: Job, folder: Path) -> float:
    trainer = Trainer(job, rank, torch.device("cpu"))
    for step in (1, 2):
        trainer.step(step, batches_of(job, rank, step))
    write(trainer, folder)
    return trainer.evaluate(batches_of(job, rank, 3))


def load_and_evaluate(rank: int, job: Job, path: Path) -> float:
    trainer = Trainer(job, rank, torch.device("cpu"))
    with Reader(path) as reader:
        restore(trainer, reader)
    return trainer.evaluate(batches_of(job, rank, 3))


def batches_of(job: Job, rank: int, step: int) -> list[Any]:
    layout = Layout.of(job.layout)
    return tiny_batches(job, layout.data_rank(rank), layout.data_ranks, step)


@pytest.mark.parametrize("tied", [False, True])
def test_c_037_padded_rows_are_not_saved_and_any_degree_loads(tied: bool, tmp_path: Path) -> None:
    job = adamw(tiny_job(WIDE | dict(tied=tied), tp=4, zero=1))
    losses = set(forked(4, train_and_save, job, tmp_path))
    assert len(losses) == 1
    (path,) = tmp_path.iterdir()
    shapes, flat, _ = stored(path)
    tables = [name for name in shapes if "embed.tokens" in name or "head.out" in name]
    assert len(tables) == (3 if tied else 6)
    for name in tables:
        assert shapes[name] == [11, 10] and flat[name].numel() == 110
    state = to_hf(job.model, {item.name: flat[item.name].view(item.shape) for item in param_specs(job.model)})
    assert state["model.embed_tokens.weight"].shape == (11, 10) and ("lm_head.weight" in state) is not tied
    assert tied or state["lm_head.weight"].shape == (11, 10)
    for degree in (1, 2, 3, 4):
        other = adamw(tiny_job(WIDE | dict(tied=tied), tp=degree, zero=1))
        for loss in forked(degree, load_and_evaluate, other, path):
            assert loss == pytest.approx(next(iter(losses)), rel=1e-12)


def test_experts_that_were_trained_evaluate_alike_under_every_layout(tmp_path: Path) -> None:
    job = adamw(tiny_job(MOE, **EXPERTS["tp 2 x cp 2, an odd order"]))
    losses = set(forked(world_of(job), train_and_save, job, tmp_path))
    assert len(losses) == 1
    (path,) = tmp_path.iterdir()
    for name in ("one", "ep 2 x edp 2", "ep 2 x etp 2", "ep 4, hsdp"):
        other = adamw(tiny_job(MOE, **EXPERTS[name]))
        for loss in forked(world_of(other), load_and_evaluate, other, path):
            assert loss == pytest.approx(next(iter(losses)), rel=1e-12)
