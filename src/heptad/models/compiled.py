"""`train.compile`: the arithmetic between linears and collectives, each stretch compiled by torch as one whole graph.

Compiled: RMSNorm, the gated activation, keyed dropout, the softmax of `attention = "math"`, the loss's exponentials and
gradient; forward and backward each. None reads a parameter but a norm's weight, none communicates. Left alone is what
is one kernel already: matmuls, fused attention, LayerNorm, a plain activation, a rotation, a residual's addition.

Each is a pure function of tensors behind an autograd function that keeps its inputs, so forward, recomputed forward and
backward run the same compiled code whatever surrounds them: bits do not depend on recompute. Sizes are symbols, so one
graph a dtype serves all batches. A graph that torch cannot compile whole is an error. Nothing here is imported, and
torch's compiler is not loaded (seconds), unless a job asks for it. Measured: `docs/design-notes.md`.
Read next: `axes/apply.py` (who calls this, once a rank), `norms.py`, `attention.py`, `dropout.py`, `loss.py`.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
import torch._inductor.config as inductor
from torch import Tensor, nn

from heptad.errors import ConfigError
from heptad.models.activation import gated_backward, gated_forward
from heptad.models.attention import Attention, math_attention
from heptad.models.decoder import Head, Mlp
from heptad.models.dropout import Dropout, dropped
from heptad.models.loss import LossKernels, exponentials_, gradient_
from heptad.models.norms import RMSKernels, RMSNorm, rms_backward, rms_forward
from heptad.models.scores import masked_softmax

RECOMPILES = 64
"""Graphs of one stretch at most: a dtype, a size of 1, or two sizes that are equal by chance make another."""


def whole_graph(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` compiled without a break, for all sizes; called without autograd, on tensors without their graph."""
    settings: Any = dict(fullgraph=True, dynamic=True, isolate_recompiles=True, recompile_limit=RECOMPILES)
    inner = torch.compile(function, **settings)

    def call(*args: Any) -> Any:
        with torch.no_grad():
            return inner(*(arg.detach() if isinstance(arg, Tensor) else arg for arg in args))

    return call


def softmax_backward(probabilities: Tensor, dy: Tensor, root: float) -> Tensor:
    """Gradient of the scores of `masked_softmax`, all [B, H, L, L]."""
    product = probabilities * dy
    return (product - probabilities * product.sum(-1, keepdim=True)) / root


@dataclass(frozen=True, slots=True)
class Kernels:
    """The stretches, as they are compiled."""

    rms_forward: Callable[..., Any] = rms_forward
    rms_backward: Callable[..., Any] = rms_backward
    gated_forward: Callable[..., Any] = gated_forward
    gated_backward: Callable[..., Any] = gated_backward
    dropped: Callable[..., Any] = dropped
    softmax_forward: Callable[..., Any] = masked_softmax
    softmax_backward: Callable[..., Any] = softmax_backward
    exponentials_: Callable[..., Any] = exponentials_
    gradient_: Callable[..., Any] = gradient_


def compile_model(module: nn.Module, activation: str) -> None:
    """Put compiled stretches into every seam of `module`; each compiles at its first call. activation: the MLP's.

    Raises ConfigError where there is no seam: a class of the user's own without heptad's layers.
    """
    _load_compiler()
    plain = Kernels()
    kernels = Kernels(**{field.name: whole_graph(getattr(plain, field.name)) for field in fields(Kernels)})
    drop = partial(_drop, kernels)
    seams = 0
    for child in module.modules():
        seams += isinstance(child, RMSNorm | Mlp | Head)
        if isinstance(child, RMSNorm):
            child.kernels = RMSKernels(partial(_rms_forward, kernels), partial(_rms_backward, kernels))
        elif isinstance(child, Mlp) and child.gate is not None:
            child.activate, child.joined = partial(_gated, kernels, activation), None
        elif isinstance(child, Head):
            child.kernels = LossKernels(kernels.exponentials_, kernels.gradient_)
        elif isinstance(child, Attention) and isinstance(child.core, partial) and child.core.func is math_attention:
            child.core = partial(child.core, softmax=partial(_softmax, kernels))
        for name, value in vars(child).items():
            if isinstance(value, Dropout):
                setattr(child, name, replace(value, drop=drop))
    if not seams:
        rule = "it would have no effect: the model has none of the layers whose arithmetic is compiled"
        raise ConfigError.of("train.compile", True, rule, "compile = false, or compile inside of the model's own class")


def _load_compiler() -> None:
    """Inductor, to compile in this process: no helper outlives the rank.

    Ranks that compile the same thing at once share torch's folder of results, behind its locks.
    """
    inductor.compile_threads = 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch by torch, while it is imported
        importlib.import_module("torch._inductor.compile_fx")


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _rms_forward(kernels: Kernels, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    y, inverse = kernels.rms_forward(_rows(x), weight, eps)
    return y.view(x.shape), inverse.view(*x.shape[:-1], 1)


def _rms_backward(kernels: Kernels, x: Tensor, inverse: Tensor, weight: Tensor, dy: Tensor) -> Tensor:
    dx: Tensor = kernels.rms_backward(_rows(x), _rows(inverse), weight, _rows(dy))
    return dx.view(x.shape)


def _gated(kernels: Kernels, name: str, gate: Tensor, up: Tensor) -> Tensor:
    y: Tensor = _Gated.apply(gate, up, name, kernels)
    return y


class _Gated(torch.autograd.Function):
    """Keeps gate and up; plain ops would keep act(gate) too."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, name: str, kernels: Kernels) -> Tensor:
        ctx.name, ctx.kernels = name, kernels
        ctx.save_for_backward(gate, up)
        y: Tensor = kernels.gated_forward(name, _rows(gate), _rows(up))
        return y.view(gate.shape)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        dgate, dup = ctx.kernels.gated_backward(ctx.name, _rows(gate), _rows(up), _rows(dy))
        return dgate.view(gate.shape), dup.view(gate.shape), None, None


def _softmax(kernels: Kernels, scores: Tensor, mask: Tensor, root: float) -> Tensor:
    y: Tensor = _Softmax.apply(scores, mask, root, kernels)
    return y


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, mask: Tensor, root: float, kernels: Kernels) -> Tensor:
        y: Tensor = kernels.softmax_forward(scores, mask, root)
        ctx.root, ctx.kernels, ctx.dtype = root, kernels, scores.dtype
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        dx: Tensor = ctx.kernels.softmax_backward(*ctx.saved_tensors, dy.contiguous(), ctx.root)
        return dx.to(ctx.dtype), None, None, None


def _drop(kernels: Kernels, x: Tensor, left: Tensor, right: Tensor, threshold: int, factor: float) -> Tensor:
    y: Tensor = _Drop.apply(x, left, right, threshold, factor, kernels)
    return y


class _Drop(torch.autograd.Function):
    """Keeps the words of rows and columns; plain ops would keep a mask of x's size."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, left: Tensor, right: Tensor, threshold: int, factor: float, kernels: Kernels
    ) -> Tensor:
        ctx.threshold, ctx.factor, ctx.kernels = threshold, factor, kernels
        ctx.save_for_backward(left, right)
        y: Tensor = kernels.dropped(x, left, right, threshold, factor)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        dx: Tensor = ctx.kernels.dropped(dy.contiguous(), *ctx.saved_tensors, ctx.threshold, ctx.factor)
        return dx, None, None, None, None, None
