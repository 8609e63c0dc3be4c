"""What a router asks of the sequences whose tokens it sees: how often something is in each, and the order of choices.

A rank's own tokens are a run of the flattened batch [B·L] (all of it on one rank; zeros fill the last rank's rows), and
its batch may be a part of each sequence (the context axis). Sums by sequence are products with a membership matrix
[B, n]: no atomics, so a repeated run has the same bits. `Sequences` is the form for one device, and the seam:
`axes/expert/sequences.py` sums and gathers over the ranks that hold the rest.

Legend: B sequences, L tokens of one, n own tokens, K choices a token, E experts. Cost: 2·B·n·E FLOPs a sum. Read next:
`router.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from heptad.mesh.regions import SINGLE, Stream
from heptad.models.batch import Batch


@dataclass(frozen=True, slots=True)
class Own:
    """A rank's own tokens. row [n] int64: which sequence of the batch; real [n] bool, None: all are; index [n] int64:
    their global numbers; rows: B.
    """

    row: Tensor
    real: Tensor | None
    index: Tensor
    rows: int

    def member(self, dtype: torch.dtype) -> Tensor:
        """[B, n]: 1 where a token is real and of the sequence, else 0."""
        found = self.row == torch.arange(self.rows, device=self.row.device).unsqueeze(1)
        return (found if self.real is None else found & self.real).to(dtype)


class Sequences:
    """Sequences that are whole on one rank. stream: how tensor ranks hold the tokens."""

    def __init__(self, stream: Stream = SINGLE) -> None:
        self.stream = stream

    def own(self, batch: Batch) -> Own:
        """The tokens of `batch` that this rank routes."""
        rows, length = batch.ids.shape
        row = torch.arange(rows, device=batch.ids.device).unsqueeze(1).expand(rows, length)
        real = batch.real
        if real is None and rows * length % self.stream.size:
            real = torch.ones_like(batch.ids, dtype=torch.bool)
        part = self.stream.part
        return Own(part(row), None if real is None else part(real), part(batch.index), rows)

    def summed(self, counts: Tensor) -> Tensor:
        """counts [B, E] int32 of own tokens -> those of whole sequences; may overwrite what it is given."""
        return counts

    def whole(self, values: Tensor, batch: Batch) -> Tensor:
        """values [n, K] int64 of own tokens, -1 where a token is not real -> [B, L, K] of whole sequences, by
        position."""
        return values.view(*batch.ids.shape, -1)

    def part(self, values: Tensor, batch: Batch) -> Tensor:
        """[B, L, K] of whole sequences -> own tokens' [n, K]."""
        return values.flatten(0, 1)
