"""Training with a tensor axis: one loss for all ranks, equal replicas, runs that go on under other degrees."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.tiny import GPT, reference, tiny_batches, tiny_job
from tests.train.test_loop import losses, train

from heptad.config.schema import Job
from heptad.launch.forked import RankFailed, forked
from heptad.mesh.layout import Layout
from heptad.models.batch import Batch
from heptad.trace import total
from heptad.train.agreement import require_same_replicas
from heptad.train.outcome import Outcome
from heptad.train.step import StepResult, Trainer

Options = dict[str, Any]
CPU = torch.device("cpu")


def batches_of(job: Job, rank: int, step: int) -> list[Batch]:
    layout = Layout.of(job.layout)
    return tiny_batches(job, layout.data_rank(rank), layout.data_ranks, step)


def world_of(job: Job) -> int:
    return Layout.of(job.layout).world


def poison(trainer: Trainer) -> None:
    """This rank's losses are nan from now on, and so are its gradients."""
    head = trainer.parallel.model.units[-1]
    forward = type(head).forward
    head.forward = lambda x, batch: forward(head, x, batch) * math.nan  # type: ignore[method-assign]


def steps(rank: int, job: Job, asks: int, sick: tuple[int, ...]) -> tuple[list[StepResult], float]:
    """Two steps, then an evaluation. Rank `asks` asks to stop in step 2; the losses of `sick` ranks are nan there."""
    trainer = Trainer(job, rank, CPU)
    results = []
    for step in (1, 2):
        if step == 2 and rank in sick:
            poison(trainer)
        results.append(trainer.step(step, batches_of(job, rank, step), stop=step == 2 and rank == asks))
    return results, 0.0 if sick else trainer.evaluate(batches_of(job, rank, 3))


DEFAULT = "pp-dp_replicate-dp_shard-cp-tp"
OUTSIDE = "tp-pp-dp_shard-cp-dp_replicate"


@pytest.fixture(scope="module")
def alone() -> tuple[list[StepResult], float]:
    """The same steps on one rank."""
    found: tuple[list[StepResult], float] = forked(1, steps, tiny_job(), -1, ())[0]
    return found


@pytest.mark.parametrize(
    ("layout", "asks"),
    [
        (dict(tp=2, zero=0), 1),
        (dict(tp=4, zero=1), 2),
        (dict(tp=2, dp_shard=2, zero=3), 3),
        (dict(tp=2, dp_shard=2, zero=3, order=OUTSIDE), 0),
    ],
)
def test_loss_targets_and_tokens_count_once(layout: Options, asks: int, alone: tuple[list[StepResult], float]) -> None:
    """Whichever rank asks to stop, one that adds no loss too."""
    job = tiny_job(**layout)
    want = reference(job, 2)
    for results, value in forked(world_of(job), steps, job, asks, ()):
        assert [result.stop for result in results] == [False, True]
        assert value == pytest.approx(alone[1], rel=1e-12)
        for result, right, single in zip(results, want, alone[0], strict=True):
            assert result.loss == pytest.approx(right.loss, rel=1e-12)
            assert result.grad_norm == pytest.approx(single.grad_norm, rel=1e-12)
            assert (result.num_tokens, result.num_targets) == (single.num_tokens, single.num_targets)
            assert result.num_tokens == 8 * 11 and not result.skipped


@pytest.mark.parametrize(("order", "sick", "first"), [(DEFAULT, (2, 3), 2), (OUTSIDE, (1, 3), 1)])
def test_c_096_the_first_rank_of_the_sick_data_rank_is_named(order: str, sick: tuple[int, ...], first: int) -> None:
    """Both tensor ranks of data rank 1; the loss of the whole is nan though one of them adds zero."""
    job = tiny_job(order=order, tp=2, dp_shard=2, zero=2)
    for results, _ in forked(4, steps, job, -1, sick):
        assert [result.skipped for result in results] == [False, True] and math.isnan(results[1].loss)
        assert results[1].bad_rank == first


Grads = dict[str, tuple[int, int, torch.Tensor]]


def ten_steps(rank: int, job: Job) -> Grads:
    """Gradients of step 1; replicas are compared after each of ten steps."""
    trainer = Trainer(job, rank, CPU)
    grads: Grads = {}
    for step in range(1, 11):
        trainer.step(step, batches_of(job, rank, step))
        if step == 1:
            grads = {s.spec.name: (s.start, s.stop, s.gradient().clone()) for s in trainer.engine.shards}
        require_same_replicas(trainer)
    return grads


QWEN = dict(qk_norm=True)


@pytest.mark.parametrize(
    ("model", "name", "layout"),
    [
        (GPT, "adamw", dict(tp=2, zero=0)),
        (QWEN, "muon", dict(tp=4, zero=0)),
        (QWEN, "adamw", dict(tp=2, dp_shard=2, zero=3)),
        (GPT, "muon", dict(tp=2, dp_replicate=2, zero=1)),
    ],
)
def test_c_036_replicated_gradients_are_the_sum_and_weights_stay_equal(
    model: Options, name: str, layout: Options
) -> None:
    job = tiny_job(model, global_batch=4, sequence_parallel=True, **layout)
    right = reference(job, 1)[0].grads
    chosen = {"name": name, "lr": 0.01, "weight_decay": 0.1}
    job = job.model_copy(update={"optimizer": job.optimizer.model_copy(update=chosen)})
    seen: dict[tuple[str, int, int], torch.Tensor] = {}
    for grads in forked(world_of(job), ten_steps, job):
        for param, (start, stop, grad) in grads.items():
            want = right[param].flatten()[start:stop]
            torch.testing.assert_close(grad, want, rtol=1e-10, atol=1e-12, msg=param)
            assert torch.equal(seen.setdefault((param, start, stop), grad), grad), param


def without_the_sum(rank: int, job: Job) -> None:
    trainer = Trainer(job, rank, CPU)
    trainer.engine.finish_grads = lambda: None  # type: ignore[method-assign]
    trainer.step(1, batches_of(job, rank, 1))
    require_same_replicas(trainer)


def test_c_036_a_norm_whose_gradient_is_not_summed_parts_the_replicas() -> None:
    with pytest.raises(RankFailed, match=r"replicas of blocks\.0\.attention\.norm\.weight differ between rank 0"):
        forked(2, without_the_sum, tiny_job(tp=2, zero=0, sequence_parallel=True))


STEPS, SAVED = 8, 3


def run_job(folder: Path, resume: str = "auto", model: Options | None = None, **layout: Any) -> Job:
    plain = tiny_job(model, global_batch=4, **layout).model_dump(by_alias=True)
    plain["train"] |= {"steps": STEPS, "val_every": 4, "val_batches": 1, "sample_tokens": 5}
    plain["checkpoint"] |= {"every": 100, "resume": resume}
    plain["log"] |= {"dir": str(folder), "name": "run", "tensorboard": False}
    plain["optimizer"] |= {"name": "muon", "lr": 0.02, "schedule": "cosine", "warmup_steps": 2, "clip_norm": 0.5}
    return Job.model_validate(plain)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[int, float], Outcome]:
    """The uninterrupted run on one rank: losses, outcome."""
    folder = tmp_path_factory.mktemp("whole")
    (outcome,) = forked(1, train, run_job(folder))
    return losses(folder), outcome


# C-057's pairs, and copied kv heads, sequence parallelism and another order on the way.
MOVES: list[tuple[Options, list[Options]]] = [
    (dict(tp=2, zero=0), [dict(zero=3), dict(tp=2, dp_shard=2, zero=3), dict(tp=4, zero=1)]),
    (dict(zero=3), [dict(tp=2, zero=0), dict(tp=4, zero=3, sequence_parallel=True), dict(pp=2, zero=2, dp_shard=2)]),
    (dict(pp=2, zero=1), [dict(zero=3), dict(pp=3, zero=3, schedule="zbh1"), dict(tp=2, pp=2, zero=0)]),
    (dict(pp=2, zero=3, schedule="dualpipe"), [dict(dp_shard=2, zero=3), dict(pp=2, zero=1, schedule="gpipe")]),
    (dict(dp_shard=2, zero=1), [dict(dp_shard=4, zero=1), dict(tp=2, dp_shard=2, zero=1)]),
    (
        dict(tp=2, dp_shard=2, zero=2, sequence_parallel=True),
        [dict(zero=3), dict(dp_shard=4, zero=3), dict(tp=4, zero=0), dict(tp=2, dp_replicate=2, zero=3, order=OUTSIDE)],
    ),
]


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [pytest.param(*move, marks=[] if at in (0, 3, 4) else pytest.mark.slow) for at, move in enumerate(MOVES)],
)
def test_c_057_the_next_five_losses_are_the_uninterrupted_runs(
    whole: tuple[dict[int, float], Outcome], saved: Options, loaded: list[Options], tmp_path: Path
) -> None:
    """Muon and AdamW state; the last rank, which adds no loss with a tensor axis, asks to stop after step 3."""
    want, alone = whole
    job = run_job(tmp_path / "saved", **saved)
    stopped = forked(world_of(job), train, job, SAVED)
    assert [(outcome.stopped, outcome.steps) for outcome in stopped] == [(True, SAVED)] * world_of(job)
    for number, layout in enumerate(loaded):
        folder = tmp_path / f"loaded-{number}"
        shutil.copytree(tmp_path / "saved", folder)
        again = run_job(folder, "must", **layout)
        outcomes = forked(world_of(again), train, again)
        assert losses(folder) == pytest.approx(want, rel=1e-10), layout
        for outcome in outcomes:
            assert (outcome.tokens, outcome.targets) == (alone.tokens, alone.targets)
            assert outcome.val_loss == pytest.approx(alone.val_loss, rel=1e-10)
            assert outcome.predicted is not None and total(outcome.predicted) == total(outcome.transfers), layout


@pytest.mark.parametrize("layout", [dict(tp=2, zero=0), dict(tp=2, dp_shard=2, zero=3, sequence_parallel=True)])
def test_text_is_the_same_on_all_tensor_ranks_and_the_single_processs(
    whole: tuple[dict[int, float], Outcome], layout: Options, tmp_path: Path
) -> None:
    """Every rank takes part in each forward of the sample; ids never come from the padded vocabulary."""
    job = run_job(tmp_path, **layout)
    outcomes = forked(world_of(job), train, job)
    samples = [outcome.sample for outcome in outcomes]
    axes = Layout.of(job.layout)
    for rank, sample in enumerate(samples):
        assert sample == samples[axes.rank_of({**axes.coords(rank), "tp": 0})]
        assert all(0 <= int(token) < job.model.vocab for token in sample.split())
    assert samples[0] == whole[1].sample
    assert losses(tmp_path) == pytest.approx(whole[0], rel=1e-10)
