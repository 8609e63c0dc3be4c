"""The reference's optimizers: whole tensors, plain torch operations, one parameter at a time, none of `optim`'s code.

AdamW: Loshchilov and Hutter, arXiv 1711.05101, algorithm 2. SGD with momentum: as torch defines it (buf = μ·buf + g,
decay in the gradient). Muon: Jordan et al., with Nesterov momentum and five Newton–Schulz steps. Tests compare the
first two with torch.optim's classes (which cost a second to load, so they are not used here).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from heptad.config.schema import OptimizerSection
from heptad.models.spec import ParamSpec
from heptad.optim.roles import decay_of, kind_of, peak_lr
from heptad.optim.schedule import lr_at


class WholeOptimizer:
    """Updates parameters held whole, by name."""

    def __init__(self, section: OptimizerSection, specs: tuple[ParamSpec, ...], total_steps: int) -> None:
        self.section, self.total_steps = section, total_steps
        self.specs = [spec for spec in specs if spec.trainable]
        self.state: dict[str, list[Tensor]] = {}
        self.updates = 0

    def step(self, step: int, masters: dict[str, Tensor], grads: dict[str, Tensor]) -> None:
        """Change `masters` in place; `grads` are clipped already. `step` counts from 1."""
        self.updates += 1
        for spec in self.specs:
            kind = kind_of(self.section, spec)
            lr = lr_at(self.section, step, self.total_steps, peak_lr(self.section, kind))
            master, grad = masters[spec.name], grads[spec.name].to(masters[spec.name].dtype)
            decay = decay_of(self.section, spec)
            if kind == "adamw":
                self._adamw(spec.name, master, grad, lr, decay)
            elif kind == "sgd":
                self._sgd(spec.name, master, grad, lr, decay)
            else:
                self._matrices(spec, master, grad, lr, decay)

    def _moments(self, name: str, like: Tensor, number: int) -> list[Tensor]:
        return self.state.setdefault(name, [torch.zeros_like(like) for _ in range(number)])

    def _adamw(self, name: str, master: Tensor, grad: Tensor, lr: float, decay: float) -> None:
        first, second = self._moments(name, master, 2)
        beta1, beta2 = self.section.betas
        first.mul_(beta1).add_(grad, alpha=1 - beta1)
        second.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        mean = first / (1 - beta1**self.updates)
        spread = (second / (1 - beta2**self.updates)).sqrt() + self.section.eps
        master.mul_(1 - lr * decay).sub_(mean / spread, alpha=lr)

    def _sgd(self, name: str, master: Tensor, grad: Tensor, lr: float, decay: float) -> None:
        direction = grad + decay * master
        if self.section.momentum:
            (momentum,) = self._moments(name, master, 1)
            direction = momentum.mul_(self.section.momentum).add_(direction)
        master.sub_(direction, alpha=lr)

    def _matrices(self, spec: ParamSpec, master: Tensor, grad: Tensor, lr: float, decay: float) -> None:
        """One matrix, or each of a stack of experts [E, F, D]; a matrix is (out, in), however it is stored."""
        pairs = [(master, grad)] if master.dim() == 2 else list(zip(master, grad, strict=True))
        for number, (weight, slope) in enumerate(pairs):
            turned = (weight.T, slope.T) if spec.input_first else (weight, slope)
            self._muon(f"{spec.name} {number}", *turned, lr, decay)

    def _muon(self, name: str, master: Tensor, grad: Tensor, lr: float, decay: float) -> None:
        (momentum,) = self._moments(name, master, 1)
        mu = self.section.muon_momentum
        momentum.mul_(mu).add_(grad, alpha=1 - mu)
        direction = (1 - mu) * grad + mu * momentum
        rows, columns = master.shape
        scale = math.sqrt(max(1.0, rows / columns))
        master.mul_(1 - lr * decay).sub_(_orthogonal(direction), alpha=lr * scale)


def _orthogonal(matrix: Tensor) -> Tensor:
    """Five steps of x <- a·x + b·(xxᵀ)x + c·(xxᵀ)²x on the matrix over its Frobenius norm, the short side first."""
    wide = matrix.shape[0] <= matrix.shape[1]
    x = matrix if wide else matrix.T
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * (gram @ gram)) @ x
    return x if wide else x.T
