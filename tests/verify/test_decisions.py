"""Choices of experts in bf16: a near tie may fall either way, all else is named; one device follows what is given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.models.helpers import packed
from tests.verify.layouts import layout_job
from tests.verify.test_moe_layouts import DEEPSEEK, LIMITED, SOFTMAX
from torch import Tensor

from heptad.config.schema import Job
from heptad.loader.synthetic import synthetic
from heptad.models.build import Model, build
from heptad.models.router import Router, routers
from heptad.verify.decisions import Decisions, Witness, Wrong, wrong_of
from heptad.verify.fault import Fault, FaultKind
from heptad.verify.localise import first_module
from heptad.verify.run import attempt

SCORES = torch.tensor([[0.5, 0.3, 0.2], [0.41, 0.40, 0.19], [0.1, 0.3, 0.6]])
NOISE = torch.tensor([[0.0, 0.01, -0.01], [-0.01, 0.01, 0.0], [0.005, 0.005, -0.01]])
"""Of a reordered run; with it the second token's choice falls the other way."""


def decided(scores: Tensor, chosen: Tensor | None = None) -> Decisions:
    chosen = scores.topk(1).indices if chosen is None else chosen
    return Decisions(torch.tensor([4, 7, 9]), scores, chosen, torch.ones_like(chosen, dtype=torch.bool))


def differences(found: Decisions, ruled: Tensor | None = None) -> list[str]:
    """Kinds that are beyond their bound, where one device has `SCORES` and its reordered run `NOISE` beside it."""
    ruled = found.scores.topk(1).indices if ruled is None else ruled
    right, other = decided(SCORES, found.chosen), decided(SCORES + NOISE, found.chosen)
    every: list[Wrong] = list(wrong_of(ruled, found, right, [other], 2.0, 2.0**-8))
    return [wrong.kind for wrong in every if not wrong.error <= wrong.bound]


def test_a_near_tie_may_fall_either_way() -> None:
    assert decided(SCORES).chosen.flatten().tolist() == [0, 0, 2]
    found = decided(SCORES + 1.5 * NOISE)
    assert found.chosen.flatten().tolist() == [0, 1, 2] and not differences(found)


def test_a_clear_flip_is_named() -> None:
    clear = torch.tensor([[0], [0], [1]])
    assert differences(decided(SCORES, clear)) == ["choice"]  # the scores say otherwise
    moved = SCORES + torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.4, -0.4]])
    assert moved.topk(1).indices[2] == 1
    assert differences(decided(moved)) == ["score"]  # they say so, and are wrong
    assert differences(decided(SCORES), ruled=clear) == ["choice"]


def test_a_near_tie_that_the_scores_do_not_decide_so_is_named() -> None:
    assert differences(decided(SCORES, torch.tensor([[0], [1], [2]]))) == ["choice"]


def test_what_is_dropped_and_who_is_routed_is_compared_too() -> None:
    found = decided(SCORES)
    dropped = replace(found, kept=found.kept & (torch.arange(3) > 0).unsqueeze(1))
    assert differences(dropped) == ["choice"]
    assert differences(replace(found, index=found.index + 1)) == ["choice"]
    assert differences(replace(found, scores=found.scores * float("nan"))) != []


def test_parts_are_joined_by_token() -> None:
    whole = decided(SCORES)
    parts = [Decisions(*(tensor[at] for tensor in (whole.index, whole.scores, whole.chosen, whole.kept)))
             for at in (torch.tensor([2]), torch.tensor([0, 1]), torch.tensor([], dtype=torch.int64))]  # fmt: skip
    found = Decisions.joined(parts)
    assert torch.equal(found.index, whole.index) and torch.equal(found.scores, whole.scores)
    place, there = found.places(torch.tensor([9, 5, 4]))
    assert there.tolist() == [True, False, True] and found.index[place[there]].tolist() == [9, 4]
    assert not parts[-1].places(torch.tensor([1]))[1].any()


def model_of(section: dict[str, Any]) -> tuple[Model, Router]:
    model = build(layout_job(model=section))
    model.materialise(1, torch.device("cpu"), torch.float64)
    model.place(torch.device("cpu"), torch.float64)
    return model, next(iter(routers(model.module).values()))


@pytest.mark.parametrize("section", [SOFTMAX, {**LIMITED, "balance_loss": 0.1}])
def test_a_router_follows_what_is_given_and_decides_the_rest(section: dict[str, Any]) -> None:
    _, router = model_of(section)
    router.train()
    batch = packed([[4, 3]], vocab=29)
    x = torch.randn(7, 13, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    own = router(x, batch)
    witness = Witness(router)
    witness.start()
    assert torch.equal(router(x, batch).experts, own.experts)
    (found,) = witness.found.values()
    assert torch.equal(found.chosen, own.experts) and torch.equal(witness.rule(found.scores), own.experts)
    some = torch.tensor([1, 4, 6])
    others = found.scores.flip(1)
    given = Decisions(found.index[some], others[some], witness.rule(others)[some], found.kept[some])
    router.added = {}
    router(x, batch)
    before = router.added[id(batch.ids)]
    witness.start(given)
    routing = router(x, batch)
    assert torch.equal(routing.experts[some], given.chosen)
    rest = [token for token in range(7) if token not in some]
    assert torch.equal(routing.experts[rest], own.experts[rest])
    followed = witness.taken()
    assert followed is not None and torch.equal(followed.scores, found.scores)  # its own, whatever it follows
    assert router.added[id(batch.ids)][0] != before[0]  # the load that the loss balances is that of the given scores


def _all_groups(witness: Witness, trainer: Any) -> None:
    witness.router.group_limit = witness.router.groups


def _no_bias(witness: Witness, trainer: Any) -> None:
    right, router = witness.rule, witness.router
    witness.rule = lambda scores: right(scores if router.bias is None else scores - router.bias)


def _one_less(witness: Witness, trainer: Any) -> None:
    witness.rule = lambda scores: scores.topk(witness.router.top + 1).indices[:, 1:]


def _last_rank_s_tokens_shifted(witness: Witness, trainer: Any) -> None:
    right = witness.rule
    if trainer.rank == trainer.mesh.layout.world - 1:
        witness.rule = lambda scores: right(scores).roll(1, 0)


ALTERED: dict[str, tuple[Callable[[Witness, Any], None], dict[str, Any]]] = {
    "groups": (_all_groups, DEEPSEEK),
    "bias": (_no_bias, DEEPSEEK),
    "not the best": (_one_less, SOFTMAX),
    "of another token": (_last_rank_s_tokens_shifted, SOFTMAX),
}


@pytest.mark.parametrize("name", ALTERED)
def test_a_layout_that_chooses_wrongly_is_named_by_its_router(name: str) -> None:
    alter, model = ALTERED[name]

    def plant(fault: Fault, trainer: Any) -> None:
        for witness in trainer.witnesses.values():
            alter(witness, trainer)

    fault = Fault(name, FaultKind(name, lambda job: ("dp_shard",), plant), ("dp_shard",), "")
    job: Job = layout_job(zero=1, model=model, params="bf16", layout=dict(ep=2))
    found, _, failure = attempt(job, synthetic(job), 2, (fault,))
    assert found is not None, failure
    assert {item.kind for item in found.differences} == {"choice"}
    name = first_module(found) or ""
    assert name.endswith("mlp.router")
