"""A mixture as a layout rounds it whose experts are cut over tensor ranks, or whose tokens cross to nodes once.

For the bound in bf16 (`judge.py`): ranks with parts of the rows of an expert each round their part of its output, and
of its rows' gradient; a node rounds its part of a token's sum. Here both happen too, by plain autograd and the dispatch
of one device, so as right as a figure in bf16 with these parts can be. Read next: `reference.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from heptad.config.schema import LayoutSection
from heptad.models.activation import activate
from heptad.models.build import Model
from heptad.models.experts import Experts
from heptad.models.moe import Dispatch, Meanwhile, MoE, combine, sorted_slots, spread
from heptad.models.router import Routing


def rounds(layout: LayoutSection) -> bool:
    """Whether the expert axes round where one device does not."""
    return layout.etp > 1 or layout.ep_inner > 1


@contextmanager
def partial_experts(model: Model, layout: LayoutSection, offset: int) -> Iterator[None]:
    """Every mixture in parts as `layout` cuts it; `offset`: rows and experts by which the cuts are moved."""
    mixtures = [module for module in model.module.modules() if isinstance(module, MoE)]
    before = [module.dispatch for module in mixtures]
    nodes = layout.ep // layout.ep_inner if layout.ep_inner > 1 else 1
    try:
        for module in mixtures:
            module.dispatch = in_parts(layout.etp, nodes, offset)
        yield
    finally:
        for module, right in zip(mixtures, before, strict=True):
            module.dispatch = right


def in_parts(number: int, nodes: int, offset: int) -> Dispatch:
    """Experts of `number` parts each, on `nodes` nodes."""

    def dispatch(
        tokens: Tensor, routing: Routing, experts: Experts, meanwhile: Meanwhile
    ) -> tuple[Tensor, Tensor | None]:
        slots, counts = sorted_slots(routing, experts.number)
        results = _outputs(experts, spread(tokens, slots, routing.experts.shape[1]), counts, number, offset)
        chosen = (routing.experts.flatten()[slots] + offset) % experts.number
        node = chosen * nodes // experts.number
        sums = [combine(results[node == at], routing.weights, slots[node == at]) for at in range(nodes)]
        return torch.stack(sums).sum(0), meanwhile()

    return dispatch


def _outputs(experts: Experts, rows: Tensor, counts: Sequence[int], number: int, offset: int) -> Tensor:
    """rows [M, D], of which expert e has the next counts[e] -> [M, D], each a sum of `number` rounded parts."""
    act, done = activate(experts.activation, experts.gate is not None), []
    for expert, (stop, count) in enumerate(zip(accumulate(counts), counts, strict=True)):
        own, parts = rows[stop - count : stop], []
        cut = [stack.weight[expert].roll(offset, 0).chunk(number) for stack in (*experts.entering, experts.down)]
        for *entering, down in zip(*cut, strict=True):
            parts.append(act(*(F.linear(own, weight) for weight in entering)) @ down)
        done.append(torch.stack(parts).sum(0))
    return torch.cat(done)
