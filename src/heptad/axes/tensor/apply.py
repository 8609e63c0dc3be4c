"""From a model for one device to the one this tensor rank runs: seams set, sizes local. Parameters stay on meta.

The data axis makes the parameters' memory afterwards, in the local shapes of `models/cut.py`. Read next:
`models/parallel.py`, `axes/apply.py`.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from heptad.mesh.collectives import Group
from heptad.mesh.regions import Stream
from heptad.models.attention import Attention
from heptad.models.build import Model
from heptad.models.cut import Cut
from heptad.models.decoder import Decoder, Head
from heptad.models.mla import LatentAttention
from heptad.models.parallel import RowLinear, TokenTable

TOKENS = "embed.tokens.weight"


def cut_model(model: Model, group: Group, sequence: bool, keep: bool, cuts: dict[str, Cut]) -> None:
    """Set the seams of `model`, a decoder, for rank `group.index`; `cuts`: what it holds of each parameter."""
    if group.size == 1:
        return
    assert isinstance(model.module, Decoder), "build() refuses other classes"
    stream = Stream(group, sequence, keep)
    for name, module in model.module.named_modules():
        if hasattr(module, "stream"):
            module.stream = stream
        _localise(name, module, group, cuts)


def _localise(name: str, module: nn.Module, group: Group, cuts: dict[str, Cut]) -> None:
    """Numbers of a module that follow from what this rank holds."""
    if isinstance(module, RowLinear):
        module.adds_bias = group.index == 0
    elif isinstance(module, TokenTable):
        weight = f"{name}.weight"  # a prediction's table is the model's own
        module.first = _first_row(cuts[weight if weight in cuts else TOKENS])
    elif isinstance(module, Attention) and module.dropout is not None:
        first_head = _first_row(cuts[f"{name}.q.weight"]) // module.head_dim
        module.dropout = replace(module.dropout, first_head=first_head)
    elif isinstance(module, LatentAttention) and module.dropout is not None:
        first_head = _first_row(cuts[f"{name}.kv_b.weight"]) // (module.nope + module.value)
        module.dropout = replace(module.dropout, first_head=first_head)
    elif isinstance(module, Head):
        weight = f"{name}.out.weight"
        own = cuts[weight if weight in cuts else TOKENS]
        module.vocabulary = range(_first_row(own), own.stop // own.spec.shape[1])


def _first_row(cut: Cut) -> int:
    return cut.start // (cut.spec.numel // cut.spec.shape[0])
