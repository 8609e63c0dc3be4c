"""Tokens to experts on other ranks, and back: as on one device, whatever the routing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.axes.expert.ranks import DEEPSEEK, SOFTMAX, Case, Found, several

from heptad.axes.expert.cost import Wanted, backward, forward
from heptad.axes.expert.flow import Rows, Sizes, flow_of
from heptad.launch.forked import forked
from heptad.trace import total

CAPACITY = (("capacity_factor", 0.6),)
NOBODY = (((9, 4), 0), ((5,), 5))  # every other rank has no token that is routed
CASES: dict[int, dict[str, Case]] = {
    1: {
        "one rank": Case(SOFTMAX, 1),
        "one rank, shared experts": Case(DEEPSEEK, 1, whole=True),
    },
    2: {
        "ep 2": Case(SOFTMAX, 2),
        "ep 2, B": Case(SOFTMAX, 2, whole=True),
        "ep 2, deepseek": Case(DEEPSEEK, 2),
        "ep 2, capacity": Case(SOFTMAX, 2, changes=CAPACITY),
        "etp 2": Case(SOFTMAX, 1, 2, whole=True),
        "etp 2, deepseek": Case(DEEPSEEK, 1, 2),
        "plain experts": Case(SOFTMAX, 2, changes=(("mlp", "plain"), ("norm", "layer"))),
        "plain experts, etp": Case(SOFTMAX, 1, 2, changes=(("mlp", "plain"),)),
        "all to the first rank": Case(SOFTMAX, 2, to=(0, 3, 1)),
        "all to the last expert": Case(SOFTMAX, 2, changes=(("experts_per_token", 1),), to=(6,), whole=True),
        "a rank without a token": Case(DEEPSEEK, 2, tokens=NOBODY),
        "a rank without a token, etp": Case(SOFTMAX, 1, 2, tokens=NOBODY),
        "no token at all": Case(SOFTMAX, 2, tokens=(((5,), 5),)),
        "frozen experts": Case(DEEPSEEK, 2, changes=(("frozen", ("*.experts.*",)),)),
    },
    4: {
        "ep 4": Case(SOFTMAX, 4),
        "ep 4, deepseek, capacity": Case(DEEPSEEK, 4, changes=(*CAPACITY, ("experts", 12)), whole=True),
        "ep 2, etp 2": Case(SOFTMAX, 2, 2),
        "ep 2, etp 2, deepseek": Case(DEEPSEEK, 2, 2, whole=True, changes=CAPACITY),
        "ep 2, etp 2, all to one": Case(SOFTMAX, 2, 2, to=(4, 5, 6), tokens=NOBODY),
        "two levels": Case(SOFTMAX, 4, inner=2),
        "two levels, deepseek": Case(DEEPSEEK, 4, inner=2, whole=True, changes=(("experts", 12),)),
        "two levels, capacity": Case(SOFTMAX, 4, inner=2, changes=CAPACITY, tokens=NOBODY),
        "two levels, all to one": Case(SOFTMAX, 4, inner=2, to=(0, 1, 5)),
        "two levels, no token at all": Case(SOFTMAX, 4, inner=2, tokens=(((5,), 5),)),
    },
    8: {
        "two levels, etp 2": Case(SOFTMAX, 4, 2, inner=2, changes=CAPACITY),
        "two levels, etp 2, deepseek": Case(DEEPSEEK, 4, 2, inner=2, changes=(("experts", 12),), whole=True),
    },
}


@pytest.mark.parametrize("world", CASES)
def test_outputs_gradients_and_traffic_are_those_of_one_device_and_of_the_formulas(world: int) -> None:
    names = list(CASES[world])
    ranks = forked(world, several, [CASES[world][name] for name in names])
    for at, name in enumerate(names):
        found = [rank[at] for rank in ranks]
        for rank, one in enumerate(found):
            assert max(one.errors.values()) <= 1e-12, (name, rank, one.errors)
        assert_predicted(CASES[world][name], found)


def assert_predicted(case: Case, found: list[Found]) -> None:
    """Every rank sent what follows from the choices of all."""
    section = case.model
    assert section.experts is not None
    inside = case.inner if case.inner > 1 else case.ep
    sizes = Sizes(
        case.world, case.ep, case.etp, inside, section.experts, section.experts_per_token, section.width, 8, 8
    )
    flow = flow_of(sizes, [one.choices.numpy() for one in found])
    for rank, one in enumerate(found):
        rows = Rows.of(sizes, flow, rank)
        sent = forward(sizes, rows) + backward(sizes, rows, Wanted(True, True, True))
        assert total(replace(item, phase="") for item in one.transfers) == total(sent), (case, rank)


def test_c_087_a_rank_whose_experts_nobody_chose_has_gradients_of_zero() -> None:
    cases = [Case(SOFTMAX, 2, to=(0, 3, 1)), Case(SOFTMAX, 2, to=(0, 3, 1), whole=True)]
    for case, found in zip(cases, zip(*forked(2, several, cases), strict=True), strict=True):
        first, other = (one.grads for one in found)
        for part in ("gate", "up", "down"):
            name = f"experts.{part}.weight"
            assert float(other[name].abs().max()) == 0.0 and other[name].shape == first[name].shape
            assert [bool(grad.abs().max() > 0) for grad in first[name]] == [True, True, False, True], (case, part)
        assert float(other["router.gate.weight"].abs().max()) > 0
        assert bool(torch.equal(found[0].choices, torch.tensor([[0, 3, 1]]).expand(13, -1)))
