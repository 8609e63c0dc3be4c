"""Routed experts: MLPs of one shape whose matrices are stacked, applied to rows that are sorted by expert.

gate, up and down are [E, F, D]: `down` is stored input first, so that one dim of all three is the experts' inner width.
As with every layer here, autograd saves no weight; with a tape the backward gives the rows' gradient alone, and W (or B
at once) adds the weights' into the sink, one product an expert. An expert without a row gets a zero gradient; with no
row at all the same graph runs.

Legend: M rows, E experts, F inner width, D width. Cost: 6·M·F·D FLOPs forward (gated); kept are the rows and what the
activation reads, M·(D + 2F) elements: the activation is formed again in the backward. Read next: `grouped.py`,
`moe.py`, `taps.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from heptad.config.schema import ModelSection
from heptad.models.activation import activate, activation, gated_backward, gated_forward, slope
from heptad.models.grouped import grouped, slices
from heptad.models.layers import trainable
from heptad.models.taps import Dys, GradSink, Tape


class Stack(nn.Module):
    """One matrix an expert: weight [E, F, D]."""

    weight: nn.Parameter

    def __init__(self, experts: int, inner: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, inner, width))


class Experts(nn.Module):
    """rows [M, D], sorted by expert -> [M, D]: down(act(gate x) · up x), or without a gate down(act(up x))."""

    tape: Tape | None = None

    def __init__(self, section: ModelSection) -> None:
        super().__init__()
        assert section.experts is not None and section.expert_width is not None
        sizes = section.experts, section.expert_width, section.width
        self.activation = section.activation
        self.gate = Stack(*sizes) if section.mlp == "gated" else None
        self.up = Stack(*sizes)
        self.down = Stack(*sizes)

    @property
    def number(self) -> int:
        """Experts here."""
        return self.up.weight.shape[0]

    @property
    def entering(self) -> tuple[Stack, ...]:
        """What reads the rows: gate and up, or up."""
        return (self.up,) if self.gate is None else (self.gate, self.up)

    def forward(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """rows [M, D], of which expert e has the next counts[e] -> [M, D]."""
        tape = self.tape
        if tape is None and torch.is_grad_enabled():
            return self._plain(rows, counts)
        with torch.no_grad():
            parts = tuple(grouped(rows, stack.weight.transpose(1, 2), counts) for stack in self.entering)  # [M, F]
            y = grouped(self.formed(parts), self.down.weight, counts)  # [M, D]
        if tape is None:
            return y
        links: tuple[Tensor, ...] = ()
        call = _Call(self, tuple(counts))
        if any(trainable(stack.weight) for stack in (*self.entering, self.down)):
            links = tape.links(call, (rows, *parts), rows, *(part.shape for part in parts), y.shape)
        out: Tensor = _Experts.apply(rows, y, call, tape.sink, len(parts), *parts, *links)
        return out

    def _plain(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Torch's own operations, one expert after the other."""
        act, done = activate(self.activation, self.gate is not None), []
        for expert, part in enumerate(slices(counts)):
            read = [F.linear(rows[part], stack.weight[expert]) for stack in self.entering]
            done.append(act(*read) @ self.down.weight[expert])
        return torch.cat(done)

    def formed(self, parts: Sequence[Tensor]) -> Tensor:
        """What `down` reads [M, F]."""
        if len(parts) == 1:
            return activation(self.activation, parts[0])
        return gated_forward(self.activation, parts[0], parts[1])

    def part_grads(self, parts: Sequence[Tensor], inner: Tensor) -> tuple[Tensor, ...]:
        """Gradients of what the activation reads, from that of what it gives."""
        if len(parts) == 1:
            return (slope(self.activation, parts[0], inner),)
        return gated_backward(self.activation, parts[0], parts[1], inner)


class _Call:
    """One forward of the experts, as a tap sees it."""

    tape: Tape | None = None

    def __init__(self, experts: Experts, counts: tuple[int, ...]) -> None:
        self.experts, self.counts = experts, counts

    def write_weight_grads(self, saved: tuple[Tensor, ...], dys: Dys, sink: GradSink) -> None:
        """gate[e] += dgateₑᵀ xₑ, up likewise, down[e] += hₑᵀ dyₑ; h is formed again."""
        (rows, *parts), (*grads, dy) = saved, dys
        for stack, grad in zip(self.experts.entering, grads, strict=True):
            if trainable(stack.weight):
                assert grad is not None
                sink.add_groups(stack.weight, grad, rows, self.counts)
        if trainable(self.experts.down.weight):
            assert dy is not None
            sink.add_groups(self.experts.down.weight, self.experts.formed(parts), dy, self.counts)


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, y: Tensor, call: _Call, sink: GradSink | None, num_parts: int, *tensors: Tensor
    ) -> Tensor:
        ctx.call, ctx.sink, ctx.num_parts, ctx.num_links = call, sink, num_parts, len(tensors) - num_parts
        ctx.save_for_backward(rows, *tensors[:num_parts])
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        rows, *parts = ctx.saved_tensors
        experts, counts = ctx.call.experts, ctx.call.counts
        dy = dy.contiguous()
        grads = experts.part_grads(parts, grouped(dy, experts.down.weight.transpose(1, 2), counts))
        dx = None
        if ctx.needs_input_grad[0]:
            products = [
                grouped(grad, stack.weight, counts) for grad, stack in zip(grads, experts.entering, strict=True)
            ]
            dx = products[-1] if len(products) == 1 else products[-1].add_(products[0])
        passed: tuple[Tensor | None, ...] = (None,) * ctx.num_links
        if ctx.num_links and ctx.sink is not None:
            ctx.call.write_weight_grads((rows, *parts), (*grads, dy), ctx.sink)
        elif ctx.num_links:
            passed = (*grads, dy)
        return dx, None, None, None, None, *(None,) * ctx.num_parts, *passed
