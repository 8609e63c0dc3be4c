"""What one step sends, counted and predicted beside it (`train --ledger`).

Rows that go to experts follow the routers' choices. So in that step each router writes them down, each rank counts
where its own tokens go, and the ranks of a block tell each other these counts: 8·(nodes + EP) bytes of each rank,
router and micro-batch, after the step and outside what is counted. Read next: `axes/expert/flow.py`,
`account/traffic.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from heptad.account.traffic import step_traffic
from heptad.axes.expert.flow import Calls, Routed, Sizes, counted
from heptad.config.schema import Job
from heptad.mesh.collectives import Group, all_gather
from heptad.mesh.layout import EXPERT_AXES
from heptad.models.build import Model
from heptad.models.router import Router, routers
from heptad.precision.dtypes import dtypes_of
from heptad.trace import Transfer
from heptad.train.step import Trainer


class Sent:
    """Around one step: `begin`, the step, `end`."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.routers = spread(trainer.job, trainer.parallel.model)

    def begin(self) -> None:
        """Nothing is counted yet."""
        self.trainer.mesh.ledger.reset()
        for router in self.routers.values():
            router.choices = {}

    def end(self) -> tuple[tuple[Transfer, ...], tuple[Transfer, ...]]:
        """(counted, predicted) of this rank. Collective over the ranks of a block."""
        trainer, found = self.trainer, tuple(self.trainer.mesh.ledger.transfers())
        parallel, model, kind = trainer.parallel, trainer.parallel.model, trainer.device.type
        place, routed = trainer.mesh.layout.coords(trainer.rank)["pp"], None
        if self.routers:
            block = trainer.mesh.group(*EXPERT_AXES)
            routed = Routed(block.index, gathered(calls(trainer.job, self.routers), block, trainer.device))
        empty = 0 if trainer.stale is None else trainer.stale.without_target
        args = trainer.job, model.unit_specs, model.specs, parallel.recompute, kind, place, empty
        return found, tuple(step_traffic(*args, routed=routed))


def spread(job: Job, model: Model) -> dict[str, Router]:
    """The routers whose tokens go to other ranks."""
    return routers(model.module) if job.layout.ep * job.layout.etp > 1 else {}


def calls(job: Job, watched: Mapping[str, Router]) -> Calls:
    """Where this rank's tokens went, of the routers that were called; their choices are forgotten."""
    found = {}
    for name, router in watched.items():
        if router.choices:
            sizes = Sizes.of(job, dtypes_of(job.precision, "cpu"))
            found[name] = np.stack([counted(sizes, chosen.cpu().numpy()) for chosen in router.choices.values()])
        router.choices = None
    return found


def gathered(own: Calls, block: Group, device: torch.device) -> list[Calls]:
    """Those of every rank of a block, in its order. Collective: the ranks of a block called the same routers."""
    if not own:
        return [own] * block.size
    flat = torch.from_numpy(np.concatenate([counts.reshape(-1) for counts in own.values()])).to(device)
    full = flat.new_empty(block.size * flat.numel())
    all_gather(full, flat, block, "check").complete()
    ends = np.cumsum([counts.size for counts in own.values()])[:-1]
    every = [np.split(rank, ends) for rank in full.view(block.size, -1).cpu().numpy()]
    return [{name: part.reshape(own[name].shape) for name, part in zip(own, parts, strict=True)} for parts in every]
