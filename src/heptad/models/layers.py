"""Tapped layers: torch's Linear, Embedding, RMSNorm and LayerNorm with a backward in two parts, I and W (`taps.py`).

With `tape = None` a layer is made of plain torch ops and ordinary autograd. With a tape its backward gives only the
input's gradient; the weights are held by reference and read when the backward runs, because the data axis frees and
refills their storage in between: autograd saves none of them. Both ways run the same forward arithmetic, bit for bit,
so running a unit again (recompute) changes nothing. Layers that the tensor axis may cut: `columns.py`, `parallel.py`.

Legend: `...` any leading dims, D last dim of the input, O outputs of a linear, V rows of a table.
Cost: a linear keeps its input alive until W; a norm its input and one statistic (two for LayerNorm) a row.
Read next: `columns.py`, `parallel.py`, `attention.py`, `decoder.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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


def _pass_on(ctx: Any, saved: tuple[Any, ...], dy: Tensor, wanted: bool) -> Tensor | None:
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
        passed = _pass_on(ctx, ctx.saved_tensors, dy, ctx.needs_input_grad[1])
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
        return None, _pass_on(ctx, ctx.saved_tensors, dy, ctx.needs_input_grad[1]), None, None


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


def _at_least_fp32(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _inverse_rms(wide: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean(x²) + eps) of the last dim, kept as a dim of size 1; one pass and no temporary of x's size."""
    norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    return torch.rsqrt(norm.square() / wide.shape[-1] + eps)


def rms_forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x [..., D], weight [D] -> the norm in x's dtype, and 1/rms [..., 1] in at least fp32."""
    wide = _at_least_fp32(x)
    inverse = _inverse_rms(wide, eps)
    return (wide * inverse).mul_(weight).to(x.dtype), inverse


def rms_backward(x: Tensor, inverse: Tensor, weight: Tensor, dy: Tensor) -> Tensor:
    """Gradient of x, from what `rms_forward` was given and gave, and dy [..., D]."""
    wide = _at_least_fp32(x)
    scaled = _at_least_fp32(dy) * weight
    inner = torch.linalg.vecdot(scaled, wide).unsqueeze(-1)
    slope = inner * inverse.pow(3) / x.shape[-1]
    return scaled.mul_(inverse).addcmul_(wide, slope, value=-1).to(x.dtype)


@dataclass(frozen=True, slots=True)
class RMSKernels:
    """RMSNorm's arithmetic: pure functions of tensors."""

    forward: Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]] = rms_forward
    backward: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] = rms_backward


class _RMSNormInput(torch.autograd.Function):
    """RMSNorm; backward gives dx from (x, 1/rms) and the weight read by reference, and hands dy to the probe."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, y: Tensor, inverse: Tensor, link: Tensor | None, module: RMSNorm, sink: GradSink | None
    ) -> Tensor:
        ctx.save_for_backward(x, inverse)
        ctx.module, ctx.sink = module, sink
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        saved, module = ctx.saved_tensors, ctx.module
        dx = module.input_grad(saved, dy) if ctx.needs_input_grad[0] else None
        return dx, None, None, _pass_on(ctx, saved, dy, ctx.needs_input_grad[3]), None, None


class RMSNorm(nn.RMSNorm):
    """y = x / sqrt(mean(x²) + eps) · weight[D] over the last dim, in at least fp32, returned in x's dtype.

    Zhang and Sennrich, arXiv 1910.07467.
    """

    tape: Tape | None = None
    kernels: RMSKernels = RMSKernels()

    def forward(self, x: Tensor) -> Tensor:
        """x [..., D] -> [..., D]."""
        assert self.eps is not None
        if self.tape is None and torch.is_grad_enabled():
            wide = _at_least_fp32(x)
            return (wide * _inverse_rms(wide, self.eps)).mul(self.weight).to(x.dtype)
        y, inverse = self.parts(x)
        if self.tape is None:
            return y
        link = link_of(self.tape, self, (x, inverse), x, x.shape) if trainable(self.weight) else None
        out: Tensor = _RMSNormInput.apply(x, y, inverse, link, self, self.tape.sink)
        return out

    def parts(self, x: Tensor) -> tuple[Tensor, ...]:
        """The norm of x, without a graph, and what its backward needs beside x: 1/rms."""
        assert self.eps is not None
        with torch.no_grad():
            return self.kernels.forward(x, self.weight, self.eps)

    def input_grad(self, saved: tuple[Tensor, ...], dy: Tensor) -> Tensor:
        """Gradient of x; saved: x and its statistics."""
        x, inverse = saved
        return self.kernels.backward(x, inverse, self.weight, dy)

    def write_weight_grads(self, saved: tuple[Tensor, ...], dys: Dys, sink: GradSink) -> None:
        """weight += Σ dy · x / rms over the leading dims."""
        (x, inverse), (dy,) = saved, dys
        assert dy is not None
        product = (_at_least_fp32(x) * inverse).mul_(dy)
        sink.add(self.weight, product.reshape(-1, x.shape[-1]).sum(0))


class _LayerNormInput(torch.autograd.Function):
    """LayerNorm; backward gives dx from (x, mean, 1/std) and the weight read by reference, and dy to the probe."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, y: Tensor, mean: Tensor, inverse: Tensor, link: Tensor | None, module: LayerNorm,
        sink: GradSink | None,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(x, mean, inverse)
        ctx.module, ctx.sink = module, sink
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        saved, module = ctx.saved_tensors, ctx.module
        dx = module.input_grad(saved, dy) if ctx.needs_input_grad[0] else None
        return dx, None, None, None, _pass_on(ctx, saved, dy, ctx.needs_input_grad[4]), None, None


class LayerNorm(nn.LayerNorm):
    """y = (x - mean) / sqrt(var + eps) · weight[D] + bias[D] over the last dim, in at least fp32, in x's dtype.

    Ba et al., arXiv 1607.06450.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None  # type: ignore[assignment]
    tape: Tape | None = None

    def forward(self, x: Tensor) -> Tensor:
        """x [..., D] -> [..., D]."""
        if self.tape is None:
            return self._normalise(x)[0]
        y, mean, inverse = self.parts(x)
        wanted = has_trainable(self)
        link = link_of(self.tape, self, (x, mean, inverse), x, x.shape) if wanted else None
        out: Tensor = _LayerNormInput.apply(x, y, mean, inverse, link, self, self.tape.sink)
        return out

    def parts(self, x: Tensor) -> tuple[Tensor, ...]:
        """The norm of x, without a graph, and what its backward needs beside x: mean and 1/std."""
        with torch.no_grad():
            return self._normalise(x)

    def input_grad(self, saved: tuple[Tensor, ...], dy: Tensor) -> Tensor:
        """Gradient of x; saved: x and its statistics."""
        x, mean, inverse = saved
        wide, dims = _at_least_fp32(x), list(x.shape[-1:])
        grad, weight = _at_least_fp32(dy).contiguous(), _at_least_fp32(self.weight)
        kernel = torch.ops.aten.native_layer_norm_backward
        dx: Tensor = kernel(grad, wide, dims, mean, inverse, weight, None, [True, False, False])[0]
        return dx.to(x.dtype)

    def _normalise(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        bias = None if self.bias is None else _at_least_fp32(self.bias)
        wide, weight = _at_least_fp32(x), _at_least_fp32(self.weight)
        y, mean, inverse = torch.native_layer_norm(wide, list(x.shape[-1:]), weight, bias, self.eps)
        return y.to(x.dtype), mean, inverse

    def write_weight_grads(self, saved: tuple[Tensor, ...], dys: Dys, sink: GradSink) -> None:
        """weight += Σ dy · (x - mean) / std, bias += Σ dy over the leading dims."""
        (x, mean, inverse), (dy,) = saved, dys
        assert dy is not None
        wide, grad = _at_least_fp32(x), _at_least_fp32(dy).contiguous()
        mask = [False, trainable(self.weight), trainable(self.bias)]
        # the kernel asks for a weight and reads only its shape here: the real one may be dropped by now
        blank = wide.new_empty(x.shape[-1:])
        kernel = torch.ops.aten.native_layer_norm_backward
        grads = kernel(grad, wide, list(x.shape[-1:]), mean, inverse, blank, blank, mask)
        for param, total in ((self.weight, grads[1]), (self.bias, grads[2])):
            if param is not None and param.requires_grad:
                sink.add(param, total)
