"""From a model for one device to the one this expert rank runs: the dispatch of every mixture replaced.

The data axis makes the experts' memory afterwards, in local shapes. Read next: `dispatch.py`, `two_level.py`,
`axes/apply.py`.
"""

from __future__ import annotations

from heptad.axes.expert.dispatch import OneLevel
from heptad.axes.expert.two_level import TwoLevel
from heptad.mesh.collectives import Group
from heptad.models.build import Model
from heptad.models.moe import Dispatch, MoE


def dispatch_over(ep: Group, etp: Group, across: Group | None = None) -> Dispatch:
    """ep: ranks with other experts, of one node where there are two levels: then `across` joins the nodes."""
    if across is None:
        return OneLevel(ep, etp)
    return TwoLevel(across, OneLevel(ep, etp, gives=False))  # another micro-batch hides the slow link's


def cut_experts(model: Model, ep: Group, etp: Group, across: Group | None = None) -> None:
    """Set the dispatch of every mixture of `model`, those that predict further tokens included."""
    dispatch = dispatch_over(ep, etp, across)
    for module in model.module.modules():
        if isinstance(module, MoE):
            module.dispatch = dispatch
