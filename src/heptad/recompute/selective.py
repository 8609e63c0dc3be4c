"""Selective recompute: a block keeps its graph but for one part that is large and cheap to make again.

Where attention forms scores ("math"), that part is core attention: scores, softmax, dropout and the weighted sum,
5·B·H·L² elements and more of a block; kept are q, k and v, and the core runs again when its backward comes. With flash
attention, and of a sequence that context ranks cut, no scores are kept, and the part is the MLP's activation: kept are
gate and up, and act(gate)·up, which `down` reads, is made again for its weight gradient and for the activation's own
backward. Dropout is keyed, so the same elements drop again. Cost: the core's (or the activation's) forward once more;
matmuls of parameters never.
Source: Korthikanti et al., arXiv 2205.05198, §5. Read next: `policy.py`, `models/gated.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.utils.checkpoint import checkpoint

from heptad.errors import ConfigError
from heptad.models.attention import Core
from heptad.models.batch import Batch
from heptad.models.build import Model
from heptad.models.decoder import Block
from heptad.models.dropout import Dropout


def drop_parts(model: Model, scores: bool, units: Sequence[int]) -> None:
    """Sets the seams of these units' blocks. After everything else that sets `Attention.core`. scores: their graphs
    hold attention's scores.

    Raises ConfigError for a class whose blocks are not the decoder's: which part of them is large is not known.
    """
    for unit in units:
        block = model.units[unit]
        if not isinstance(block, Block):
            rule = f"which part of {type(block).__name__} is large and cheap is not known"
            fix = 'mode = "full", of which a block keeps its input alone'
            raise ConfigError.of("recompute.mode", "selective", rule, fix)
        if scores:
            block.attention.core = again(block.attention.core)
        else:
            block.mlp.reruns = True


def again(core: Core) -> Core:
    """`core`, of which q, k and v are kept and nothing else; it runs again when its backward begins."""

    def rerun(q: Tensor, k: Tensor, v: Tensor, batch: Batch, dropout: Dropout | None) -> Tensor:
        out: Tensor = checkpoint(core, q, k, v, batch, dropout, use_reentrant=False, preserve_rng_state=False)
        return out

    return rerun
