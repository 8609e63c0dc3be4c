"""AdamW and SGD: each element's update needs that element only, so a flat shard is updated where it lies.

The arithmetic is torch's own (`torch.optim.adamw.adamw`, `torch.optim.sgd.sgd`: what `torch.optim.AdamW` and `SGD`
call), fused where torch has it, else foreach. The functions and not the classes, because the classes load torch's
compiler on first use, 1.4 s a rank. State is allocated at construction, of the master's dtype, so all ranks hold the
same names from the first step; empty shards hold empty state. A gradient of another dtype is cast (a copy of the
group's gradients). AdamW: decoupled decay (arXiv 1711.05101). SGD: torch's, decay added to the gradient, buf =
momentum·buf + g.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from heptad.axes.data.shard import Shard
from heptad.config.schema import OptimizerSection

FUSED_DEVICES = ("cpu", "cuda")
FUSED_DTYPES = (torch.float32, torch.float64)


class _Elementwise:
    """Shared by both: the shards with elements, their gradients and their state by slot."""

    def __init__(self, shards: Sequence[Shard], slots: Sequence[str], weight_decay: float) -> None:
        self.shards, self.weight_decay = list(shards), weight_decay
        self.state = {slot: [torch.zeros_like(shard.master) for shard in self.shards] for slot in slots}
        self._filled = [at for at, shard in enumerate(self.shards) if shard.start < shard.stop]
        masters = [self.shards[at].master for at in self._filled]
        self.fused = all(master.device.type in FUSED_DEVICES and master.dtype in FUSED_DTYPES for master in masters)

    def _tensors(self) -> tuple[list[Tensor], list[Tensor]]:
        """Masters and their gradients, both in the master's dtype."""
        masters = [self.shards[at].master for at in self._filled]
        grads = [self.shards[at].gradient().to(self.shards[at].master.dtype) for at in self._filled]
        return masters, grads

    def _slot(self, slot: str) -> list[Tensor]:
        return [self.state[slot][at] for at in self._filled]


class AdamW(_Elementwise):
    """AdamW over flat shards; state `exp_avg` and `exp_avg_sq`."""

    kind = "adamw"

    def __init__(self, shards: Sequence[Shard], section: OptimizerSection, weight_decay: float) -> None:
        super().__init__(shards, ("exp_avg", "exp_avg_sq"), weight_decay)
        self._betas, self._eps = section.betas, section.eps
        masters = [self.shards[at].master for at in self._filled]
        self._counts = [torch.zeros((), device=master.device if self.fused else "cpu") for master in masters]
        self._num_counted = 0

    def update(self, lr: float, num_updates: int) -> None:
        """Update number `num_updates` (from 1), which is what the bias correction counts."""
        masters, grads = self._tensors()
        if not masters:
            return
        if self._num_counted != num_updates - 1:  # after a load; otherwise torch has counted along
            for count in self._counts:
                count.fill_(num_updates - 1)
        self._num_counted = num_updates
        with torch.no_grad():
            adamw(
                masters, grads, self._slot("exp_avg"), self._slot("exp_avg_sq"), [], self._counts,
                fused=self.fused, foreach=not self.fused, amsgrad=False, maximize=False,
                beta1=self._betas[0], beta2=self._betas[1], lr=lr, weight_decay=self.weight_decay, eps=self._eps,
            )  # fmt: skip


class SGD(_Elementwise):
    """SGD over flat shards; state `momentum` when there is one."""

    kind = "sgd"

    def __init__(self, shards: Sequence[Shard], section: OptimizerSection, weight_decay: float) -> None:
        super().__init__(shards, ("momentum",) if section.momentum else (), weight_decay)
        self._momentum = section.momentum

    def update(self, lr: float, num_updates: int) -> None:
        """One update; SGD itself counts nothing."""
        masters, grads = self._tensors()
        if not masters:
            return
        buffers: list[Tensor | None] = [*self._slot("momentum")] if self._momentum else [None] * len(masters)
        with torch.no_grad():
            sgd(
                masters, grads, buffers, fused=self.fused, foreach=not self.fused,
                weight_decay=self.weight_decay, momentum=self._momentum, lr=lr,
                dampening=0.0, nesterov=False, maximize=False,
            )  # fmt: skip
