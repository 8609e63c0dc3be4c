"""Ranks that start apart are stopped at once."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.tiny import tiny_job

from heptad.checkpoint.find import scan
from heptad.config.schema import Job
from heptad.launch.forked import RankFailed, forked
from heptad.loader.loader import Loader
from heptad.loader.synthetic import synthetic
from heptad.train.agreement import fingerprint, require_same, require_same_program, require_same_replicas
from heptad.train.runfolder import open_folder
from heptad.train.state import Counts, save_state
from heptad.train.step import Trainer


def start(rank: int, job: Job, perturbed: int, name: str = "") -> None:
    """The last bit of `name` (a piece; by default the last weight) changes on one rank."""
    trainer = Trainer(job, rank, torch.device("cpu"))
    if rank == perturbed:
        pieces = {piece.name: piece for piece in trainer.pieces()}
        piece = pieces[name or trainer.engine.shards[-1].spec.name]
        piece.tensor[-1:].view(torch.int64).bitwise_xor_(1)
    require_same_replicas(trainer)


@pytest.mark.parametrize("layout", [dict(zero=3, dp_replicate=2, dp_shard=2), dict(zero=0, dp_shard=4)])
def test_c_024_a_perturbed_replica_fails_loudly(layout: dict[str, int]) -> None:
    job = tiny_job(**layout)
    forked(4, start, job, -1)
    with pytest.raises(RankFailed, match=r"replicas of head\.out\.weight differ between rank 0 and others"):
        forked(4, start, job, 2)


# All tensor ranks hold the norms and, 4 of them, two each kv head. Data axes are outermost: rank 3 of 2 × 2 is (1, 1).
TENSOR = [
    (4, dict(tp=4, zero=0), 2, "head.norm.weight", 0),
    (4, dict(tp=4, zero=0), 3, "blocks.1.attention.k.weight", 2),
    (4, dict(tp=2, dp_shard=2, zero=3), 3, "blocks.0.mlp.norm.weight", 2),
    (4, dict(tp=2, dp_replicate=2, zero=1), 3, "blocks.0.mlp.up.weight", 1),
    (8, dict(tp=4, dp_shard=2, zero=2), 1, "blocks.2.attention.v.weight", 0),
]


@pytest.mark.parametrize(("ranks", "layout", "perturbed", "name", "first"), TENSOR)
def test_c_036_a_parted_copy_on_a_tensor_rank_is_named_on_every_rank(
    ranks: int, layout: dict[str, int], perturbed: int, name: str, first: int
) -> None:
    job = tiny_job(**layout)
    forked(ranks, start, job, -1)
    with pytest.raises(RankFailed, match=rf"replicas of {name} differ between rank {first} and others"):
        forked(ranks, start, job, perturbed, name)


# Experts: other ones on the ranks of ep, other rows on those of etp, copies on those of edp and dp_replicate.
EXPERTS = [
    (4, dict(dp_shard=4, ep=2, zero=0), 3, "blocks.1.mlp.experts.up.weight", 1),
    (4, dict(dp_shard=2, tp=2, ep=2, zero=0), 2, "blocks.1.mlp.experts.down.weight", 0),
    (4, dict(dp_replicate=2, dp_shard=2, etp=2, zero=3), 3, "blocks.1.mlp.experts.gate.weight", 1),
    (2, dict(tp=2, ep=2, zero=1), 1, "blocks.1.mlp.router.gate.weight", 0),
]


@pytest.mark.parametrize(("ranks", "layout", "perturbed", "name", "first"), EXPERTS)
def test_copies_of_an_expert_are_compared_and_no_others(
    ranks: int, layout: dict[str, int], perturbed: int, name: str, first: int
) -> None:
    job = tiny_job(dict(layers=2, experts=4, expert_width=7, dense_layers=1), **layout)
    forked(ranks, start, job, -1)
    with pytest.raises(RankFailed, match=rf"replicas of {name} differ between rank {first} and others"):
        forked(ranks, start, job, perturbed, name)


def test_c_036_optimizer_state_of_copies_is_compared_too() -> None:
    job = tiny_job(tp=2, zero=0)
    adamw = job.optimizer.model_copy(update={"name": "adamw"})
    job = job.model_copy(update={"optimizer": adamw})
    with pytest.raises(RankFailed, match=r"replicas of exp_avg_sq/head\.norm\.weight differ between rank 0"):
        forked(2, start, job, 1, "exp_avg_sq/head.norm.weight")


# A tied table is on the first and the last stage; the twins of DualPipe hold each stage twice; others are not shared.
PIPELINE = [
    (2, dict(tied=True), dict(pp=2, zero=1), 1, "embed.tokens.weight", 0),
    (4, {}, dict(pp=2, dp_shard=2, zero=0), 3, "blocks.2.mlp.up.weight", 2),
    (4, {}, dict(pp=2, tp=2, zero=3), 3, "blocks.2.mlp.norm.weight", 2),
    (4, dict(layers=4), dict(pp=4, zero=3, schedule="dualpipe"), 3, "blocks.0.mlp.up.weight", 0),
]


@pytest.mark.parametrize(("ranks", "model", "layout", "perturbed", "name", "first"), PIPELINE)
def test_c_039_a_parted_copy_along_a_pipeline_stops_every_rank(
    ranks: int, model: dict[str, Any], layout: dict[str, Any], perturbed: int, name: str, first: int
) -> None:
    job = tiny_job(model, **layout)
    forked(ranks, start, job, -1)
    named = rf"replicas of ({name}|a tensor at place \d of the pipeline) differ between rank [{first}{perturbed}] and"
    with pytest.raises(RankFailed, match=named):
        forked(ranks, start, job, perturbed, name)


def save(rank: int, job: Job, perturbed: bool) -> None:
    device = torch.device("cpu")
    trainer, loader = Trainer(job, rank, device), Loader(job, 0, 1, synthetic(job))
    folder = open_folder(job, trainer.loss_group, device)
    if perturbed and rank == 1:
        next(piece for piece in trainer.pieces() if piece.name == "head.norm.weight").tensor[0] += 1e-3
    save_state(trainer, loader, folder, Counts(1), trainer.loss_group)


def test_c_036_a_checkpoint_of_parted_replicas_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    job = tiny_job(tp=2, zero=0, dp_shard=1)
    job = job.model_copy(update={"log": job.log.model_copy(update={"dir": str(tmp_path), "name": "run"})})
    forked(2, save, job, False)
    (kept,) = scan(tmp_path / "run" / "checkpoints").of_run(None)
    assert kept.step == 1
    shutil.rmtree(kept.path)
    with pytest.raises(RankFailed, match=r"Disagreement: replicas of head\.norm\.weight differ"):
        forked(2, save, job, True)
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []


def compare(rank: int, digests: list[int]) -> None:
    job = tiny_job(zero=0, dp_shard=len(digests))
    group = Trainer(job, rank, torch.device("cpu")).loss_group
    require_same("the tokens", digests[rank], group, torch.device("cpu"), "give every node the same files")


def test_c_131_ranks_with_other_tokens_are_named() -> None:
    forked(2, compare, [7, 7])
    with pytest.raises(RankFailed, match="the tokens differ between ranks 0, 1: give every node the same files"):
        forked(2, compare, [7, 8])


def other_program(rank: int, pp: int = 1, other: int = 1) -> None:
    trainer = Trainer(tiny_job(zero=3, dp_shard=2, pp=pp, prefetch=int(rank == other)), rank, torch.device("cpu"))
    require_same_program(trainer)


def test_ranks_with_another_program_are_stopped_before_the_first_step() -> None:
    with pytest.raises(RankFailed, match="the step's programs differ between ranks 0, 1"):
        forked(2, other_program)
    forked(4, other_program, 2, -1)
    with pytest.raises(RankFailed, match="the step's programs differ between ranks 2, 3"):
        forked(4, other_program, 2, 3)


def test_a_fingerprint_sees_bits_and_places() -> None:
    values = torch.arange(5, dtype=torch.float64)
    assert fingerprint(values) == fingerprint(values.clone())
    assert fingerprint(values) != fingerprint(values.flip(0))
    assert fingerprint(torch.tensor([0.0])) != fingerprint(torch.tensor([-0.0]))
    assert fingerprint(torch.ones(3, dtype=torch.bfloat16)) != fingerprint(torch.ones(4, dtype=torch.bfloat16))
    assert fingerprint(torch.empty(0)) == 0
