"""Ranks that start apart are stopped at once."""

from __future__ import annotations

import pytest
import torch
from tests.tiny import tiny_job

from heptad.config.schema import Job
from heptad.launch.forked import RankFailed, forked
from heptad.train.agreement import fingerprint, require_same, require_same_program, require_same_replicas
from heptad.train.step import Trainer


def start(rank: int, job: Job, perturbed: int) -> None:
    trainer = Trainer(job, rank, torch.device("cpu"))
    if rank == perturbed:
        trainer.engine.shards[-1].master[-1] += 1e-3
    require_same_replicas(trainer)


@pytest.mark.parametrize("layout", [dict(zero=3, dp_replicate=2, dp_shard=2), dict(zero=0, dp_shard=4)])
def test_c_024_a_perturbed_replica_fails_loudly(layout: dict[str, int]) -> None:
    job = tiny_job(**layout)
    forked(4, start, job, -1)
    with pytest.raises(RankFailed, match="replicas' weights differ between ranks"):
        forked(4, start, job, 2)


def compare(rank: int, digests: list[int]) -> None:
    job = tiny_job(zero=0, dp_shard=len(digests))
    group = Trainer(job, rank, torch.device("cpu")).loss_group
    require_same("the tokens", digests[rank], group, torch.device("cpu"), "give every node the same files")


def test_c_131_ranks_with_other_tokens_are_named() -> None:
    forked(2, compare, [7, 7])
    with pytest.raises(RankFailed, match="the tokens differ between ranks 0, 1: give every node the same files"):
        forked(2, compare, [7, 8])


def other_program(rank: int) -> None:
    trainer = Trainer(tiny_job(zero=3, dp_shard=2, prefetch=rank), rank, torch.device("cpu"))
    require_same_program(trainer)


def test_ranks_with_another_program_are_stopped_before_the_first_step() -> None:
    with pytest.raises(RankFailed, match="the step's programs differ between ranks 0, 1"):
        forked(2, other_program)


def test_a_fingerprint_sees_bits_and_places() -> None:
    values = torch.arange(5, dtype=torch.float64)
    assert fingerprint(values) == fingerprint(values.clone())
    assert fingerprint(values) != fingerprint(values.flip(0))
    assert fingerprint(torch.tensor([0.0])) != fingerprint(torch.tensor([-0.0]))
    assert fingerprint(torch.ones(3, dtype=torch.bfloat16)) != fingerprint(torch.ones(4, dtype=torch.bfloat16))
    assert fingerprint(torch.empty(0)) == 0
