"""Training with a context axis: one denominator, tokens counted once, documents apart, runs that go on elsewhere."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.loader.test_loader import equal
from tests.tiny import GPT, floor_of, reference, tiny_batches, tiny_job
from tests.train.test_loop import job as loop_job
from tests.train.test_loop import losses, train
from torch import Tensor

from heptad.axes.context.take import take
from heptad.config.schema import Job
from heptad.launch.forked import forked
from heptad.loader.loader import Loader
from heptad.loader.synthetic import synthetic
from heptad.mesh.layout import Layout
from heptad.mesh.piece import Piece
from heptad.models.batch import IGNORED, Batch
from heptad.models.build import build
from heptad.trace import total
from heptad.train.step import StepResult, Trainer
from heptad.verify.compare import assemble

Options = dict[str, Any]
CPU = torch.device("cpu")
KINDS: dict[str, Options] = {
    "ring": {},
    "contiguous": dict(context_split="contiguous"),
    "ulysses": dict(context="ulysses"),
    "gather": dict(context="gather"),
}
BOTH: Options = dict(cp=4, context="ring+ulysses", cp_ulysses=2)


def of_length(job: Job, length: int) -> Job:
    return job.model_copy(update={"data": job.data.model_copy(update={"seq_len": length})})


def batches_of(job: Job, rank: int, step: int) -> list[Batch]:
    layout = Layout.of(job.layout)
    return tiny_batches(job, layout.data_rank(rank), layout.data_ranks, step)


Steps = tuple[list[StepResult], list[Piece]]


def steps(rank: int, jobs: list[Job], number: int) -> list[Steps]:
    """`number` steps of each job; its parameters after them."""
    found = []
    for job in jobs:
        trainer = Trainer(job, rank, CPU)
        results = [trainer.step(step, batches_of(job, rank, step)) for step in range(1, number + 1)]
        found.append((results, [shard.piece(shard.master.clone()) for shard in trainer.engine.shards]))
    return found


def assert_one_devices(jobs: list[Job], number: int = 3) -> None:
    """Jobs of as many ranks: losses and parameters after SGD."""
    ranks = forked(Layout.of(jobs[0].layout).world, steps, jobs, number, timeout_s=200)
    for at, job in enumerate(jobs):
        right = reference(job, number)
        params, split = assemble([found[at][1] for found in ranks])
        assert not split
        for results, _ in (found[at] for found in ranks):
            for result, one in zip(results, right, strict=True):
                assert result.loss == pytest.approx(one.loss, rel=1e-12)
        for name, value in right[-1].params.items():
            scale = max(value.abs().max().item(), floor_of(name, right[-1].grads))
            assert (params[name] - value).abs().max().item() <= 1e-12 * scale, (job.layout, name)


@pytest.mark.parametrize(("dp", "cp"), [(1, 1), (2, 1), pytest.param(1, 2, marks=pytest.mark.slow), (2, 2)])
def test_c_029_context_ranks_scale_nothing(dp: int, cp: int) -> None:
    """Ragged targets, none in sequence 0: three SGD steps equal those of one device, stage 0 and 3."""
    kinds = list(KINDS.values()) if cp > 1 else [{}]
    jobs = [tiny_job(dp_shard=dp, cp=cp, zero=3, **kind) for kind in kinds]
    assert_one_devices([tiny_job(dp_shard=dp, cp=cp, zero=0), *jobs])


@pytest.mark.parametrize("length", [29, pytest.param(7, marks=pytest.mark.slow), 6])
def test_c_030_a_length_that_four_ranks_do_not_divide(length: int) -> None:
    """29, and less than two tokens a rank: padded to a multiple of 4, equal to one rank."""
    layouts: list[Options] = [dict(cp=4, **kind) for kind in KINDS.values()] + [BOTH]
    jobs = [tiny_job(**layout) for layout in layouts] + [tiny_job(GPT | dict(kv_heads=4), **BOTH)]
    assert_one_devices([of_length(job, length) for job in jobs], 1)


def one_step(rank: int, jobs: list[Job]) -> list[StepResult]:
    return [Trainer(job, rank, CPU).step(1, batches_of(job, rank, 1)) for job in jobs]


@pytest.mark.parametrize(
    "axes", [dict(cp=2), dict(tp=2), dict(pp=2), dict(cp=2, tp=2), dict(cp=2, pp=2), dict(tp=2, pp=2)]
)
def test_c_123_tokens_count_once(axes: Options) -> None:
    """Two data ranks of 4 sequences of 16 tokens: 128 a step, targets apart, whatever shares a sequence."""
    kinds = KINDS.values() if "cp" in axes else ({},)
    jobs = [of_length(tiny_job(dp_shard=2, **axes, **kind), 16) for kind in kinds]
    targets = sum(batch.num_targets() for batch in tiny_batches(jobs[0], 0, 1, 1))
    for results in forked(Layout.of(jobs[0].layout).world, one_step, jobs, timeout_s=200):
        assert {(result.num_tokens, result.num_targets) for result in results} == {(128, targets)}


def perturbed(rank: int, jobs: list[Job], batch: Batch, other: Batch) -> list[tuple[Tensor, Tensor]]:
    """Logits of both batches under each job."""
    found = []
    for job in jobs:
        trainer = Trainer(job, rank, CPU)
        found.append((trainer.logits(batch), trainer.logits(other)))
    return found


def documents_of(*lengths: int) -> Batch:
    """One row of documents."""
    documents = torch.tensor([[number for number, size in enumerate(lengths) for _ in range(size)]])
    positions = torch.tensor([[place for size in lengths for place in range(size)]])
    ids = torch.arange(documents.numel()).view(1, -1) * 5 % 37
    labels = torch.full_like(ids, IGNORED)
    return Batch(ids, labels, positions, documents, torch.arange(ids.numel()).view(1, -1), step=1)


APART: dict[int, list[Options]] = {
    2: [dict(cp=2, **kind) for kind in KINDS.values()],
    3: [dict(cp=3, context="gather"), dict(cp=3)],
    4: [BOTH, dict(cp=2, tp=2, sequence_parallel=True), dict(cp=4), dict(cp=2, pp=2), dict(cp=4, context="ulysses")],
    8: [dict(cp=2, tp=2, pp=2), BOTH | dict(dp_shard=2)],
}


@pytest.mark.parametrize("ranks", APART)
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_c_126_c_127_another_document_changes_no_bit(ranks: int, recompute: str) -> None:
    """Tokens of one document change: logits of the others do not, its own do; and they are one device's."""
    models: list[Options] = [dict(attention="flash"), dict(attention="math"), dict(window=4)]
    jobs = [
        tiny_job(models[at % 3], recompute=recompute, global_batch=8, **layout)
        for at, layout in enumerate(APART[ranks] if recompute == "none" else APART[ranks][:1])
    ]
    batch = documents_of(6, 9, 4)
    ids = batch.ids.clone()
    ids[:, 6:15] = (ids[:, 6:15] + 11) % 37
    other = replace(batch, ids=ids)
    alone = []
    for job in jobs:
        model = build(job)
        model.materialise(job.train.seed, CPU, torch.float64)
        alone.append(model.module.logits(batch))  # type: ignore[operator]
    for found in forked(ranks, perturbed, jobs, batch, other, timeout_s=200):
        for (before, after), right in zip(found, alone, strict=True):
            assert torch.equal(before[:, :6], after[:, :6]) and torch.equal(before[:, 15:], after[:, 15:])
            assert not torch.equal(before[:, 6:15], after[:, 6:15])
            assert (before - right).abs().max() <= 1e-12 * right.abs().max()


def test_c_131_peers_of_a_data_rank_read_the_same_batches_and_hold_each_token_once() -> None:
    """What a rank's Loader is built from: (2 data, 2 context, 2 tensor, 1 pipeline) ranks."""
    job = tiny_job(dp_shard=2, cp=2, tp=2)
    layout, data = Layout.of(job.layout), synthetic(job)
    read: dict[int, list[list[Batch]]] = {}
    for rank in range(layout.world):
        loader = Loader(job, layout.data_rank(rank), layout.data_ranks, data)
        read.setdefault(layout.data_rank(rank), []).append([*loader.step(0), *loader.step(1)])
    assert {place: len(peers) for place, peers in read.items()} == {0: 4, 1: 4}
    assert all(equal(peers[0], other) for peers in read.values() for other in peers[1:])
    seen = [batch.index.flatten().tolist() for peers in read.values() for batch in peers[0]]
    numbers = [number for some in seen for number in some]
    assert len(set(numbers)) == len(numbers) == 2 * job.train.global_batch * job.data.seq_len  # data ranks: disjoint
    for batch in read[0][0]:
        parts = [take(batch, job.layout, place).index.flatten().tolist() for place in range(2)]
        held = [number for part in parts for number in part if number >= 0]
        assert sorted(held) == batch.index.flatten().tolist()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, float]]:
    """Six steps on one rank."""
    folder = tmp_path_factory.mktemp("whole")
    (outcome,) = forked(1, train, loop_job(folder), timeout_s=200)
    assert outcome.tokens == 6 * 6 * 11
    return folder, losses(folder)


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        (dict(cp=2, zero=3), dict(dp_shard=2, zero=1)),
        (dict(cp=3, context="gather", zero=2), dict(cp=2, pp=2)),
        (dict(dp_shard=2, zero=3), BOTH | dict(zero=3)),
    ],
)
def test_c_140_samples_are_consumed_once_and_any_layout_goes_on(
    saved: Options, loaded: Options, whole: tuple[Path, dict[int, float]], tmp_path: Path
) -> None:
    """Stopped after step 3 of 6 sequences each: 18 samples, 198 tokens; the next losses are the uninterrupted run's."""
    _, right = whole
    for layout, stop in ((saved, 3), (loaded, None)):
        job = loop_job(tmp_path, layout=layout, checkpoint=dict(every=3))
        for outcome in forked(Layout.of(job.layout).world, train, job, stop, timeout_s=200):
            assert outcome.stopped is (stop is not None)
            assert outcome.tokens == (3 if stop else 6) * 6 * 11
            assert outcome.predicted is not None and total(outcome.predicted) == total(outcome.transfers)
        (meta,) = (json.loads(path.read_text()) for path in tmp_path.rglob(f"step-*{stop or 6}*/meta.json"))
        assert meta["meta"]["loader"]["samples"] == (stop or 6) * 6
        found = losses(tmp_path)
        assert found == {step: pytest.approx(right[step], rel=1e-9) for step in range(1, (stop or 6) + 1)}
