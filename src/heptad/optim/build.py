"""The optimizer of a job: one group for each (optimizer, decay), chosen by role, over this rank's shards.

A step is: the learning rate of this step from the schedule, for every group, then each group's update. The learning
rate is no state: after a resume it is what the step says. State is named "slot/parameter" and sliced by global flat
offsets, so a checkpoint loads under any layout. `updates` counts the applied updates (a skipped step is none), which
AdamW's bias correction reads. Read next: `roles.py`, `elementwise.py`, `muon.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from heptad.axes.data.shard import Shard
from heptad.config.schema import OptimizerName, OptimizerSection
from heptad.mesh.piece import Piece
from heptad.optim.elementwise import SGD, AdamW
from heptad.optim.muon import Muon
from heptad.optim.roles import decay_of, kind_of, peak_lr
from heptad.optim.schedule import lr_at

Fill = Callable[[str, int, int, Tensor], None]
"""fill(name, start, stop, out): writes flat elements [start, stop) of the saved tensor `name` into `out`."""


class Rule(Protocol):
    """One kind of update over some shards; `state[slot][i]` belongs to `shards[i]`."""

    shards: list[Shard]
    state: dict[str, list[Tensor]]

    def update(self, lr: float, num_updates: int) -> None:
        """Change every master in place from its gradient; `num_updates` counts this one."""


@dataclass(slots=True)
class ParamGroup:
    """Parameters with one optimizer and one decay; `lr` is what the last step used."""

    kind: OptimizerName
    weight_decay: float
    peak_lr: float
    rule: Rule
    lr: float = 0.0


class Optimizer:
    """All groups of this rank. Every rank makes the same groups with the same names, whatever its shards hold."""

    def __init__(self, section: OptimizerSection, total_steps: int, groups: Sequence[ParamGroup]) -> None:
        self.section, self.total_steps, self.groups = section, total_steps, tuple(groups)
        self.updates = 0

    def step(self, step: int) -> None:
        """Apply the update of `step` (from 1): reads every `shard.grad`, changes every `shard.master`."""
        self.updates += 1
        for group in self.groups:
            group.lr = lr_at(self.section, step, self.total_steps, group.peak_lr)
            assert 0.0 <= group.lr <= group.peak_lr, (step, group)
            group.rule.update(group.lr, self.updates)

    def pieces(self) -> list[Piece]:
        """State by element: "exp_avg/<name>", "exp_avg_sq/<name>", "momentum/<name>", "muon_momentum/<name>"."""
        return [
            Piece(f"{slot}/{shard.spec.name}", shard.spec.shape, shard.start, shard.stop, tensor)
            for group in self.groups
            for slot, tensors in group.rule.state.items()
            for shard, tensor in zip(group.rule.shards, tensors, strict=True)
        ]

    def meta(self) -> dict[str, Any]:
        """State that belongs to no element; equal on all ranks."""
        return {"updates": self.updates}

    def load(self, fill: Fill, meta: Mapping[str, Any]) -> None:
        """Read back what `pieces()` and `meta()` gave, under any layout; `fill` raises for a name not saved."""
        for piece in self.pieces():
            fill(piece.name, piece.start, piece.stop, piece.tensor)
        self.updates = int(meta["updates"])


_RULES: dict[OptimizerName, Callable[[Sequence[Shard], OptimizerSection, float], Rule]] = {
    "adamw": AdamW,
    "sgd": SGD,
    "muon": Muon,
}


def build_optimizer(section: OptimizerSection, shards: Sequence[Shard], total_steps: int) -> Optimizer:
    """Group `shards` (the same parameters in the same order on every rank) by role; frozen ones take no part.

    `total_steps` is where the schedule ends. All state is allocated here.
    """
    members: dict[tuple[OptimizerName, float], list[Shard]] = {}
    for shard in shards:
        if shard.spec.trainable:
            members.setdefault((kind_of(section, shard.spec), decay_of(section, shard.spec)), []).append(shard)
    groups = [
        ParamGroup(kind, decay, peak_lr(section, kind), _RULES[kind](own, section, decay))
        for (kind, decay), own in members.items()
    ]
    return Optimizer(section, total_steps, groups)
