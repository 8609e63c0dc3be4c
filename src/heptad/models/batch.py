"""One micro-batch as the model reads it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

IGNORED = -100
"""Label of a position that is no target: it adds exactly 0 to loss, gradient and count."""


@dataclass(frozen=True, slots=True)
class Batch:
    """All of shape [B, L], int64. Labels are already shifted: `labels[b, l]` is the target of position l, or `IGNORED`.

    `positions` restart at every document, `documents` numbers them within a sequence (attention never crosses), and
    `index` is the position's number in the step's global order of tokens (keyed dropout reads it). `step` keys it too.
    """

    ids: Tensor
    labels: Tensor
    positions: Tensor
    documents: Tensor
    index: Tensor
    step: int

    def num_targets(self) -> int:
        """Number of positions that count in the loss."""
        return int((self.labels != IGNORED).sum())

    def to(self, device: torch.device) -> Batch:
        """The same batch on `device`."""
        moved = (getattr(self, name).to(device) for name in ("ids", "labels", "positions", "documents", "index"))
        return Batch(*moved, step=self.step)
