"""From a model for one device to the one this context rank runs: core attention replaced in every block.

Everything else of a block works on its own tokens alone. Read next: `ring.py`, `ulysses.py`, `gather.py`,
`axes/apply.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from heptad.axes.context.gather import gather_attention
from heptad.axes.context.kernels import Kernels
from heptad.axes.context.local import Drops, Local
from heptad.axes.context.ring import ring_attention
from heptad.axes.context.ulysses import to_heads, to_tokens
from heptad.config.schema import ModelSection
from heptad.mesh.collectives import Group
from heptad.models.attention import Attention
from heptad.models.batch import Batch
from heptad.models.build import Model
from heptad.models.dropout import Dropout
from heptad.models.mla import LatentAttention


@dataclass(frozen=True, slots=True)
class Core:
    """Attention of this rank's tokens to all of their rows: a `models.attention.Core` for batches with a placement.

    ring: ranks whose keys differ, with heads in common. ulysses: neighbours that share a ring rank's tokens and deal
    heads. Each may be of one rank. gathers: keys of the ring's ranks come all at once, in place of one after another.
    """

    ring: Group
    ulysses: Group
    gathers: bool
    window: int | None
    kernels: Kernels

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch, dropout: Dropout | None) -> Tensor:
        """q [B, H, L/C, d], k and v [B, K, L/C, d] -> [B, H, L/C, d]."""
        placement, dealt = batch.context, self.ulysses.size > 1
        assert placement is not None and placement.ring == self.ring.size, "a batch that was not cut for this ring"
        drops = None
        if dropout is not None:
            assert batch.numbers is not None
            first = dropout.first_head + self.ulysses.index * (q.shape[1] // self.ulysses.size)
            drops = Drops(replace(dropout, first_head=first), batch.numbers, batch.step)
        local = Local(self.kernels, placement, self.ring.index, self.window, drops)
        q, kv = to_heads(q, k, v, self.ulysses) if dealt else (q, torch.stack((k, v)))
        attend = gather_attention if self.gathers else ring_attention
        out = attend(q, kv, local, self.ring)  # [B, H/U, tokens of a ring rank, d]
        return to_tokens(out, self.ulysses) if dealt else out


def cut_attention(
    model: Model, ring: Group, ulysses: Group, gathers: bool, section: ModelSection, kernels: Kernels
) -> None:
    """Set core attention of every block of `model`. Before what wraps it (recompute)."""
    core = Core(ring, ulysses, gathers, section.window, kernels)
    for module in model.module.modules():
        if isinstance(module, Attention | LatentAttention):
            module.core = core
        if isinstance(module, LatentAttention):  # keys and values travel in one buffer
            module.padding = module.nope + module.rope - module.value
