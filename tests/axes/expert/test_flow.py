"""Rows that cross, by hand, by enumeration and in the mean of random routing; a plan knows no routing."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
import torch
from tests.models.helpers import packed
from tests.models.moe import DEEPSEEK, router_of, tokens_of

from heptad.axes.expert.cost import Wanted, backward, forward, mixtures
from heptad.axes.expert.flow import Chosen, Flow, Rows, Sizes, expected, flow_of, miss
from heptad.config.load import load
from heptad.models.build import build
from heptad.models.resolve import resolve
from heptad.trace import total


def sizes_of(ep: int, etp: int = 1, inside: int | None = None, edp: int = 1, **changes: int) -> Sizes:
    found = dict(experts=12, choices=3, width=5, element_bytes=2, wide_bytes=4) | changes
    return Sizes(ranks=edp * ep * etp, ep=ep, etp=etp, inside=inside or ep, **found)


def test_four_tokens_by_hand() -> None:
    """Two nodes of two ranks, three experts a rank; expert 11 is chosen twice on node 1, dropped once."""
    sizes = sizes_of(4, inside=2)
    chosen = [
        np.array(rows, dtype=np.int64).reshape(-1, 3)
        for rows in ([[0, 1, 2], [3, 11, 10]], [[6, 7, -1]], [], [[11, 0, 5]])
    ]
    flow = flow_of(sizes, chosen)
    assert flow.across.tolist() == [[2, 1], [0, 1], [0, 0], [1, 1]]
    assert flow.inside.tolist() == [[3, 1], [1, 1], [0, 2], [2, 1]]  # rank 1 got [0, 5], rank 2 [11, 10], 3 the rest
    rows = Rows.of(sizes, flow, 3)
    assert rows.across == (1, 1) and rows.ep == (2, 2) and rows.whole == (0, 0)
    sent = total(forward(sizes, rows) + backward(sizes, rows, Wanted(True, True, True)))
    crossing = 8 + (10 + 3 * 8) + 10 + 10 + (12 + 10)  # counts; row, weights and choices; output; and back
    assert sent == {("ep", "all_to_all", ""): (4 + 1 + 3 + 1 + 2 + 2, crossing + 24 + 4 * 2 * 10)}


def test_tensor_parallel_experts_by_hand() -> None:
    """Two parts of each of two experts' halves: rank 0 gets rows of ranks 0 and 2, and gives them to rank 1."""
    sizes = sizes_of(2, 2, experts=4, choices=1)
    chosen = [np.array(rows, dtype=np.int64).reshape(-1, 1) for rows in ([0, 0, 2], [3], [1, 2], [])]
    rows = Rows.of(sizes, flow_of(sizes, chosen), 0)
    assert rows.ep == (1, 1) and rows.whole == (3, 0)
    assert Rows.of(sizes, flow_of(sizes, chosen), 3).whole == (1, 2)


@pytest.mark.parametrize(("start", "stop"), [(0, 4), (3, 9), (5, 6), (0, 12), (10, 10)])
@pytest.mark.parametrize(("groups", "limit"), [(1, 1), (3, 2), (4, 1), (6, 4)])
def test_the_share_that_misses_a_node_is_that_of_all_choices(start: int, stop: int, groups: int, limit: int) -> None:
    size, missed, number = 12 // groups, 0, 0
    for some in combinations(range(groups), limit):
        allowed = [group * size + at for group in some for at in range(size)]
        for chosen in combinations(allowed, 3):
            missed += not any(start <= expert < stop for expert in chosen)
            number += 1
    found = miss(sizes_of(2, groups=groups, limit=limit), start, stop)
    assert found == pytest.approx(missed / number, abs=1e-12)


def random_choices(sizes: Sizes, tokens: int, seed: int) -> Chosen:
    """[tokens, K]: groups, then experts of them, all as likely."""
    draw = np.random.default_rng(seed)
    groups = draw.random((tokens, sizes.groups)).argsort(1)[:, : sizes.limit]
    scores = draw.random((tokens, sizes.experts)).reshape(tokens, sizes.groups, -1)
    allowed = np.zeros((tokens, sizes.groups, 1), dtype=bool)
    np.put_along_axis(allowed, groups[..., None], True, 1)
    return np.where(allowed, scores, -1.0).reshape(tokens, -1).argsort(1)[:, -sizes.choices :]


@pytest.mark.parametrize(
    "sizes",
    [
        sizes_of(4),
        sizes_of(4, experts=7),
        sizes_of(2, 2, edp=2, experts=9),
        sizes_of(4, inside=2, groups=4, limit=2),
        sizes_of(8, inside=2, experts=30, choices=8),
        sizes_of(8, 2, inside=4, experts=32, choices=8, groups=8, limit=4),
    ],
)
def test_expected_rows_are_the_mean_of_random_routing(sizes: Sizes) -> None:
    tokens, plan = 4000, expected(sizes, 4000)
    flow = flow_of(sizes, [random_choices(sizes, tokens, rank) for rank in range(sizes.ranks)])
    assert np.allclose(flow.across, plan.across, rtol=0.05, atol=60)
    assert np.allclose(flow.inside, plan.inside, rtol=0.05, atol=120)
    for rank in range(sizes.ranks):
        real, planned = (
            total(forward(sizes, Rows.of(sizes, found, rank))) for found in (flow, Flow(plan.across, plan.inside))
        )
        assert real.keys() == planned.keys()
        for key, (count, num_bytes) in real.items():
            assert planned[key][0] == count and planned[key][1] == pytest.approx(num_bytes, rel=0.05)


def test_two_levels_cross_at_most_once_a_node_and_far_less_than_one() -> None:
    """K = 8 of 32 experts on two nodes, a router that is limited to one node's groups: a row in place of eight."""
    model = dict(experts=32, choices=8, groups=4)
    one, two = sizes_of(4, **model, limit=4), sizes_of(4, inside=2, **model, limit=4)
    away = expected(one, 1000).inside[0, 2:].sum()
    crossing = expected(two, 1000).across[0, 1]
    assert away == pytest.approx(4000) and crossing / away <= 1 / 3.99
    limited = sizes_of(4, inside=2, **model, limit=1)
    assert expected(limited, 1000).across[0].tolist() == [500, 500]


def test_a_token_goes_to_at_most_as_many_nodes_as_its_router_allows_whatever_its_experts() -> None:
    """K = 7 of 16 experts on four nodes, a group on each, at most two of them; the router itself chooses."""
    sizes = sizes_of(8, inside=2, experts=16, choices=7, groups=4, limit=2)
    changes = dict(experts=16, experts_per_token=7, router_groups=4, router_group_limit=2)
    router = router_of(DEEPSEEK.model_copy(update=changes))
    assert router.bias is not None
    router.bias.copy_(torch.linspace(-2.0, 2.0, 16)[torch.randperm(16, generator=torch.Generator().manual_seed(0))])
    batch = packed([[40]])
    chosen = [router(tokens_of(batch, seed=rank), batch).experts.numpy() for rank in range(8)]
    assert max(len({expert // 4 for expert in token}) for one in chosen for token in one.tolist()) == 2
    flow = flow_of(sizes, chosen)
    assert (flow.across.sum(1) == 2 * 40).all()  # seven experts never lie in one group of four
    assert flow.inside.sum() == 8 * 40 * 7


def test_mixtures_of_a_model_and_what_their_backwards_send() -> None:
    job = resolve(load("debug-moe", ["model.mtp_depth=1"]))
    model = build(job)
    found = mixtures(model.unit_specs, model.specs)
    names = [name for name, _ in model.module.named_modules() if name.endswith(".router")]
    assert [item.router for item in found] == names and len(names) == job.model.layers
    assert all(item.trains and item.wanted == Wanted(True, True, True) for item in found)
    frozen = '["embed.*", "blocks.0.*", "*.attention.*", "*.norm.*"]'
    model = build(resolve(load("debug-moe", [f"model.frozen={frozen}"])))
    first, *others = mixtures(model.unit_specs, model.specs)
    assert first.trains and first.wanted == Wanted(outputs=True, weights=True, tokens=False)
    assert all(item.wanted == Wanted(True, True, True) for item in others) and others
