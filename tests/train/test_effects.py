"""Options of [optimizer] that the step reads take effect under each engine."""

from __future__ import annotations

import math

import pytest
import torch
from tests.tiny import tiny_batches, tiny_job

from heptad.launch.forked import forked
from heptad.models.decoder import loss_sum
from heptad.train.step import NonFinite, StepResult, Trainer


def one_step(
    rank: int, engine: str, clip_norm: float | None, nonfinite: str, poison: bool
) -> tuple[list[list[float]], StepResult | str]:
    job = tiny_job(dp_shard=2, engine=engine)
    options = {"clip_norm": clip_norm, "nonfinite": nonfinite}
    job = job.model_copy(update={"optimizer": job.optimizer.model_copy(update=options)})
    trainer = Trainer(job, rank, torch.device("cpu"))
    if poison:
        next(shard for shard in trainer.engine.shards if shard.stop > shard.start).master[0] = math.nan
        trainer.engine.refresh()
    try:
        result: StepResult | str = trainer.step(1, tiny_batches(job, rank, 2, 1))
    except NonFinite as error:
        result = str(error)
    return [shard.master.tolist() for shard in trainer.engine.shards], result


@pytest.mark.parametrize("engine", ["heptad", "fsdp2"])
def test_c_120_clipping_takes_effect_in_each_engine(engine: str) -> None:
    free = forked(2, one_step, engine, None, "skip", False)
    clipped = forked(2, one_step, engine, 1e-3, "skip", False)
    for (loose, before), (tight, after) in zip(free, clipped, strict=True):
        assert loose != tight
        assert isinstance(before, StepResult) and isinstance(after, StepResult)
        assert before.clip_factor == 1.0 and after.clip_factor == pytest.approx(1e-3 / after.grad_norm, rel=1e-12)
        assert before.grad_norm == after.grad_norm  # both are from before clipping


def test_c_120_nonfinite_skips_or_raises_on_every_rank() -> None:
    for masters, result in forked(2, one_step, "heptad", 1.0, "skip", True):
        assert isinstance(result, StepResult) and result.skipped and sum(map(len, masters)) > 0
    for _, result in forked(2, one_step, "heptad", 1.0, "raise", True):
        assert isinstance(result, str) and "step 1" in result


def loss_by_logits(rank: int, engine: str) -> tuple[float, float]:
    """Sum of losses of a batch after one step and after two, from the logits that a sample of text asks for."""
    job = tiny_job(dp_shard=2, engine=engine)
    trainer = Trainer(job, rank, torch.device("cpu"))
    batch = tiny_batches(job, rank, 2, 1)[1]
    trainer.step(1, tiny_batches(job, rank, 2, 1))
    before = loss_sum(trainer.logits(batch), batch.labels).item()
    trainer.step(2, tiny_batches(job, rank, 2, 2))  # nothing is left gathered
    after = loss_sum(trainer.logits(batch), batch.labels).item()
    return before, after


def test_logits_are_those_of_the_weights_under_each_engine() -> None:
    for found, wanted in zip(*(forked(2, loss_by_logits, engine) for engine in ("fsdp2", "heptad")), strict=True):
        assert found == pytest.approx(wanted, rel=1e-12)
