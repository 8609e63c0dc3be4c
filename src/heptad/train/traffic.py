"""Everything one training step sends from one rank, by formula: the data axis, and what the step itself reduces.

count    the targets of the global batch, one int64 over the ranks that read different tokens
loss     the loss and the wish to stop, two fp64 over the same ranks
norm     the gradient norm, one fp64 for each group that parameters are split over
update   Muon's matrices (`optim/cost.py`)
"""

from __future__ import annotations

from heptad.axes.data.engine import DataEngine
from heptad.axes.data.shard import Shard
from heptad.mesh.collectives import Group
from heptad.optim.cost import muon_traffic, norm_traffic
from heptad.optim.roles import kind_of
from heptad.trace import Transfer
from heptad.train.step import Trainer
from heptad.units import sent_bytes


def step_traffic(trainer: Trainer) -> list[Transfer] | None:
    """Transfers of one step that is not skipped; None for an engine whose communication is a library's."""
    if not isinstance(trainer.engine, DataEngine):
        return None
    found = list(trainer.parallel.predicted_traffic())
    group = trainer.loss_group
    for phase, num_bytes in (("count", 8), ("loss", 16)):
        if group.size > 1:
            found.append(Transfer("all_reduce", group.axis, phase, sent_bytes("all_reduce", num_bytes, group.size)))
    for split, shards in _by_group(trainer.engine.shards):
        found += norm_traffic(split.axis, split.size)
        muon = [shard for shard in shards if kind_of(trainer.job.optimizer, shard.spec) == "muon"]
        if muon:
            found += muon_traffic([shard.ranges for shard in muon], split.axis, muon[0].master.element_size())
    return found


def _by_group(shards: list[Shard]) -> list[tuple[Group, list[Shard]]]:
    """Trainable shards by the group they are split over; those that are whole everywhere send nothing here."""
    found: dict[int, tuple[Group, list[Shard]]] = {}
    for shard in shards:
        if shard.spec.trainable and shard.group is not None and shard.group.size > 1:
            found.setdefault(id(shard.group), (shard.group, []))[1].append(shard)
    return list(found.values())
