"""Cases of the field on a pipeline: scale of gradients, one norm, tied tables, all layers, uneven micro-batches."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.tiny import floor_of, tiny_batches, tiny_job, worst_error
from torch import Tensor

from heptad.axes.data.shard import Shard
from heptad.axes.pipeline.generate import GENERATORS
from heptad.axes.pipeline.legal import check_job
from heptad.config.schema import Job
from heptad.errors import ConfigError
from heptad.launch.forked import forked
from heptad.mesh.device import Mesh
from heptad.mesh.layout import Layout
from heptad.mesh.piece import Piece
from heptad.models.batch import IGNORED, Batch
from heptad.models.build import build
from heptad.models.spec import Init, ParamSpec
from heptad.optim.norm import clip_, total_norm
from heptad.schedule.action import Action, Kind
from heptad.train.step import Trainer
from heptad.verify.compare import assemble

NAMES = tuple(name for name, generator in GENERATORS.items() if not generator.asynchronous)
CPU = torch.device("cpu")
TABLE = "embed.tokens.weight"
Outcome = tuple[float, float, list[Piece]]
"""Loss, gradient norm, gradients."""


def on_two_ranks(name: str, model: dict[str, Any] | None = None, batch: int = 4, **layout: Any) -> Job:
    return tiny_job({"layers": 4} | (model or {}), global_batch=batch, pp=2, schedule=name, **layout)


def steps(rank: int, runs: list[tuple[Job, list[Batch]]]) -> list[Outcome]:
    """One step of each job; every rank is given all micro-batches."""
    found = []
    for job, batches in runs:
        trainer = Trainer(job, rank, CPU)
        result = trainer.step(1, batches)
        grads = [shard.piece(shard.gradient().clone()) for shard in trainer.engine.shards]
        found.append((result.loss, result.grad_norm, grads))
    return found


def alone(job: Job, batches: list[Batch]) -> tuple[float, float, dict[str, Tensor]]:
    """Loss, norm and gradients of one device by plain autograd, all batches in one loss."""
    model = build(job)
    model.materialise(job.train.seed, CPU, torch.float64)
    loss = torch.stack([model.loss(batch) for batch in batches]).sum() / sum(b.num_targets() for b in batches)
    grads = dict(zip(model.params, torch.autograd.grad(loss, list(model.params.values())), strict=True))
    return loss.item(), math.sqrt(sum(grad.square().sum().item() for grad in grads.values())), grads


def assert_equal(ranks: list[list[Outcome]], at: int, right: tuple[float, float, dict[str, Tensor]]) -> None:
    loss, norm, grads = right
    for report in ranks:
        assert report[at][0] == pytest.approx(loss, rel=1e-12)
        assert report[at][1] == pytest.approx(norm, rel=1e-10)
    whole, split = assemble([report[at][2] for report in ranks])
    assert not split and whole.keys() == grads.keys()
    for name, grad in grads.items():
        error = worst_error(whole[name].flatten(), 0, grad.numel(), grad, floor_of(name, grads))
        assert error <= 1e-10, name


def with_targets(job: Job, number: int) -> list[Batch]:
    """The job's micro-batches with `number` targets in all."""
    found = []
    for batch in tiny_batches(job, 0, 1, 1):
        labels = batch.ids.roll(-1, 1)
        keep = min(number, labels.numel())
        number -= keep
        labels[:, keep:] = IGNORED
        found.append(Batch(batch.ids, labels, batch.positions, batch.documents, batch.index, 1))
    assert number == 0
    return found


def test_c_005_gradients_have_the_scale_of_one_device_under_every_schedule() -> None:
    """4 layers, 2 stages, 4 micro-batches, 37 targets: a backward of the raw sum is 37 times too large."""
    jobs = [on_two_ranks(name) for name in NAMES]
    batches = with_targets(jobs[0], 37)
    assert sum(batch.num_targets() for batch in batches) == 37
    right = alone(jobs[0], batches)
    ranks = forked(2, steps, [(job, batches) for job in jobs])
    for at in range(len(jobs)):
        assert_equal(ranks, at, right)


def test_c_006_the_same_data_three_times_has_the_gradient_of_once() -> None:
    names = ("gpipe", "1f1b", "zbv", "dualpipe")
    once = on_two_ranks("gpipe")
    batches = with_targets(once, 37)
    right = alone(once, batches)
    ranks = forked(2, steps, [(on_two_ranks(name, batch=12), batches * 3) for name in names])
    for at in range(len(names)):
        assert_equal(ranks, at, right)


def clipped(rank: int, p: float) -> tuple[float, float]:
    """(norm, this stage's gradient after clipping to 1) of the gradients [3] and [4] of two stages."""
    mesh = Mesh(Layout.of(tiny_job(pp=2).layout), rank, [("pp",)], CPU)
    spec = ParamSpec(f"blocks.{rank}.weight", (1,), ("width",), "norm", Init("constant", 1.0))
    shard = Shard(spec, 0, 1, torch.ones(1), torch.tensor([3.0 + rank]), None)
    norm = total_norm([shard], p, mesh.group("pp"))
    clip_([shard], 1.0, norm)
    return norm.item(), shard.gradient().item()


@pytest.mark.parametrize(("p", "norm", "after"), [(2.0, 5.0, (0.6, 0.8)), (math.inf, 4.0, (0.75, 1.0))])
def test_c_012_stages_clip_by_one_norm(p: float, norm: float, after: tuple[float, float]) -> None:
    ranks = forked(2, clipped, p)
    assert [report[0] for report in ranks] == [norm, norm]
    assert [report[1] for report in ranks] == pytest.approx(after)


def tied_sum(rank: int, jobs: list[Job]) -> list[set[float]]:
    """Values of the table's summed gradient, where this rank put 1 or 3 (first stage), 5 or 9 (last stage)."""
    found = []
    for job in jobs:
        trainer = Trainer(job, rank, CPU)
        coords = trainer.mesh.layout.coords(rank)
        value = {0: (1.0, 3.0), 1: (5.0, 9.0)}[coords["pp"]][coords["dp_shard"]]
        engine: Any = trainer.engine
        bucket = next(bucket for bucket in engine.buckets if TABLE in bucket.params)
        param = bucket.params[TABLE]
        engine.begin_step()
        shape = (job.model.vocab, job.model.width)
        engine.add(param, torch.full(shape, value, dtype=torch.float64))
        for kind in (Kind.REDUCE, Kind.WAIT_REDUCE):
            engine.act(Action(kind, bucket.spec.index, 0), "backward")
        others = [shard for shard in engine.shards if shard.spec.name != TABLE]
        assert not any(shard.spec.name == TABLE for shard in others)
        engine.finish_grads()
        grads = [shard.gradient() for shard in engine.shards if shard.spec.name == TABLE]
        assert len(grads) == 1
        found.append(set(grads[0].tolist()))
    return found


def test_c_016_a_tied_table_has_one_sum_on_all_its_holders() -> None:
    """Summed over data ranks and over both stages: 1 + 3 + 5 + 9 on every rank, whatever each of them keeps of it."""
    jobs = [
        tiny_job(dict(tied=True), global_batch=4, pp=2, dp_shard=2, zero=zero, schedule="1f1b") for zero in range(4)
    ]
    ranks = forked(4, tied_sum, jobs)
    for report in ranks:
        assert all(values == {18.0} for values in report)


def trained(rank: int, job: Job) -> list[list[tuple[str, list[Piece]]]]:
    """After each of 5 steps, weights and optimizer state of the table on this rank."""
    trainer = Trainer(job, rank, CPU)
    layout, found = trainer.mesh.layout, []
    for step in range(1, 6):
        trainer.step(step, tiny_batches(job, layout.data_rank(rank), layout.data_ranks, step))
        pieces = [piece for piece in trainer.pieces() if TABLE in piece.name]
        found.append(
            [
                (piece.name, [Piece(piece.name, piece.shape, piece.start, piece.stop, piece.tensor.clone())])
                for piece in pieces
            ]
        )
    return found


def test_c_017_copies_follow_one_rule_and_stay_bit_equal() -> None:
    """Decay by role, Muon for matrices of blocks and AdamW for the table, data shards beside two stages."""
    job = tiny_job(dict(tied=True), global_batch=4, pp=2, dp_shard=2, zero=2, schedule="zbh1")
    changes = dict(name="muon", weight_decay=0.1, muon_lr=0.02, lr=0.01)
    job = job.model_copy(update={"optimizer": job.optimizer.model_copy(update=changes)})
    ranks = forked(4, trained, job)
    for step in range(5):
        held = [[piece for _, pieces in report[step] for piece in pieces] for report in ranks]
        names = {piece.name for pieces in held for piece in pieces}
        assert names == {TABLE, f"exp_avg/{TABLE}", f"exp_avg_sq/{TABLE}"}  # one kind of state, named once
        _, split = assemble(held)
        assert not split


def tables(rank: int, jobs: list[Job]) -> list[tuple[int, bool]]:
    """(shards of the table here, whether embedding and head read the very same tensor)."""
    found = []
    for job in jobs:
        trainer = Trainer(job, rank, CPU)
        units: Any = trainer.parallel.model.units
        held = [shard for shard in trainer.engine.shards if shard.spec.name == TABLE]
        same = bool(held) and units[0].tokens.weight is units[-1].out.weight
        found.append((len(held), same))
    return found


def test_c_018_both_uses_of_a_tied_table_on_one_rank_share_one_tensor() -> None:
    """V-shaped: both on rank 0, so nothing is sent for it; else a copy on each of two ranks, with one sum a step."""
    jobs = [on_two_ranks(name, dict(tied=True)) for name in ("zbv", "dualpipev", "interleaved", "dualpipe")]
    counts = forked(2, tables, jobs)
    assert [count for count, _ in counts[0]] == [1, 1, 1, 1] and [count for count, _ in counts[1]] == [0, 0, 1, 1]
    assert counts[0][0][1] and counts[0][1][1]
    batches = tiny_batches(jobs[0], 0, 1, 1)
    ranks = forked(2, steps, [(job, batches) for job in jobs])
    for at in range(len(jobs)):
        assert_equal(ranks, at, alone(jobs[0], batches))


def holds(rank: int, jobs: list[Job]) -> list[dict[str, int]]:
    found = []
    for job in jobs:
        trainer = Trainer(job, rank, CPU)
        found.append({shard.spec.name: shard.spec.numel for shard in trainer.engine.shards})
    return found


def test_c_039_the_stages_of_all_ranks_hold_every_parameter() -> None:
    jobs = [on_two_ranks(name, dict(layers=5)) for name in NAMES]
    jobs += [on_two_ranks(name, dict(layers=5), vpp=2) for name in NAMES if GENERATORS[name].any_chunks]
    specs = build(jobs[0]).specs
    ranks = forked(2, holds, jobs)
    for at, job in enumerate(jobs):
        union = ranks[0][at] | ranks[1][at]
        assert union == {spec.name: spec.numel for spec in specs}
        twice = ranks[0][at].keys() & ranks[1][at].keys()
        assert len(twice) == (len(specs) if job.layout.schedule == "dualpipe" else 0)
    with pytest.raises(ConfigError, match="every stage holds a layer"):
        check_job(tiny_job(dict(layers=3), pp=4))


def rows(batch: Batch, lengths: list[tuple[int, int]]) -> list[Batch]:
    """Micro-batches of (sequences, tokens) from one large batch, at different positions of the global order."""
    found, at = [], 0
    for number, length in lengths:
        cut = slice(at, at + number), slice(0, length)
        parts = (batch.ids, batch.labels, batch.positions, batch.documents, batch.index)
        found.append(Batch(*(part[cut].contiguous() for part in parts), batch.step))
        at += number
    return found


@pytest.mark.parametrize("tensor", [{}, dict(tp=2), dict(tp=2, sequence_parallel=True)], ids=["", "tp", "cut stream"])
def test_c_040_micro_batches_of_different_sizes_and_lengths(tensor: dict[str, Any]) -> None:
    """8 sequences in micro-batches of 3, 3 and 2; then 3 lengths; every stage has the right shapes and weights."""
    job = tiny_job(dict(dropout=0.1), global_batch=3, pp=3, schedule="1f1b", **tensor)
    split = tiny_job(dict(dropout=0.1), global_batch=3, pp=3, schedule="zbh1", **tensor)
    large = tiny_batches(tiny_job(global_batch=8), 0, 1, 1)
    names = ("ids", "labels", "positions", "documents", "index")
    whole = Batch(*(torch.cat([getattr(batch, name) for batch in large]) for name in names), 1)
    uneven, ragged = rows(whole, [(3, 11), (3, 11), (2, 11)]), rows(whole, [(3, 7), (1, 11), (4, 3)])
    world = 3 * tensor.get("tp", 1)
    runs = [(job, uneven), (job, ragged), (split, uneven), (split, ragged)]
    ranks = forked(world, steps, runs)
    for at, (each, batches) in enumerate(runs):
        assert_equal(ranks, at, alone(each, batches))
    with pytest.raises(ConfigError, match="global_batch"):
        bad = job.train.model_copy(update={"global_batch": 8, "micro_batch": 3})
        check_job(job.model_copy(update={"train": bad}))
