"""Tapped norms: torch's RMSNorm and LayerNorm with a backward in two parts, I and W (see `layers.py`).

Both compute in at least fp32 and return x's dtype. With a tape the norm of x comes from a kernel without a graph
(`parts`), and the backward is written out (`input_grad`, `write_weight_grads`), so that a norm can also run inside the
backward of what follows it (`columns.py`) and RMSNorm's arithmetic can be compiled (`compiled.py`).

Legend: `...` any leading dims, D last dim of the input.
Cost: a norm keeps its input alive until W, and one statistic (two for LayerNorm) a row.
Read next: `columns.py`, `compiled.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from heptad.models.layers import has_trainable, link_of, pass_on, trainable
from heptad.models.taps import Dys, GradSink, Tape


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


class _NormInput(torch.autograd.Function):
    """A norm of x; backward gives dx from x, its statistics and the weight read by reference, and hands dy to the
    probe."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, y: Tensor, link: Tensor | None, module: Norm, sink: GradSink | None, *statistics: Tensor
    ) -> Tensor:
        ctx.save_for_backward(x, *statistics)
        ctx.module, ctx.sink = module, sink
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        saved, module = ctx.saved_tensors, ctx.module
        dx = module.input_grad(saved, dy) if ctx.needs_input_grad[0] else None
        passed = pass_on(ctx, saved, dy, ctx.needs_input_grad[2])
        return dx, None, passed, None, None, *[None] * (len(saved) - 1)


def _taped(norm: Norm, tape: Tape, x: Tensor, y: Tensor, statistics: Sequence[Tensor]) -> Tensor:
    """y, the norm of x, with the backward in two parts."""
    link = link_of(tape, norm, (x, *statistics), x, x.shape) if has_trainable(norm) else None
    out: Tensor = _NormInput.apply(x, y, link, norm, tape.sink, *statistics)
    return out


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
        y, *statistics = self.parts(x)
        return y if self.tape is None else _taped(self, self.tape, x, y, statistics)

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
        y, *statistics = self.parts(x)
        return _taped(self, self.tape, x, y, statistics)

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


Norm = RMSNorm | LayerNorm
