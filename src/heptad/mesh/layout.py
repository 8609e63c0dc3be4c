"""Degrees and order of the axes; ranks ↔ coordinates; groups of ranks; which links a group crosses. Pure, no torch.

Dense ranks: world = pp · dp_replicate · dp_shard · cp · tp. `order` names the axes outermost first: neighbours along
the last axis are neighbouring ranks.

Expert axes are carved from the same ranks: edp · ep · etp = dp_shard · cp · tp. Of the ranks at one place of
pp and dp_replicate, a *block*, the i-th by number is at i % etp of etp, i // etp % ep of ep, i // (etp · ep) of edp,
whatever `order` says: an expert's parts lie on neighbouring ranks, which a node holds. A group lies along dense axes or
along expert ones (and pp, dp_replicate, which both have), never along both.
Read next: `device.py` (process groups of these), `axes/apply.py` (who uses which group).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from heptad.config.schema import LayoutSection

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
OUTER = ("pp", "dp_replicate")
"""Axes that dense and expert parameters both have."""

BLOCK = ("dp_shard", "cp", "tp")
"""Axes from whose ranks expert axes are carved."""

EXPERT_AXES = ("edp", "ep", "etp")
"""Carved from a block, outermost first: copies (or shards) of an expert, other experts, other rows of one."""


@dataclass(frozen=True, slots=True)
class Layout:
    """`axes`: names outermost first; `degrees`: their sizes, in that order; `ep`, `etp` inside dp_shard × cp × tp."""

    axes: tuple[str, ...]
    degrees: tuple[int, ...]
    ep: int = 1
    etp: int = 1

    @classmethod
    def of(cls, section: LayoutSection) -> Layout:
        """The layout a job file describes (already checked: `order` is a permutation of the five axes)."""
        axes = tuple(section.order.split("-"))
        assert sorted(axes) == sorted(AXES), axes
        return cls(axes, tuple(getattr(section, axis) for axis in axes), section.ep, section.etp)

    @property
    def world(self) -> int:
        """Number of ranks."""
        return math.prod(self.degrees)

    def degree(self, *axes: str) -> int:
        """Product of the degrees of `axes` (1 for none)."""
        return math.prod(self._degree(axis) for axis in axes)

    def _degree(self, axis: str) -> int:
        match axis:
            case "edp":
                return self.expert_data_parallel
            case "ep":
                return self.ep
            case "etp":
                return self.etp
        return self.degrees[self.axes.index(axis)]

    @property
    def expert_data_parallel(self) -> int:
        """Copies of an expert inside one dp_shard × cp × tp block (E_dp)."""
        block = self.degree(*BLOCK)
        assert block % (self.ep * self.etp) == 0, (block, self.ep, self.etp)
        return block // (self.ep * self.etp)

    def coords(self, rank: int) -> dict[str, int]:
        """Axis name -> coordinate of `rank`."""
        assert 0 <= rank < self.world, (rank, self.world)
        found = {}
        for axis, degree in zip(reversed(self.axes), reversed(self.degrees), strict=True):
            rank, found[axis] = divmod(rank, degree)
        return found

    def expert_coords(self, rank: int) -> dict[str, int]:
        """pp, dp_replicate, edp, ep and etp of `rank`."""
        coords = self.coords(rank)
        outer = {axis: coords[axis] for axis in OUTER}
        index = self._block(outer).index(rank)
        rest, etp = divmod(index, self.etp)
        edp, ep = divmod(rest, self.ep)
        return {**outer, "edp": edp, "ep": ep, "etp": etp}

    def rank_of(self, coords: Mapping[str, int]) -> int:
        """Inverse of `coords`; an axis left out is 0."""
        rank = 0
        for axis, degree in zip(self.axes, self.degrees, strict=True):
            rank = rank * degree + coords.get(axis, 0)
        return rank

    def groups(self, axes: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """All groups along `axes`: a partition of the ranks; a group is ordered by `axes`, first outermost."""
        if not _carved(axes):
            others = [axis for axis in self.axes if axis not in axes]
            return tuple(self._along(axes, fixed) for fixed in self._points(others))
        others = [axis for axis in (*OUTER, *EXPERT_AXES) if axis not in axes]
        blocks = {_key(point): self._block(point) for point in self._points(OUTER)}
        return tuple(self._along_carved(axes, fixed, blocks) for fixed in self._points(others))

    def group_of(self, rank: int, axes: Sequence[str]) -> tuple[int, ...]:
        """The group along `axes` that holds `rank`."""
        if not _carved(axes):
            coords = self.coords(rank)
            return self._along(axes, {axis: coords[axis] for axis in self.axes if axis not in axes})
        coords = self.expert_coords(rank)
        fixed = {axis: coords[axis] for axis in (*OUTER, *EXPERT_AXES) if axis not in axes}
        points = [{**fixed, **point} for point in self._points([axis for axis in axes if axis in OUTER])]
        return self._along_carved(axes, fixed, {_key(point): self._block(point) for point in points})

    def group_name(self, axes: Sequence[str]) -> str:
        """How ledger and predictions write a group along `axes`: those of degree > 1, joined by '*'."""
        return "*".join(axis for axis in axes if self.degree(axis) > 1) or "*".join(axes) or "none"

    @property
    def data_ranks(self) -> int:
        """Ranks that read different sequences: dp_replicate × dp_shard."""
        return self.degree("dp_replicate", "dp_shard")

    def data_rank(self, rank: int) -> int:
        """Which share of the global batch `rank` reads, in [0, data_ranks)."""
        coords = self.coords(rank)
        return coords["dp_replicate"] * self.degree("dp_shard") + coords["dp_shard"]

    def crosses_nodes(self, axes: Sequence[str], devices_per_node: int) -> bool:
        """Whether some group along `axes` has ranks on two nodes (ranks fill nodes in order)."""
        return any(len({rank // devices_per_node for rank in group}) > 1 for group in self.groups(axes))

    def _points(self, axes: Sequence[str]) -> list[dict[str, int]]:
        ranges = [range(self.degree(axis)) for axis in axes]
        return [dict(zip(axes, point, strict=True)) for point in product(*ranges)]

    def _along(self, axes: Sequence[str], fixed: Mapping[str, int]) -> tuple[int, ...]:
        return tuple(self.rank_of({**fixed, **point}) for point in self._points(axes))

    def _block(self, outer: Mapping[str, int]) -> tuple[int, ...]:
        """Ranks at one place of pp and dp_replicate, by number."""
        return tuple(sorted(self._along(BLOCK, {axis: outer[axis] for axis in OUTER})))

    def _along_carved(
        self, axes: Sequence[str], fixed: Mapping[str, int], blocks: Mapping[tuple[int, ...], tuple[int, ...]]
    ) -> tuple[int, ...]:
        found = []
        for point in self._points(axes):
            at = {**fixed, **point}
            found.append(blocks[_key(at)][(at["edp"] * self.ep + at["ep"]) * self.etp + at["etp"]])
        return tuple(found)


def _key(coords: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(coords[axis] for axis in OUTER)


def _carved(axes: Sequence[str]) -> bool:
    """Whether a group lies along expert axes."""
    carved = any(axis in EXPERT_AXES for axis in axes)
    assert not (carved and any(axis in BLOCK for axis in axes)), f"{axes} mixes dense and expert axes"
    return carved
