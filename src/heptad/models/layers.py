"""Tapped layers: torch's Linear and Embedding with a backward in two parts, I and W (`taps.py`).

With `tape = None` a layer is made of plain torch ops and ordinary autograd. With a tape its backward gives only the
input's gradient; the weights are held by reference and read when the backward runs, because the data axis frees and
refills their storage in between: autograd saves none of them. Both ways run the same forward arithmetic, bit for bit,
so running a unit again (recompute) changes nothing. Layers that the tensor axis may cut: `columns.py`, `parallel.py`.

Legend: `...` any leading dims, D last dim of the input, O outputs of a linear, V rows of a table.
Cost: a linear keeps its input alive until W.
Read next: `norms.py`, `columns.py`, `parallel.py`, `attention.py`, `decoder.py`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from heptad.models.taps import Dys, GradSink, Tape, Tapped


def trainable(param: nn.Parameter | None) -> bool:
    """True for a parameter that is there and wants a gradient."""
    return param is not None and param.requires_grad


def has_trainable(layer: nn.Module) -> bool:
    """Whether the weight or the bias of a layer wants a gradient."""
    return trainable(layer.weight) or trainable(getattr(layer, "bias", None))  # type: ignore[arg-type]


def pass_on(ctx: Any, saved: tuple[Any, ...], dy: Tensor, wanted: bool) -> Tensor | None:
    """dy for the probe; with a sink the weight gradients are written here, and nothing is passed on."""
    if wanted and ctx.sink is not None:
        ctx.module.write_weight_grads(saved, (dy,), ctx.sink)
    return dy if wanted and ctx.sink is None else None


def link_of(tape: Tape, module: Tapped, saved: tuple[Tensor, ...], like: Tensor, shape: torch.Size) -> Tensor:
    """The one link of a module with one output."""
    return tape.links(module, saved, like, shape)[0]


def write_linear(linear: Linear, x: Tensor, dy: Tensor, sink: GradSink) -> None:
    """weight [O, D] += dyᵀ x, bias += Σ dy, over the leading dims of x [..., D] and dy [..., O]."""
    rows = dy.reshape(-1, dy.shape[-1])
    if trainable(linear.weight):
        sink.add_matmul(linear.weight, rows.t(), x.reshape(-1, x.shape[-1]))
    if linear.bias is not None and linear.bias.requires_grad:
        sink.add(linear.bias, rows.sum(0))


class _LinearInput(torch.autograd.Function):
    """y = x Wᵀ + b whose backward is dx = dy W and hands dy to the probe. `module` is read when the backward runs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, link: Tensor | None, module: Linear, sink: GradSink | None) -> Tensor:
        ctx.module, ctx.sink = module, sink
        if sink is not None and link is not None:
            ctx.save_for_backward(x)
        return F.linear(x, module.weight, module.bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        passed = pass_on(ctx, ctx.saved_tensors, dy, ctx.needs_input_grad[1])
        return dy @ ctx.module.weight if ctx.needs_input_grad[0] else None, passed, None, None


class Linear(nn.Linear):
    """y [..., O] = x [..., D] weight[O, D]ᵀ (+ bias[O]). `role` names what it is for ("q", "down", "head", …)."""

    weight: nn.Parameter
    bias: nn.Parameter | None  # type: ignore[assignment]
    tape: Tape | None = None
    role: str = "linear"

    def forward(self, x: Tensor) -> Tensor:
        """x [..., D] -> [..., O]."""
        if self.tape is None:
            return F.linear(x, self.weight, self.bias)
        link = None
        if has_trainable(self):
            link = link_of(self.tape, self, (x,), x, torch.Size((*x.shape[:-1], self.weight.shape[0])))
        out: Tensor = _LinearInput.apply(x, link, self, self.tape.sink)
        return out

    def write_weight_grads(self, saved: tuple[Tensor, ...], dys: Dys, sink: GradSink) -> None:
        """weight += dyᵀ x, bias += Σ dy over the leading dims."""
        (dy,) = dys
        assert dy is not None
        write_linear(self, saved[0], dy, sink)


class _EmbeddingLookup(torch.autograd.Function):
    """Rows of a table; nothing to differentiate but the probe."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, link: Tensor | None, module: Embedding, sink: GradSink | None) -> Tensor:
        ctx.module, ctx.sink = module, sink
        ctx.save_for_backward(ids)
        return F.embedding(ids, module.weight)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return None, pass_on(ctx, ctx.saved_tensors, dy, ctx.needs_input_grad[1]), None, None


class Embedding(nn.Embedding):
    """y [..., D] = weight[V, D][ids]; ids int64."""

    weight: nn.Parameter
    tape: Tape | None = None

    def reset_parameters(self) -> None:
        """As torch, except on meta: nothing to fill there, and torch's normal_ would load its compiler (1.4 s)."""
        if not self.weight.is_meta:
            super().reset_parameters()

    def forward(self, ids: Tensor) -> Tensor:
        """ids [...] -> [..., D]."""
        if self.tape is None:
            return F.embedding(ids, self.weight)
        link = None
        if trainable(self.weight):
            shape = torch.Size((*ids.shape, self.weight.shape[1]))
            link = link_of(self.tape, self, (ids,), self.weight, shape)
        out: Tensor = _EmbeddingLookup.apply(ids, link, self, self.tape.sink)
        return out

    def write_weight_grads(self, saved: tuple[Tensor, ...], dys: Dys, sink: GradSink) -> None:
        """weight[ids] += dy."""
        (dy,) = dys
        assert dy is not None
        sink.add_rows(self.weight, saved[0].reshape(-1), dy.reshape(-1, dy.shape[-1]))
