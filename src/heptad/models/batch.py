"""One micro-batch as the model reads it, and which positions may see each other.

The mask is made from `documents` alone: nothing a caller passes or forgets can join two documents.
A batch whose rows are one document each needs no mask (`mask` None: plain causal attention), which halves the work.
Under the context axis a rank's batch is its own tokens of a whole one (`axes/context/take.py`): no mask is ever made,
`context` says where all tokens lie. Read next: `placement.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from heptad.models.placement import Placement

IGNORED = -100
"""Label of a position that is no target: it adds exactly 0 to loss, gradient and count."""


@dataclass(frozen=True, slots=True)
class Batch:
    """All of shape [B, L], int64. Labels are already shifted: `labels[b, l]` is the target of position l, or `IGNORED`.

    `positions` restart at every document, `documents` numbers them within a sequence (attention never crosses), and
    `index` is the position's number in the step's global order of tokens (keyed dropout reads it). `step` keys it too.
    `mixed` says that a row may hold more than one document; None looks (the one data-dependent value here, so whoever
    builds a batch of fake tensors must say True or False).

    context: of a batch that is one context rank's part, where the tokens of the whole rows lie; `numbers` [B, R·tokens]
    int64 is then `index` of every place of `context`, ring rank after ring rank (-1: padding), as dropout of keys that
    other ranks hold needs it.

    real: bool [B, L], False where the loader, or the context axis, filled a row up (None: nowhere): such a place is
    sent to no expert. lengths: of a batch that is a part, how many tokens of the whole rows are real [B] int64.
    further: of a part, for each depth of multi-token prediction the tokens it joins [B, L] and the batch it predicts.
    """

    ids: Tensor
    labels: Tensor
    positions: Tensor
    documents: Tensor
    index: Tensor
    step: int
    mixed: bool | None = None
    context: Placement | None = None
    numbers: Tensor | None = None
    real: Tensor | None = None
    lengths: Tensor | None = None
    further: tuple[tuple[Tensor, Batch], ...] = ()
    _mask: Tensor | None = field(init=False, default=None, repr=False)

    def __post_init__(self) -> None:
        if self.mixed is None:
            object.__setattr__(self, "mixed", bool((self.documents != self.documents[:, :1]).any()))

    @property
    def mask(self) -> Tensor | None:
        """[B, 1, L, L] bool, True where the query (second to last dim) sees the key; None when nothing is mixed.

        Made when it is first asked for: a rank that cuts its rows never does.
        """
        if self.mixed and self._mask is None:
            object.__setattr__(self, "_mask", visible(self.documents))
        return self._mask

    def num_targets(self) -> int:
        """Number of positions that count in the loss."""
        return int((self.labels != IGNORED).sum())

    def to(self, device: torch.device) -> Batch:
        """The same batch on `device`."""
        names = ("ids", "labels", "positions", "documents", "index", "numbers", "real", "lengths")
        moved = {name: tensor.to(device) for name in names if (tensor := getattr(self, name)) is not None}
        further = tuple((ids.to(device), batch.to(device)) for ids, batch in self.further)
        return replace(self, **moved, further=further)

    def num_real(self) -> Tensor:
        """Tokens of each whole row that are real: [B] int64."""
        if self.lengths is not None:
            return self.lengths
        if self.real is not None:
            return self.real.sum(1)
        rows, length = self.ids.shape
        return torch.full((rows,), length, dtype=torch.int64, device=self.ids.device)

    def aimed(self, labels: Tensor, real: Tensor | None, lengths: Tensor | None = None) -> Batch:
        """The same tokens with other targets, places that count and the mask if it is made."""
        other = replace(self, labels=labels, real=real, lengths=lengths, further=())
        object.__setattr__(other, "_mask", self._mask)
        return other


def visible(documents: Tensor, window: int | None = None) -> Tensor:
    """documents [B, L] -> bool [B, 1, L, L]: of its document the last `window` keys up to the query."""
    length = documents.shape[1]
    same = documents.unsqueeze(2) == documents.unsqueeze(1)  # [B, Lq, Lk]
    causal = torch.ones(length, length, dtype=torch.bool, device=documents.device).tril()
    if window is not None:
        causal.triu_(1 - window)
    return same.logical_and_(causal).unsqueeze(1)
