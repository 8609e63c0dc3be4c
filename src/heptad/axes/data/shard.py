"""A rank's share of one parameter: what optimizer, gradient norm, verify and checkpoints see of all axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from heptad.axes.data.buckets import tiles_of
from heptad.mesh.collectives import Group, all_reduce
from heptad.mesh.piece import Piece
from heptad.models.cut import Cut, Family, Summed, family_of
from heptad.models.share import Ranks, Share
from heptad.models.spec import ParamSpec


@dataclass(eq=False, slots=True)
class Shard:
    """The flat range [start, stop) of parameter `spec`; empty ranges are legal.

    A rank has one shard of a parameter, or one for each of its runs (experts that etp cuts): as many as other ranks.
    Indices are those of the whole tensor, whatever other axes cut of it. master: 1-D, fp32 or fp64, updated in
    place by the optimizer (for a frozen parameter: what is stored).
    grad: 1-D, reduce dtype, the sum over the whole global batch, valid at the update; None for a frozen parameter.
    group: the ranks that together hold the parameter; None when each rank holds all of it.
    ranges: [start, stop) on every rank of `group`, empty for one that is no owner: with other runs', they tile the
    tensor.
    owner: of the ranks of `group` that hold the same range, one is; it counts in the norm and takes part in gathers.
    sum_group: tensor ranks over whose gradients the sum still runs after the data axis's reduction.
    counted: whether this stage of a pipeline counts it: a copy on a later stage does not.
    team, teams: the ranks of `group` that hold parts of the same matrices as this one, and the places in `group` of all
    such teams; None and (): all of its ranks are one.
    """

    spec: ParamSpec
    start: int
    stop: int
    master: Tensor
    grad: Tensor | None
    group: Group | None
    ranges: tuple[tuple[int, int], ...] = ()
    owner: bool = True
    sum_group: Group | None = None
    counted: bool = True
    team: Group | None = None
    teams: tuple[tuple[int, ...], ...] = ()

    def gradient(self) -> Tensor:
        """The gradient of a trainable parameter."""
        assert self.grad is not None, f"{self.spec.name} is frozen"
        return self.grad

    def piece(self, tensor: Tensor) -> Piece:
        """`tensor` (of this shard's range) as a piece named after the parameter."""
        return Piece(self.spec.name, self.spec.shape, self.start, self.stop, tensor)


@dataclass(frozen=True, slots=True)
class Holders:
    """The ranks that hold the parameters of one family, and how.

    shards, replicas: over which buckets are cut, and along which ranks hold the same shard. cuts: for each of the ranks
    between which parameters are cut before the data axis does it (tensor ranks; expert ranks), by parameter's name,
    what it holds; index: this rank's place among them. group: the ranks that together hold each parameter: data shards
    × those of `cuts`, the latter innermost. team, teams: as of a `Shard`.
    """

    shards: Group
    replicas: Group
    group: Group
    cuts: Sequence[Mapping[str, Cut]]
    index: int
    team: Group
    teams: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Owners:
    """Who holds what of each parameter, and over whom its gradient is summed besides the data axis's sum.

    sums: groups of dense gradients that are only a part (`models/cut.py`). share: what this rank of the pipeline holds;
    stages: of parameters that other ranks of it hold too, by their places, the group of these.
    """

    families: Mapping[Family, Holders]
    sums: Mapping[Summed, Group]
    share: Share
    stages: Mapping[Ranks, Group]

    def own(self, spec: ParamSpec) -> Cut:
        """What this rank holds of a parameter before the data axis cuts it."""
        holders = self.families[family_of(spec)]
        return holders.cuts[holders.index][spec.name]

    def shards(
        self,
        name: str,
        family: Family,
        ranges: Sequence[tuple[int, int]],
        at: int,
        master: Tensor,
        grad: Tensor | None,
    ) -> list[Shard]:
        """Data shard `at` of a parameter whose local tensor the data axis cuts into `ranges`: a shard for each run.

        master, grad: of the whole range `ranges[at]`; what is padding of the local tensor is left out here.
        """
        holders = self.families[family]
        own, found = holders.cuts[holders.index][name], []
        group = holders.group if holders.group.size > 1 else None
        start, stop = ranges[at]
        for number, run in enumerate(own.runs):
            part = run.within(start, stop)
            real = slice(part.start - start, part.start - start + part.numel) if part.numel else slice(0, 0)
            tiles = () if group is None else tiles_of(ranges, [cuts[name] for cuts in holders.cuts], number)
            found.append(
                Shard(
                    own.spec,
                    part.whole,
                    part.whole + part.numel,
                    master[real],
                    None if grad is None else grad[real],
                    group,
                    tiles,
                    own.owner,
                    self.sums.get(own.summed),
                    self.share.counts(name),
                    holders.team,
                    holders.teams,
                )
            )
        return found


def sum_parts(shards: Sequence[Shard], group: Group, width: int) -> None:
    """Sum the gradients of `shards` over `group` in one all-reduce of `width` elements, the last of them padding."""
    if not shards:
        return
    grads = [shard.gradient() for shard in shards]
    packed = grads[0].new_zeros(width)
    parts = packed[: sum(grad.numel() for grad in grads)].split([grad.numel() for grad in grads])
    for part, grad in zip(parts, grads, strict=True):
        part.copy_(grad)
    all_reduce(packed, group, "shared").wait()
    for part, grad in zip(parts, grads, strict=True):
        grad.copy_(part)
