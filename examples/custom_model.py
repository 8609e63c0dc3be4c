"""A model of your own: no attention, each token mixes with the one before it by a learned gain per feature.

It has torch's own layers, a bare parameter (`gain`) and a frozen table; it trains under any data layout:

    python examples/custom_model.py                     # or with overrides: layout.zero=2 train.steps=100
    python -m heptad train debug --set model.class=examples.custom_model:TokenShift
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from heptad.config.schema import ModelSection
from heptad.models.batch import Batch
from heptad.models.decoder import loss_sum


class Tables(nn.Module):
    """Tokens, and random positions that stay as they are."""

    def __init__(self, section: ModelSection) -> None:
        super().__init__()
        self.tokens = nn.Embedding(section.vocab, section.width)
        self.places = nn.Embedding(section.max_positions, section.width)
        self.places.weight.requires_grad_(False)

    def forward(self, x: None, batch: Batch) -> Tensor:
        return self.tokens(batch.ids) + self.places(batch.positions)


class Shift(nn.Module):
    """x + down(gelu(up(norm(x) + gain · norm(x) one token earlier)))."""

    def __init__(self, section: ModelSection) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(section.width)
        self.gain = nn.Parameter(torch.empty(section.width))
        self.up = nn.Linear(section.width, section.mlp_width)
        self.down = nn.Linear(section.mlp_width, section.width)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        y = self.norm(x)
        earlier = F.pad(y, (0, 0, 1, 0))[:, :-1] * (batch.positions > 0)[..., None]  # none before a document's first
        return x + self.down(F.gelu(self.up(y + self.gain * earlier)))


class Predict(nn.Module):
    """Sum of token losses. `logits` is only asked for to print a sample of text."""

    def __init__(self, section: ModelSection) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(section.width)
        self.out = nn.Linear(section.width, section.vocab, bias=False)

    def logits(self, x: Tensor) -> Tensor:
        return self.out(self.norm(x))

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        return loss_sum(self.logits(x), batch.labels)


class TokenShift(nn.Module):
    """Called with the job's [model] section; `units` is all that Heptad asks for."""

    def __init__(self, section: ModelSection) -> None:
        super().__init__()
        self.tables, self.predict = Tables(section), Predict(section)
        self.shifts = nn.ModuleList(Shift(section) for _ in range(section.layers))

    def units(self) -> list[nn.Module]:
        return [self.tables, *self.shifts, self.predict]


if __name__ == "__main__":
    import sys

    from heptad import api

    api.train("debug", model=TokenShift, sets=sys.argv[1:] or ["layout.dp_shard=2", "train.steps=20"])
