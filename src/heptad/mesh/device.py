"""Process groups of a layout: made once per distinct set of ranks, all at start, in one order on every rank.

Their number depends on the axes in use, never on the model's depth. Read next: `collectives.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from heptad.mesh.collectives import Group
from heptad.mesh.layout import Layout
from heptad.mesh.ledger import Ledger

Made = dict[tuple[int, ...], tuple[dist.ProcessGroup | None, Iterator[int]]]
"""Ranks -> their process group, and the numbers of its collectives: of all axes along which it lies."""


class Mesh:
    """The groups this rank belongs to. `torch.distributed` is initialised before (world of 1: need not be)."""

    def __init__(self, layout: Layout, rank: int, wanted: Sequence[tuple[str, ...]], device: torch.device) -> None:
        self.layout, self.rank, self.device, self.ledger = layout, rank, device, Ledger()
        self._groups: dict[tuple[str, ...], Group] = {}
        self._made: Made = {}
        for axes in wanted:
            self._groups[axes] = self._make(axes, layout.degree(*axes))

    def _make(self, axes: tuple[str, ...], size: int) -> Group:
        """Groups along `axes`, each cut into runs of `size`; returns this rank's."""
        every = self.layout.groups(axes)
        runs = [run[at : at + size] for run in every for at in range(0, len(run), size)]
        mine = self._of(self.layout.group_name(axes), runs, self._made)
        assert mine is not None
        return mine

    def _of(self, name: str, runs: Sequence[tuple[int, ...]], made: Made) -> Group | None:
        """Makes the groups `runs` that are not in `made` yet, on all ranks alike; this rank's, if it is in one."""
        for ranks in runs:
            if ranks not in made:
                several = len(ranks) > 1
                made[ranks] = dist.new_group(list(ranks), sort_ranks=False) if several else None, count(1)
        mine = next((run for run in runs if self.rank in run), None)
        if mine is None:
            return None
        pg, numbers = made[mine]
        return Group(name, mine, mine.index(self.rank), pg, self.ledger, self.device.type == "cpu", numbers)

    def neighbours(self, axis: str, size: int) -> Group:
        """Runs of `size` neighbours along `axis` (a divisor of its degree). Collective over all ranks: made here."""
        assert self.layout.degree(axis) % size == 0, (axis, size)
        return self._make((axis,), size)

    def strided(self, axis: str, step: int) -> Group:
        """Every `step`-th rank along `axis` (a divisor of its degree), with communication of its own: a ring's hops

        wait for no other traffic of the same ranks. Collective over all ranks: made here.
        """
        assert self.layout.degree(axis) % step == 0, (axis, step)
        runs = [run[at::step] for run in self.layout.groups((axis,)) for at in range(step)]
        mine = self._of(self.layout.group_name((axis,)), runs, {})
        assert mine is not None
        return mine

    def places(self, axis: str, places: tuple[int, ...]) -> Group | None:
        """The ranks at these places along `axis`, if this one is among them. Collective over all ranks: made here."""
        return self._of(axis, [tuple(run[at] for at in places) for run in self.layout.groups((axis,))], self._made)

    def another(self, axis: str) -> Group:
        """A second group along `axis` with communication of its own. Collective over all ranks: made here."""
        mine = self._of(self.layout.group_name((axis,)), self.layout.groups((axis,)), {})
        assert mine is not None
        return mine

    def group(self, *axes: str) -> Group:
        """The group along `axes`, which must be among those wanted at construction."""
        return self._groups[axes]

    def axis_of(self, ranks: tuple[int, ...]) -> str:
        """The axis of this rank's group of exactly these ranks."""
        return next(group.axis for group in self._groups.values() if group.ranks == ranks)

    def device_mesh(self, *dims: tuple[str, ...]) -> DeviceMesh:
        """A torch DeviceMesh of this rank's block of ranks, one mesh dim for each tuple of axes (outermost first)."""
        every = tuple(axis for axes in dims for axis in axes)
        shape = [self.layout.degree(*axes) for axes in dims]
        blocks = [torch.tensor(ranks).view(shape) for ranks in self.layout.groups(every)]
        names = tuple("*".join(axes) for axes in dims)
        meshes = [DeviceMesh(self.device.type, block, mesh_dim_names=names) for block in blocks]
        return next(mesh for mesh, block in zip(meshes, blocks, strict=True) if self.rank in block)
