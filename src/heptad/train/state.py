"""A trainer's whole state to and from a checkpoint: weights, optimizer, loader, counts. Nothing else is state.

Dropout, order of data and initial values are keyed and the learning rate is a function of the step, so there is no
random state to keep. Tensors are named and cut by global offsets: any layout loads what another one saved. Read next:
`checkpoint/save.py`, `checkpoint/read.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from heptad.checkpoint.read import Reader
from heptad.checkpoint.save import save
from heptad.loader.loader import Loader
from heptad.mesh.collectives import Group, barrier
from heptad.optim.roles import kind_of, state_slots
from heptad.train.agreement import require_same_replicas
from heptad.train.balance import shapes
from heptad.train.runfolder import RunFolder
from heptad.train.step import Trainer

SAVE_TIMEOUT_S = 3600.0
"""How long ranks wait for each other's disks."""


@dataclass(frozen=True, slots=True)
class Counts:
    """What a run has done up to and with `step`."""

    step: int = 0
    tokens: int = 0
    targets: int = 0


def save_state(trainer: Trainer, loader: Loader, folder: RunFolder, counts: Counts, world: Group) -> tuple[str, ...]:
    """Write the checkpoint of `counts.step`. Collective over `world`. Returns rank 0's notes for the user.

    Raises Disagreement, and writes nothing, when replicas have parted: one of them would be taken for the model.
    """
    require_same_replicas(trainer)
    meta: dict[str, Any] = {
        "optimizer": trainer.optimizer.meta(),
        "loader": loader.state(counts.step),
        "tokens": counts.tokens,
        "targets": counts.targets,
    }
    saved = save(
        folder.checkpoints,
        counts.step,
        trainer.pieces(),
        meta,
        world.index,
        world.size,
        lambda: barrier(world, SAVE_TIMEOUT_S),
        run=folder.name,
        keep=folder.job.checkpoint.keep,
    )
    return () if saved is None else saved.notes


def tensors_of(trainer: Trainer) -> dict[str, tuple[int, ...]]:
    """Every tensor of the job's state and its whole shape, also what only other ranks of a pipeline hold."""
    section, found = trainer.job.optimizer, dict[str, tuple[int, ...]]()
    for spec in trainer.parallel.model.specs:
        found[spec.name] = spec.shape
        for slot in state_slots(section, kind_of(section, spec)) if spec.trainable else ():
            found[f"{slot}/{spec.name}"] = spec.shape
    found.update(shapes(trainer.parallel.model))
    assert all(found.get(piece.name) == piece.shape for piece in trainer.pieces())
    return found


def restore(trainer: Trainer, reader: Reader) -> Counts:
    """Load weights and optimizer state of any layout's checkpoint; strict about names and shapes (CheckpointError)."""
    reader.check(tensors_of(trainer))
    reader.load([shard.piece(shard.master) for shard in trainer.engine.shards] + trainer.balance.pieces())
    trainer.optimizer.load(reader.fill, reader.meta["optimizer"])
    trainer.engine.refresh()
    return Counts(reader.step, int(reader.meta["tokens"]), int(reader.meta["targets"]))
