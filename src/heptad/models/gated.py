"""What a gated MLP's last linear takes on itself: the activation before it, so that less is kept or formed twice.

`activated` keeps what the activation reads and nothing else (selective recompute); `gated` keeps gate, up and act(gate)
and forms their product again. Both are one autograd function with the linear, whose output is reduced over the tensor
ranks as ever. Legend: I inner width on this rank. Read next: `activation.py`, `decoder.py`, `recompute/cost.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from heptad.models.activation import activation, slope
from heptad.models.layers import has_trainable, link_of
from heptad.models.parallel import RowLinear
from heptad.models.taps import Dys, GradSink, Tape


class Activated:
    """A `RowLinear` behind `formed`, which keeps what `formed` reads instead of its own input."""

    tape: Tape | None = None

    def __init__(self, linear: RowLinear, formed: Callable[..., Tensor]) -> None:
        self.linear, self.formed = linear, formed

    def write_weight_grads(self, saved: tuple[Tensor, ...], dys: Dys, sink: GradSink) -> None:
        """The linear's own; its input is made again."""
        self.linear.write_weight_grads((self.formed(*saved),), dys, sink)

    def link(self, tape: Tape, saved: Sequence[Tensor]) -> Tensor | None:
        """What ties it into the graph, where the linear has anything to train."""
        if not has_trainable(self.linear):
            return None
        shape = torch.Size((*saved[0].shape[:-1], self.linear.weight.shape[1]))
        return link_of(tape, self, tuple(saved), saved[0], shape)


def activated(linear: RowLinear, activate: Callable[..., Tensor], parts: Sequence[Tensor]) -> Tensor:
    """linear(activate(*parts)) -> the stream, keeping `parts` [..., I] alone.

    The activation runs again in the backward: once for both gradients where that is whole, else once in I, once in W.
    """
    tape = linear.tape
    if tape is None:
        out: Tensor = linear(activate(*parts))
        return out
    module = Activated(linear, activate)
    out = _Activated.apply(module.link(tape, parts), module, tape.sink, *parts)
    return out


class _Activated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, link: Tensor | None, module: Activated, sink: GradSink | None, *parts: Tensor) -> Tensor:
        ctx.module, ctx.sink, ctx.leading = module, sink, parts[0].shape[:-1]
        ctx.save_for_backward(*parts)
        return module.linear.stream.reduce(module.linear.partial(module.formed(*parts))).wait()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        module, linear = ctx.module, ctx.module.linear
        dy = linear.stream.gather(dy, ctx.leading.numel()).wait().reshape(*ctx.leading, -1)
        wanted, needed = ctx.needs_input_grad[0], ctx.needs_input_grad[3:]
        leaves = [part.detach().requires_grad_(need) for part, need in zip(ctx.saved_tensors, needed, strict=True)]
        with torch.enable_grad():
            inner = module.formed(*leaves)
        wants = [leaf for leaf in leaves if leaf.requires_grad]
        found = iter(torch.autograd.grad(inner, wants, dy @ linear.weight.t()) if wants else ())
        if wanted and ctx.sink is not None:
            linear.write_weight_grads((inner.detach(),), (dy,), ctx.sink)
        passed = dy if wanted and ctx.sink is None else None
        return passed, None, None, *(next(found) if need else None for need in needed)


def gated(linear: RowLinear, name: str, gate: Tensor, up: Tensor) -> Tensor:
    """linear(act(gate) · up) -> the stream, of [..., I] keeping gate, up and act(gate).

    The product is made again in the backward: one multiplication an element, where plain autograd would keep it too.
    Only where the backward is whole: W alone would hold act(gate) and up instead of their product.
    """
    assert linear.tape is not None and linear.tape.sink is not None
    act, module = activation(name, gate.detach()), Activated(linear, torch.mul)
    link = module.link(linear.tape, (act, up))
    out: Tensor = _GatedDown.apply(gate, up, act, link, module, name, linear.tape.sink)
    return out


class _GatedDown(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, gate: Tensor, up: Tensor, act: Tensor, link: Tensor | None, module: Activated, name: str,
        sink: GradSink,
    ) -> Tensor:  # fmt: skip
        ctx.module, ctx.name, ctx.sink, ctx.leading = module, name, sink, gate.shape[:-1]
        ctx.save_for_backward(gate, up, act)
        return module.linear.stream.reduce(module.linear.partial(act * up)).wait()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        gate, up, act = ctx.saved_tensors
        linear: RowLinear = ctx.module.linear
        dy = linear.stream.gather(dy, ctx.leading.numel()).wait().reshape(*ctx.leading, -1)
        dgate = dup = None
        if any(ctx.needs_input_grad[:2]):
            inner = dy @ linear.weight.t()
            dgate, dup = slope(ctx.name, gate, inner * up), inner.mul_(act)
        if ctx.needs_input_grad[3]:
            ctx.module.write_weight_grads((act, up), (dy,), ctx.sink)
        return dgate, dup, None, None, None, None, None
