"""A mixture of experts in the place of a block's MLP: norm, router, routed experts, shared experts.

The rows of routed experts are sorted by expert (dispatch), run through them, and summed with the gate weights on the
way back (combine). A choice that is dropped, and a token that only fills a row up, sends no row: what remains of such a
token is the residual, and the shared experts' output. `MoE.dispatch` is a seam: on one device it sorts; where experts
lie on several ranks, rows travel, and the shared experts are computed meanwhile (`axes/expert/`).

Legend: N tokens, K experts a token, M rows (N·K less what is dropped), E experts, D width.
Sources: Shazeer et al., arXiv 1701.06538; GShard, arXiv 2006.16668; DeepSeekMoE (shared experts), arXiv 2401.06066.
Cost: M·D elements of rows and as many of results are kept for the backward. Read next: `router.py`, `experts.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from heptad.config.schema import ModelSection
from heptad.mesh.host import host_counts
from heptad.mesh.regions import SINGLE, Stream
from heptad.models.attention import norm_of
from heptad.models.batch import Batch
from heptad.models.experts import Experts
from heptad.models.router import Router, Routing

Meanwhile = Callable[[], Tensor | None]
"""What is computed while rows travel."""
Dispatch = Callable[[Tensor, Routing, Experts, Meanwhile], tuple[Tensor, Tensor | None]]
"""(tokens [N, D], where each goes, the experts here, what to compute meanwhile: called once) -> the weighted sum of the
experts' outputs [N, D], in the tokens' dtype, and what `meanwhile` gave."""


class MoE(nn.Module):
    """The stream [B, L, D] -> the stream, its norm included, the residual not.

    shared: an MLP without a norm that every token passes, or None. Each tensor rank routes tokens of its own: a cut
    stream's, or a slice of a whole one (`Stream.slice`).
    """

    stream: Stream = SINGLE

    def __init__(self, section: ModelSection, shared: nn.Module | None, seed: int, name: str) -> None:
        super().__init__()
        self.dispatch: Dispatch = sorted_dispatch
        self.norm = norm_of(section, section.width)
        self.router = Router(section, seed, name)
        self.experts = Experts(section)
        self.shared = shared

    @property
    def reruns(self) -> bool:
        """Of the shared experts: see `decoder.Mlp`. Routed ones always form their activation again."""
        return bool(getattr(self.shared, "reruns", False))

    @reruns.setter
    def reruns(self, value: bool) -> None:
        if self.shared is not None:
            setattr(self.shared, "reruns", value)  # noqa: B010

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """[B, L, D], or this rank's [n, D] of it, to the same."""
        y = self.norm(x)
        tokens = self.stream.slice(y)  # [N, D]

        def meanwhile() -> Tensor | None:
            return None if self.shared is None else self.shared(y, batch)

        out, beside = self.dispatch(tokens, self.router(tokens, batch), self.experts, meanwhile)
        out = self.stream.join(out, x.shape)
        return out if beside is None else out + beside


def sorted_dispatch(
    tokens: Tensor, routing: Routing, experts: Experts, meanwhile: Meanwhile
) -> tuple[Tensor, Tensor | None]:
    """On one device: rows in order of (expert, token), back by the same permutation."""
    slots, counts = sorted_slots(routing, experts.number)
    rows = spread(tokens, slots, routing.experts.shape[1])
    return combine(experts(rows, counts), routing.weights, slots), meanwhile()


def sorted_slots(routing: Routing, number: int) -> tuple[Tensor, list[int]]:
    """Numbers n·K + k of the choices that are kept, [M], by expert and within one by token; rows of each expert."""
    order, totals = sorted_choices(routing, number)
    counts = host_counts(totals, even_counts(order.numel(), number))
    return order[: sum(counts)], counts


def sorted_choices(routing: Routing, number: int) -> tuple[Tensor, Tensor]:
    """Numbers n·K + k of all choices [N·K], by expert, within one by token, what is not kept last; rows of each expert.

    number: experts, at least as many as are chosen from. Both are int64 on the device.
    """
    chosen = routing.experts.flatten()
    if routing.kept is not None:
        chosen = torch.where(routing.kept.flatten(), chosen, number)
    totals = torch.zeros(number + 1, dtype=torch.int64, device=chosen.device)
    totals.scatter_add_(0, chosen, torch.ones_like(chosen))
    return chosen.argsort(stable=True), totals[:number]


def even_counts(total: int, number: int) -> list[int]:
    """`total` rows over `number` experts, the first of which has what is left over: what fake counts are taken for."""
    even = [total // number] * number
    even[0] += total - sum(even)
    return even


def spread(tokens: Tensor, slots: Tensor, choices: int) -> Tensor:
    """tokens [N, D] -> the row n of each slot n·K + k [M, D]; the gradient sums a token's rows in the order of k."""
    out: Tensor = _Spread.apply(tokens, slots, choices)
    return out


def combine(rows: Tensor, weights: Tensor, slots: Tensor) -> Tensor:
    """rows [M, D] of slots [M], weights [N, K] -> sums in the order of k, in the weights' dtype first: [N, D]."""
    out: Tensor = _Combine.apply(rows, weights, slots)
    return out


def totalled(rows: Tensor, slots: Tensor, num_tokens: int, choices: int) -> Tensor:
    """rows [M, D] of slots n·K + k -> their sums in the order of k, in at least fp32 first: [N, D]."""
    out: Tensor = _Totalled.apply(rows, slots, num_tokens, choices)
    return out


class _Spread(torch.autograd.Function):
    """tokens [N, D] -> a row for each slot [M, D]; backward sums a token's rows in the order of its choices."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, slots: Tensor, choices: int) -> Tensor:
        ctx.save_for_backward(slots)
        ctx.choices, ctx.num_tokens = choices, tokens.shape[0]
        return tokens[slots // choices]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        (slots,) = ctx.saved_tensors
        return _unsorted(dy, slots, ctx.num_tokens, ctx.choices).sum(1), None, None


class _Totalled(torch.autograd.Function):
    """The transpose of `_Spread`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, slots: Tensor, num_tokens: int, choices: int) -> Tensor:
        ctx.save_for_backward(slots)
        ctx.choices = choices
        return _unsorted(rows, slots, num_tokens, choices).sum(1)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        (slots,) = ctx.saved_tensors
        return dy[slots // ctx.choices], None, None, None


class _Combine(torch.autograd.Function):
    """y [M, D], weights [N, K] -> Σ over a token's choices of weight · its row [N, D], in the weights' dtype first."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, weights: Tensor, slots: Tensor) -> Tensor:
        ctx.save_for_backward(y, weights, slots)
        spread = _unsorted(y, slots, *weights.shape)
        return (spread.to(weights.dtype) * weights.unsqueeze(-1)).sum(1).to(y.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        y, weights, slots = ctx.saved_tensors
        rows = dy.to(weights.dtype)[slots // weights.shape[1]]  # [M, D]
        dweights = torch.zeros_like(weights)
        dweights.view(-1)[slots] = (rows * y).sum(-1)
        return rows.mul_(weights.flatten()[slots].unsqueeze(-1)).to(y.dtype), dweights, None


def _unsorted(rows: Tensor, slots: Tensor, num_tokens: int, choices: int) -> Tensor:
    """rows [M, D] at their slots, zeros elsewhere: [N, K, D]."""
    full = rows.new_zeros(num_tokens * choices, rows.shape[-1])
    full[slots] = rows
    return full.view(num_tokens, choices, rows.shape[-1])
