"""Routing: choices, weights, losses and drops by hand; all of it defined by a sequence, whatever the micro-batch."""

from __future__ import annotations

import math

import pytest
import torch
from tests.models.helpers import packed, value
from tests.models.moe import DEEPSEEK, LOSSES, SOFTMAX, filled, router_of, rows_of, tokens_of
from torch import Tensor

from heptad.config.schema import ModelSection
from heptad.models.batch import Batch
from heptad.models.router import Router

BALANCED = DEEPSEEK.model_copy(update={"balance_loss": 0.7, "z_loss": 0.3})


def by_hand(router: Router, section: ModelSection, x: Tensor, batch: Batch) -> Tensor:
    """The losses of a batch, token by token, averaged over its rows."""
    experts, chosen = section.experts or 0, section.experts_per_token
    total = torch.zeros((), dtype=torch.float64)
    for row in range(batch.ids.shape[0]):
        length = batch.ids.shape[1]
        places = [at for at in range(length) if batch.real is None or bool(batch.real[row, at])]
        shares, means, squares = [0.0] * experts, [torch.zeros(())] * experts, torch.zeros((), dtype=torch.float64)
        for at in places:
            logits = router.gate.weight @ x[row * length + at]
            scores = logits.sigmoid() if section.router == "deepseek" else logits.exp()
            scores = scores / scores.sum()
            best = scores.detach().topk(chosen).indices.tolist()
            shares = [share + (e in best) / (chosen * len(places)) for e, share in enumerate(shares)]
            means = [mean + scores[e] / len(places) for e, mean in enumerate(means)]
            squares = squares + logits.exp().sum().log() ** 2 / len(places)
        balance = section.balance_loss or section.aux_loss
        even = experts * sum((share * mean for share, mean in zip(shares, means, strict=True)), torch.zeros(()))
        total = total + (balance * even + section.z_loss * squares) / batch.ids.shape[0]
    return total


@pytest.mark.parametrize("section", [SOFTMAX.model_copy(update=LOSSES), BALANCED], ids=["softmax", "deepseek"])
def test_losses_are_those_written_down_and_reach_the_router_without_a_main_loss(section: ModelSection) -> None:
    """C-044: the main loss is zero, and the gradient is that of the losses alone."""
    router, batch = router_of(section), filled([[9, 4], [13]], 3)
    if router.bias is not None:
        router.bias.copy_(torch.arange(6) * 0.2)
    x = tokens_of(batch).requires_grad_()
    expected = torch.autograd.grad(by_hand(router, section, x, batch), [x, router.gate.weight])
    got = torch.autograd.grad((router(x, batch).weights * 0.0).sum(), [x, router.gate.weight])
    for mine, right in zip(got, expected, strict=True):
        assert right.abs().max() > 1e-3
        torch.testing.assert_close(mine, right, rtol=1e-12, atol=1e-14)


def test_c_044_without_a_coefficient_nothing_changes_and_evaluation_adds_nothing() -> None:
    plain, batch = router_of(SOFTMAX), packed([[9, 4]])
    x = tokens_of(batch).requires_grad_()
    with_loss = router_of(SOFTMAX.model_copy(update={"aux_loss": 1e3}))
    seed = torch.randn(13, 2, dtype=torch.float64)

    def grads(router: Router, dy: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(router(x, batch).weights, [x, router.gate.weight], dy)

    assert not torch.equal(grads(plain, seed)[1], grads(with_loss, seed)[1])
    with_loss.eval()
    assert all(torch.equal(a, b) for a, b in zip(grads(plain, seed), grads(with_loss, seed), strict=True))
    assert float(grads(plain, torch.zeros_like(seed))[1].abs().max()) == 0.0


@pytest.mark.parametrize("section", [SOFTMAX.model_copy(update=LOSSES), BALANCED], ids=["softmax", "deepseek"])
def test_losses_and_choices_do_not_depend_on_what_else_is_in_the_batch(section: ModelSection) -> None:
    section = section.model_copy(update={"capacity_factor": 0.6, "jitter": 0.1})
    router, batch = router_of(section), filled([[9, 4], [13], [5, 8]], 2)
    router.num_sequences = 3

    def run(part: Batch) -> tuple[Tensor, list[Tensor]]:
        x = tokens_of(part)
        found = router(x, part)
        (grad,) = torch.autograd.grad((found.weights * 0.0).sum(), [router.gate.weight])
        assert found.kept is not None
        return grad, [found.weights.detach(), found.experts, found.kept]

    grad, whole = run(batch)
    parts = [run(row) for row in rows_of(batch)]
    torch.testing.assert_close(sum(part[0] for part in parts), grad, rtol=1e-12, atol=1e-14)
    for at, tensor in enumerate(whole):
        assert torch.equal(torch.cat([part[1][at] for part in parts]), tensor)


@pytest.mark.parametrize("factor", [0.2, 0.5, 0.75, 1.0, 1.25, 5.0])
def test_capacity_keeps_the_first_of_each_sequence(factor: float) -> None:
    section = SOFTMAX.model_copy(update={"capacity_factor": factor})
    router, batch = router_of(section), filled([[9, 11], [20]], 5)
    found = router(tokens_of(batch), batch)
    assert found.kept is not None and batch.real is not None
    capacity = math.ceil(round(factor * 2 * 15 / 5, 9))
    kept = found.kept.view(2, 20, 2)
    for row in range(2):
        seen = [0] * 5
        for at in range(20):
            for choice in range(2):
                expert = int(found.experts.view(2, 20, 2)[row, at, choice])
                counts = bool(batch.real[row, at])
                assert bool(kept[row, at, choice]) == (counts and seen[expert] < capacity)
                seen[expert] += counts
    assert bool(kept.sum() == 2 * 2 * 15) == (capacity >= max(seen))


def test_softmax_weights_are_the_chosen_scores() -> None:
    batch = packed([[17]])
    x = tokens_of(batch)
    for normalise in (True, False):
        router = router_of(SOFTMAX.model_copy(update={"normalise_top_k": normalise, "routed_scale": 1.5}))
        found = router(x, batch)
        scores = (x @ router.gate.weight.t()).softmax(-1)
        best = scores.topk(2).values
        expected = 1.5 * (best / best.sum(-1, keepdim=True) if normalise else best)
        torch.testing.assert_close(found.weights, expected)
        assert found.kept is None


def test_deepseek_chooses_with_the_bias_inside_of_the_best_groups_and_weighs_without() -> None:
    router, batch = router_of(DEEPSEEK), packed([[40]])
    assert router.bias is not None
    router.bias.copy_(torch.tensor([0.5, -0.2, 0.3, 0.0, -0.5, 0.6]))
    x = tokens_of(batch)
    found = router(x, batch)
    scores = (x @ router.gate.weight.t()).sigmoid()
    for token in range(40):
        ranked = (scores[token] + router.bias).tolist()
        worst = min((ranked[2 * group] + ranked[2 * group + 1], group) for group in range(3))[1]
        best = [expert for _, expert in sorted((-score, at) for at, score in enumerate(ranked) if at // 2 != worst)][:2]
        assert found.experts[token].tolist() == best
        chosen = scores[token, best]
        torch.testing.assert_close(found.weights[token], 1.7 * chosen / chosen.sum())
    assert any(set(scores[t].topk(2).indices.tolist()) != set(found.experts[t].tolist()) for t in range(40))


def test_jitter_is_keyed_and_only_in_training() -> None:
    router = router_of(SOFTMAX.model_copy(update={"jitter": 0.3}))
    batch = packed([[9, 4], [13]])
    x = tokens_of(batch)
    first, again = router(x, batch), router(x, batch)
    assert torch.equal(first.weights, again.weights)
    other = Batch(batch.ids, batch.labels, batch.positions, batch.documents, batch.index, step=1)
    assert not torch.equal(router(x, other).weights, first.weights)
    router.eval()
    plain = router_of(SOFTMAX)
    assert torch.equal(router(x, batch).weights, plain(x, batch).weights)
    from heptad.models.dropout import noise

    factors = noise(0.3, 1, "site", torch.arange(500), 0, torch.empty(500, 40, dtype=torch.float64))
    assert 0.7 <= float(factors.min()) < 0.701 and 1.299 < float(factors.max()) < 1.3
    assert abs(float(factors.mean()) - 1) < 0.005


def test_loads_count_real_tokens_once_a_micro_batch_and_dropped_ones_too() -> None:
    router = router_of(DEEPSEEK.model_copy(update={"capacity_factor": 0.3}))
    batch, other = filled([[9, 4], [13]], 3), packed([[7]])
    router.loads = {}
    for part in (batch, batch, other):  # the first again, as recompute does
        found = router(tokens_of(part), part)
    expected = sum(router.loads.values())
    assert len(router.loads) == 2 and int(expected[:-1].sum()) == 2 * (20 + 7)
    chosen = found.experts.flatten().bincount(minlength=6).tolist()
    assert found.kept is not None and not found.kept.all()
    assert router.loads[id(other.ids)].tolist() == [*chosen, int((~found.kept).sum())]
    router.eval()
    router(tokens_of(packed([[5]])), packed([[5]]))
    assert len(router.loads) == 2


def test_a_router_in_bf16_computes_in_fp32() -> None:
    batch = packed([[17]])
    wide, narrow = router_of(SOFTMAX), router_of(SOFTMAX).bfloat16()
    x = tokens_of(batch).bfloat16()
    with torch.no_grad():
        wide.gate.weight.copy_(narrow.gate.weight)
    got, exact = narrow(x, batch), wide(x.double(), batch)
    assert got.weights.dtype == torch.float32 and torch.equal(got.experts, exact.experts)
    assert value((got.weights.double() - exact.weights).abs().max()) < 1e-6
