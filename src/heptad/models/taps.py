"""Taps: where a backward is split into the input's gradient (I) and the weights' gradients (W).

A tapped module (linear, norm, embedding) run with a `Tape` does three things: it computes its output, it leaves its
detached input on the tape, and it takes a *probe*: a zero-stride expanded leaf whose gradient, after I ran the graph,
is the gradient dy of the module's output. W then computes weight gradients from (x, dy) alone, under `no_grad`,
straight into the bucket's gradient buffer: it needs no gathered weight, and there is no `.grad`, no hook and no copy.

When B runs both at once, a tape with a sink does the same without probes: W of a module follows its dy at once.

Without a tape the module is the plain torch module, which is what the reference run of `verify` uses.
Source of the split: zero bubble pipelines, Qi et al., arXiv 2401.10241, §2. Read next: `layers.py`,
`schedule/compute.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

Dys = tuple[Tensor | None, ...]
"""Gradients of a tapped module's outputs."""


class GradSink(Protocol):
    """Where weight gradients go: each call *adds* to the gradient of `param` (the data axis owns the buffer)."""

    def add_matmul(self, param: nn.Parameter, a: Tensor, b: Tensor) -> None:
        """grad += a @ b, both 2-D; one GEMM with no temporary where the dtypes agree."""

    def add_rows(self, param: nn.Parameter, rows: Tensor, values: Tensor) -> None:
        """grad[rows[i]] += values[i] (embedding)."""

    def add_groups(self, param: nn.Parameter, a: Tensor, b: Tensor, counts: Sequence[int]) -> None:
        """grad[e] += aₑᵀ bₑ for each of the stacked matrices [E, P, Q]: a [M, P] and b [M, Q] hold counts[e] rows for
        each, in order."""

    def add(self, param: nn.Parameter, grad: Tensor) -> None:
        """grad += `grad`, of the parameter's shape."""


class Tapped(Protocol):
    """A module that can leave a tap."""

    tape: Tape | None

    def write_weight_grads(self, saved: tuple[Tensor, ...], dys: Dys, sink: GradSink) -> None:
        """W: weight gradients from what the forward saved and the gradients of the outputs (None: not used)."""


class Tape:
    """Taps of one forward of one unit, in order.

    With a `sink` the backward is not split (B): no probe is made, each tapped module writes its weight gradients into
    the sink as soon as its dy is there, and lets go of both. `anchor` is then the leaf that I asks for: it ties every
    tapped module into the graph, also one whose input wants no gradient; its own gradient is None.
    """

    def __init__(self, sink: GradSink | None = None) -> None:
        self.sink = sink
        self.anchor: Tensor | None = None if sink is None else torch.zeros((), requires_grad=True)
        self.taps: list[tuple[Tapped, tuple[Tensor, ...], tuple[Tensor, ...]]] = []
        self._zeros: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def links(self, module: Tapped, saved: tuple[Tensor, ...], like: Tensor, *shapes: torch.Size) -> tuple[Tensor, ...]:
        """What ties `module` into the graph: the anchor, or a probe for each output, recorded with what W needs.

        `saved`: kept, detached; `like` gives the probes' dtype and device, `shapes` are those of the outputs.
        """
        if self.anchor is not None:
            return (self.anchor,)
        probes = tuple(self._probe(like, shape) for shape in shapes)
        self.taps.append((module, tuple(tensor.detach() for tensor in saved), probes))
        return probes

    def _probe(self, like: Tensor, shape: torch.Size) -> Tensor:
        key = like.dtype, like.device
        if key not in self._zeros:  # one element serves every probe of its kind: a fill each cost 4 µs
            self._zeros[key] = torch.zeros((), dtype=like.dtype, device=like.device)
        return self._zeros[key].expand(shape).requires_grad_()

    def probes(self) -> list[Tensor]:
        """The leaves whose gradients are the dys that W needs."""
        return [probe for _, _, probes in self.taps for probe in probes]

    def leaves(self) -> list[Tensor]:
        """The leaves I must ask for beside the unit's input: probes, or the anchor."""
        return self.probes() if self.anchor is None else [self.anchor]


def write_weight_grads(tape: Tape, dys: list[Tensor | None], sink: GradSink) -> None:
    """W of one unit: every tap writes into `sink`, last module first (as a backward would).

    `dys` are the probes' gradients in the tape's order; None (the output was not used) adds nothing. Both lists are
    emptied on the way, so that what a tap kept is freed as soon as it is used.
    """
    assert len(dys) == len(tape.probes())
    with torch.no_grad():
        while tape.taps:
            module, saved, probes = tape.taps.pop()
            first = len(dys) - len(probes)
            own = tuple(dys[first:])
            del dys[first:]
            if any(dy is not None for dy in own):
                module.write_weight_grads(saved, own, sink)
            del saved, own
