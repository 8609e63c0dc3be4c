"""A mixture in parts is the mixture: what sets the bound of expert ranks in bf16 computes the same function."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.models.helpers import packed
from tests.verify.layouts import compared, layout_job
from tests.verify.test_moe_layouts import DEEPSEEK, SOFTMAX

from heptad.config.schema import LayoutSection
from heptad.models.build import build
from heptad.models.moe import MoE
from heptad.verify.partial_experts import partial_experts, rounds


@pytest.mark.parametrize("offset", [0, 3])
@pytest.mark.parametrize("axes", [dict(etp=2), dict(etp=3), dict(ep=4, ep_inner=2), dict(ep=4, ep_inner=2, etp=2)])
@pytest.mark.parametrize("model", [SOFTMAX, {**DEEPSEEK, "mlp": "plain"}])
def test_parts_give_the_whole(model: dict[str, Any], axes: dict[str, int], offset: int) -> None:
    built = build(layout_job(model={**model, "jitter": 0.0}))
    built.materialise(1, torch.device("cpu"), torch.float64)
    layout, batch = LayoutSection(**axes), packed([[4, 3]], vocab=29)
    moe = next(module for module in built.module.modules() if isinstance(module, MoE))
    before = moe.dispatch
    x = torch.randn(1, 7, 13, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).requires_grad_()
    leaves, found = [x, *moe.parameters()], []
    right = moe(x, batch)
    with partial_experts(built, layout, offset):
        assert moe.dispatch is not before
        other = moe(x, batch)
    assert moe.dispatch is before and rounds(layout)
    weights = torch.randn(right.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    for out in (right, other):
        found.append(torch.autograd.grad((out * weights).sum(), leaves))
    torch.testing.assert_close(other, right, rtol=1e-12, atol=1e-12)
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("axes", [dict(etp=2), dict(ep=4, ep_inner=2), dict(tp=2), dict(etp=2, tp=2)])
def test_bf16_is_within_what_such_parts_round(axes: dict[str, int]) -> None:
    ranks = max(1, axes.get("ep", 1) * axes.get("etp", 1) // axes.get("tp", 1))
    model = {**SOFTMAX, "experts": 7, "experts_per_token": 3}
    found = compared(layout_job(zero=1, ranks=ranks, model=model, layout=axes, params="bf16"), steps=1)
    assert found.ok and found.reorder_ratio is not None and found.reorder_ratio <= 2
