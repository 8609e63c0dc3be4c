"""Cases of the field on the tensor axis: masks of dropout, decisions that recompute repeats, initial values, heads."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.tiny import floor_of, reference, tiny_batches, tiny_job, worst_error
from tests.verify.test_cases import Outcome, initial, step_on, whole
from torch import Tensor

from heptad.config.check import problems
from heptad.config.schema import Job
from heptad.launch.forked import forked
from heptad.mesh.piece import Piece
from heptad.models.batch import Batch
from heptad.models.dropout import Dropout
from heptad.train.step import Trainer
from heptad.verify.compare import assemble

TOKENS = 8


def tokens(step: int) -> Batch:
    """One sequence of 8 tokens."""
    zeros, places = torch.zeros(1, TOKENS, dtype=torch.int64), torch.arange(TOKENS).view(1, -1)
    return Batch(zeros, zeros, places, zeros, 100 + places, step)


def ones_dropped(rank: int, job: Job) -> dict[str, Tensor]:
    """What each dropout of the stream makes of ones, on this rank's rows of 8 tokens."""
    trainer = Trainer(job, rank, torch.device("cpu"))
    module: Any = trainer.parallel.model.module
    batch = tokens(1)
    ones = module.embed.stream.local(torch.ones(1, TOKENS, job.model.width, dtype=torch.float64))
    block = module.blocks[0]
    return {
        "attention": block._dropped(ones, block.attention_dropout, batch),
        "mlp": block._dropped(ones, block.mlp_dropout, batch),
    }


def test_c_020_parts_of_the_stream_drop_other_elements_and_whole_ones_the_same() -> None:
    """Together the parts drop what one device drops."""
    model = {"dropout": 0.5, "layers": 1}
    alone = ones_dropped(0, tiny_job(model))
    whole_stream = forked(2, ones_dropped, tiny_job(model, tp=2))
    cut = forked(2, ones_dropped, tiny_job(model, tp=2, sequence_parallel=True))
    for site, right in alone.items():
        assert set(right.unique().tolist()) == {0.0, 2.0}
        assert torch.equal(whole_stream[0][site], right) and torch.equal(whole_stream[1][site], right)
        assert cut[0][site].shape == (TOKENS // 2, right.shape[-1]) and not torch.equal(cut[0][site], cut[1][site])
        assert torch.equal(torch.cat([rank[site] for rank in cut]), right[0])


@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "cut"])
def test_c_020_masks_come_again_in_a_recomputed_forward(sequence: bool) -> None:
    found = []
    for mode in ("none", "selective", "full"):
        model = {"layers": 2, "dropout": 0.5, "attention_dropout": 0.5}
        job = tiny_job(model, 2, mode, tp=2, sequence_parallel=sequence)
        found.append(forked(2, step_on, job, [tiny_batches(job, 0, 1, 1)] * 2))
    for plain, *others in zip(*found, strict=True):
        for again in others:
            assert plain[0] == again[0]
            for a, b in zip(plain[1] + plain[2], again[1] + again[2], strict=True):
                assert torch.equal(a.tensor, b.tensor), a.name


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_c_023_a_forward_that_runs_again_decides_the_same_over_100_seeds(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a forward decides for each element is what is dropped: every mask drawn in a backward was drawn before.

    Routing, the other decision of this kind (tied logits, tokens per expert), has its test with the expert axis.
    """
    decided: dict[str, dict[str, Tensor]] = {"forward": {}, "backward": {}}
    running: list[Trainer] = []
    features, scores = Dropout.features, Dropout.attention_map

    def note(site: str, mask: Tensor) -> None:
        masks = decided[running[-1].parallel.executor.phase]
        assert site not in masks  # once in each
        masks[site] = mask

    def seen_features(self: Dropout, x: Tensor, *key: Any) -> Tensor:
        note(self.site, features(self, torch.ones_like(x), *key))
        return features(self, x, *key)

    def seen_scores(self: Dropout, heads: int, *key: Any) -> Any:
        tensors, drop = scores(self, heads, *key)
        queries, keys = key[:2]
        note(self.site, drop(torch.ones(len(queries), heads, queries.shape[1], keys.shape[1]), *tensors))
        return tensors, drop

    monkeypatch.setattr(Dropout, "features", seen_features)
    monkeypatch.setattr(Dropout, "attention_map", seen_scores)
    again = {"full": {"blocks.0.attention", "blocks.0.mlp", "blocks.0.scores"}, "selective": {"blocks.0.scores"}}
    for seed in range(100):
        job = tiny_job({"layers": 1, "dropout": 0.5, "attention_dropout": 0.5}, 1, mode)
        job = job.model_copy(update={"train": job.train.model_copy(update={"seed": seed})})
        running.append(Trainer(job, 0, torch.device("cpu")))
        decided["forward"].clear()
        decided["backward"].clear()
        running[-1].step(1, [tokens(seed)])
        assert set(decided["backward"]) == again[mode] < set(decided["forward"])
        assert all(torch.equal(decided["forward"][site], mask) for site, mask in decided["backward"].items()), seed


@pytest.mark.parametrize(
    "layout", [dict(tp=4), dict(tp=2, dp_shard=2, zero=0, sequence_parallel=True)], ids=["4", "2x2"]
)
def test_c_025_initial_values_are_those_of_one_device_however_they_are_cut(layout: dict[str, Any]) -> None:
    """A row linear's fan-in is cut: its local size plays no part in the spread, nor does it start anew on each rank."""
    model = {"mlp_width": 509, "layers": 1, "init_std": 0.02}
    right, _ = assemble([initial(0, tiny_job(model))])
    ranks = forked(4, initial, tiny_job(model, **layout))
    found, split = assemble(ranks)
    assert not split and all(torch.equal(found[name], right[name]) for name in right)
    for pieces in ranks:
        down = next(piece for piece in pieces if piece.name == "blocks.0.mlp.down.weight")
        assert down.tensor.numel() > 1000
        assert float(down.tensor.std()) == pytest.approx(0.02 / math.sqrt(2), rel=0.1)


def pieces(outcomes: list[Outcome]) -> list[Piece]:
    return [piece for outcome in outcomes for piece in outcome[1]]


@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "cut"])
def test_c_034_shared_kv_heads_get_the_gradients_of_one_device(sequence: bool) -> None:
    """kv_heads = 2 on 4 tensor ranks; kv_heads = 3 is refused with its numbers before anything runs."""
    job = tiny_job({"kv_heads": 2, "qkv_bias": True}, 4, tp=4, sequence_parallel=sequence)
    outcomes = forked(4, step_on, job, [tiny_batches(job, 0, 1, 1)] * 4)
    want, found = reference(job, 1)[0], whole(outcomes, 1)
    for name, grad in found.items():
        assert grad.shape == want.grads[name].shape
        error = worst_error(grad.flatten(), 0, grad.numel(), want.grads[name], floor_of(name, want.grads))
        assert error <= 1e-10, name
    held = {piece.start for piece in pieces(outcomes) if piece.name == "blocks.0.attention.k.weight"}
    assert len(held) == 2
    three = job.model_copy(update={"model": job.model.model_copy(update={"heads": 12, "kv_heads": 3})})
    (problem,) = problems(three)
    assert problem.field == "model.kv_heads" and "tp = 4" in problem.rule
