"""Muon: whole-matrix updates under every cut, and what they send."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.optim.fixtures import cut, section, set_grads, specs, values
from tests.optim.test_norm import world_group
from torch import Tensor

from heptad.launch.forked import forked
from heptad.optim.build import build_optimizer
from heptad.optim.cost import gather_rounds, muon_traffic
from heptad.optim.muon import orthogonalise
from heptad.trace import Transfer, total

STEPS = 3
OPTIONS = {"name": "muon", "muon_lr": 0.3, "weight_decay": 0.2, "muon_momentum": 0.8, "schedule": "linear"}


def train(rank: int, size: int) -> tuple[list[np.ndarray], list[Transfer], list[Transfer]]:
    group = world_group(rank, size)
    shards = cut(values(0), group if size > 1 else None)
    optimizer = build_optimizer(section(**OPTIONS), shards, STEPS)
    for step in range(1, STEPS + 1):
        set_grads(shards, values(step))
        optimizer.step(step)
    cuts = [shard.ranges for shard in shards if shard.spec.role == "matrix"]
    predicted = muon_traffic(cuts, "dp_shard", 8) * STEPS if size > 1 else []
    return [shard.master.numpy() for shard in shards], group.ledger.transfers(), predicted


def reference() -> dict[str, Tensor]:
    """The method as its authors write it, one whole matrix at a time."""
    whole, momenta = values(0), {name: torch.zeros_like(value) for name, value in values(0).items()}
    for step in range(1, STEPS + 1):
        lr = 0.3 * (1 - 0.9 * (step - 1) / (STEPS - 1))
        for name, grad in values(step).items():
            momenta[name] = 0.8 * momenta[name] + 0.2 * grad
            x = 0.2 * grad + 0.8 * momenta[name]
            if x.ndim != 2:
                continue
            flip = x.shape[0] > x.shape[1]
            x = x.T if flip else x
            x = x / x.norm()
            for _ in range(5):
                a = x @ x.T
                x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
            x = x.T if flip else x
            rows, columns = x.shape
            whole[name] = whole[name] * (1 - lr * 0.2) - lr * max(1, rows / columns) ** 0.5 * x
    return whole


@pytest.mark.parametrize("size", [1, 2, 4, 7])
def test_whole_matrix_updates_on_any_number_of_ranks(size: int) -> None:
    results = forked(size, train, size)
    want = reference()
    for at, spec in enumerate(specs()):
        if spec.role == "matrix":
            got = torch.from_numpy(np.concatenate([shards[at] for shards, _, _ in results])).view(spec.shape)
            torch.testing.assert_close(got, want[spec.name], rtol=1e-10, atol=1e-12)
    for _, counted, predicted in results:
        assert total(counted) == total(predicted)


def test_close_to_torch_muon() -> None:
    """torch's own runs its iterations in bf16; the same method within that."""
    weight, grad = torch.randn(24, 16), torch.randn(24, 16)
    theirs = weight.clone()
    theirs.grad = grad
    torch.optim.Muon([theirs], lr=0.1, weight_decay=0.0, momentum=0.9).step()
    direction = grad.lerp(torch.zeros_like(grad).lerp(grad, 0.1), 0.9)
    ours = weight - 0.1 * (24 / 16) ** 0.5 * orthogonalise(direction)
    assert (ours - theirs).norm() < 0.05 * (weight - theirs).norm()


def test_singular_values_come_near_one() -> None:
    for shape in ((40, 24), (24, 40)):
        sizes = torch.linalg.svdvals(orthogonalise(torch.randn(shape, dtype=torch.float64)))
        assert sizes.min() > 0.6 and sizes.max() < 1.25
    assert torch.equal(orthogonalise(torch.zeros(3, 5)), torch.zeros(3, 5))


def test_rounds_skip_what_lies_on_one_rank_and_respect_the_limit() -> None:
    cuts = [((0, 6), (6, 6)), ((0, 2), (2, 10)), ((0, 0), (0, 4)), ((0, 3), (3, 5)), ((0, 1), (1, 2))]
    assert [(item.members, item.width) for item in gather_rounds(cuts)] == [((1, 3, 4), 11)]
    assert [(item.members, item.width) for item in gather_rounds(cuts, round_numel=10)] == [((1,), 8), ((3, 4), 4)]
    assert gather_rounds([((0, 6),), ((0, 3),)]) == []
    assert muon_traffic(cuts, "dp_shard", 4) == [Transfer("all_gather", "dp_shard", "update", 11 * 4)]


def several_rounds(rank: int, size: int, round_numel: int) -> list[list[float]]:
    import heptad.optim.muon as muon

    muon.gather_rounds = lambda cuts, teams: gather_rounds(cuts, teams, round_numel)
    shards = cut(values(0), world_group(rank, size))
    optimizer = build_optimizer(section(**OPTIONS), shards, STEPS)
    set_grads(shards, values(1))
    optimizer.step(1)
    return [shard.master.tolist() for shard in shards]


def test_prefetched_rounds_change_nothing() -> None:
    for one, many in zip(forked(4, several_rounds, 4, 1 << 20), forked(4, several_rounds, 4, 1), strict=True):
        assert one == many
