"""Muon of stacks of experts: each expert's matrix whole, whichever axes cut the stack; what its gathers send."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.optim.fixtures import section
from torch import Tensor

from heptad.axes.apply import wanted_groups
from heptad.axes.data.buckets import _bucket, ranges_of, tiles_of
from heptad.axes.data.shard import Holders, Owners, Shard
from heptad.axes.data.stages import holder_axes, matrix_axes, replica_axes, shard_axes, shard_counts, teams
from heptad.config.schema import LayoutSection
from heptad.launch.forked import forked
from heptad.mesh.device import Mesh
from heptad.mesh.layout import Layout
from heptad.models.cut import FAMILIES, STACK, Family, cut, expert_cut, family_of
from heptad.models.share import whole
from heptad.models.spec import Init, ParamSpec, UnitSpec
from heptad.optim.build import build_optimizer
from heptad.optim.cost import Ranges, gather_rounds, matrices, muon_traffic, state_bytes
from heptad.optim.roles import describe, kind_of
from heptad.trace import Transfer, total
from heptad.verify.update import WholeOptimizer

STEPS = 3
OPTIONS = {"name": "muon", "muon_lr": 0.3, "lr": 0.1, "weight_decay": 0.2, "muon_momentum": 0.8, "schedule": "linear"}
NORMAL = Init("normal", 1.0)
SPECS = (
    ParamSpec("up", (5, 7, 11), STACK, "matrix", NORMAL),
    ParamSpec("tall", (5, 13, 3), STACK, "matrix", NORMAL),
    ParamSpec("down", (5, 7, 11), STACK, "matrix", NORMAL, input_first=True),
    ParamSpec("router", (5, 11), ("experts", "width"), "matrix", NORMAL),
)
"""Five experts: at 2 places of ep the last one has a dead one, at 4 places two."""


def values(seed: int) -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(seed)
    return {spec.name: torch.randn(spec.shape, generator=made, dtype=torch.float64) for spec in SPECS}


class Held:
    """What the ranks of a layout hold of `SPECS`: of each family one bucket, as `axes/apply.py` cuts it."""

    def __init__(self, layout: LayoutSection) -> None:
        self.layout, self.zero = Layout.of(layout), layout.zero
        parts = layout.ep * layout.etp
        dense, stacks = ([spec for spec in SPECS if family_of(spec) == family] for family in FAMILIES)
        self.cuts: dict[Family, list[dict[str, Any]]] = {
            "dense": [{spec.name: cut(spec, None, 1, 0, False) for spec in dense}],  # type: ignore[arg-type]
            "expert": [
                {spec.name: expert_cut(spec, layout.ep, layout.etp, at) for spec in stacks} for at in range(parts)
            ],
        }
        counts = shard_counts(self.layout, layout.zero)
        self.buckets = {
            family: _bucket(0, [held.local for held in self.cuts[family][0].values()], counts[family], True, family)
            for family in FAMILIES
        }

    def shards(self, mesh: Mesh, params: dict[str, Tensor]) -> list[Shard]:
        """This rank's, with zero gradients."""
        places = mesh.layout.expert_coords(mesh.rank)
        index = {"dense": 0, "expert": places["ep"] * self.layout.etp + places["etp"]}
        families = {family: self._holders(mesh, family, index[family]) for family in FAMILIES}
        units = [UnitSpec("all", "custom", (), tuple(spec.name for spec in SPECS))]
        owners = Owners(families, {}, whole(units, SPECS), {})
        found = []
        for family in FAMILIES:
            holders, bucket = families[family], self.buckets[family]
            for slot in bucket.slots:
                ranges, at = ranges_of(bucket, slot), holders.shards.index
                start, stop = ranges[at]
                local = torch.zeros(slot.spec.numel, dtype=torch.float64)
                for run in holders.cuts[holders.index][slot.spec.name].runs:
                    real = params[slot.spec.name].reshape(-1)[run.whole : run.whole + run.numel]
                    local[run.start : run.start + run.numel] = real
                master = local[start:stop].clone()
                found += owners.shards(slot.spec.name, family, ranges, at, master, torch.zeros_like(master))
        return found

    def _holders(self, mesh: Mesh, family: Family, index: int) -> Holders:
        kinds = (shard_axes, replica_axes, holder_axes)
        groups = (mesh.group(*axes(self.zero, family)) for axes in kinds)
        team = mesh.group(*matrix_axes(self.zero, family))
        return Holders(*groups, self.cuts[family], index, team, teams(self.layout, self.zero, family))

    def predicted(self) -> list[Transfer]:
        found = []
        for family in FAMILIES:
            among, tiles = teams(self.layout, self.zero, family), list[Ranges]()
            for slot in self.buckets[family].slots:
                held = [cuts[slot.spec.name] for cuts in self.cuts[family]]
                ranges = ranges_of(self.buckets[family], slot)
                runs = [tiles_of(ranges, held, run) for run in range(len(held[0].runs))]
                tiles += matrices(held[0].spec, runs, among)
            axis = self.layout.group_name(matrix_axes(self.zero, family))
            found += muon_traffic(tiles, axis, 8, among)
        return found


def set_grads(shards: Sequence[Shard], params: dict[str, Tensor]) -> None:
    for shard in shards:
        shard.gradient().copy_(params[shard.spec.name].reshape(-1)[shard.start : shard.stop])


Found = list[tuple[str, int, int, list[float], list[float]]]


def train(rank: int, layout: LayoutSection, round_numel: int | None = None) -> tuple[Found, list[Transfer]]:
    """(name, start, stop, master, momentum) of each shard, after `STEPS` updates; what was counted."""
    import heptad.optim.muon as muon

    if round_numel is not None:
        muon.gather_rounds = lambda cuts, teams: gather_rounds(cuts, teams, round_numel)
    mesh = Mesh(Layout.of(layout), rank, wanted_groups(layout.zero, FAMILIES), torch.device("cpu"))
    shards = Held(layout).shards(mesh, values(0))
    optimizer = build_optimizer(section(**OPTIONS), shards, STEPS)
    for step in range(1, STEPS + 1):
        set_grads(shards, values(step))
        optimizer.step(step)
    found = [
        (shard.spec.name, shard.start, shard.stop, shard.master.tolist(), piece.tensor.tolist())
        for shard, piece in zip(shards, optimizer.pieces(), strict=True)
    ]
    return found, mesh.ledger.transfers()


def alone() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Masters and momenta of one device."""
    params = values(0)
    shards = [
        Shard(spec, 0, spec.numel, params[spec.name].reshape(-1), torch.zeros(spec.numel).double(), None)
        for spec in SPECS
    ]
    optimizer = build_optimizer(section(**OPTIONS), shards, STEPS)
    for step in range(1, STEPS + 1):
        set_grads(shards, values(step))
        optimizer.step(step)
    return params, {piece.name.partition("/")[2]: piece.tensor for piece in optimizer.pieces()}


def test_one_device_equals_the_independent_one() -> None:
    params, _ = alone()
    right = values(0)
    other = WholeOptimizer(section(**OPTIONS), SPECS, STEPS)
    for step in range(1, STEPS + 1):
        other.step(step, right, values(step))
    for name, value in params.items():
        assert (value - values(0)[name]).abs().max() > 0.1
        torch.testing.assert_close(value, right[name], rtol=1e-11, atol=1e-13)


LAYOUTS: dict[str, dict[str, int]] = {
    "stage 0, ep 2": dict(dp_shard=2, zero=0, ep=2),
    "stage 0, etp 2": dict(dp_shard=2, zero=0, etp=2),
    "stage 1": dict(dp_shard=2, zero=1),
    "stage 3, ep 2": dict(dp_shard=4, zero=3, ep=2),
    "stage 2, etp 2": dict(dp_shard=4, zero=2, etp=2),
    "stage 1, ep 4": dict(dp_shard=4, zero=1, ep=4),
    "stage 3, ep 2, etp 2": dict(dp_shard=8, zero=3, ep=2, etp=2),
    "hsdp, ep 2": dict(dp_replicate=2, dp_shard=4, zero=3, ep=2),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_updates_are_those_of_one_device_bit_for_bit(name: str) -> None:
    layout = LayoutSection(**LAYOUTS[name])  # type: ignore[arg-type]
    masters, momenta = alone()
    held = Held(layout)
    seen: dict[str, set[int]] = {spec.name: set() for spec in SPECS}
    for found, counted in forked(held.layout.world, train, layout):
        assert total(counted) == {key: (STEPS * n, STEPS * b) for key, (n, b) in total(held.predicted()).items()}
        for spec, start, stop, master, momentum in found:
            assert master == masters[spec].reshape(-1)[start:stop].tolist(), (spec, start, stop)
            assert momentum == momenta[spec][start:stop].tolist(), (spec, start, stop)
            seen[spec] |= set(range(start, stop))
    assert all(len(seen[spec.name]) == spec.numel for spec in SPECS)
    axes = {axis for axis, _, _ in total(held.predicted())}
    assert all("ep" not in axis.split("*") for axis in axes), "experts of other ranks are not gathered"


def test_an_expert_that_lies_on_one_rank_is_not_sent() -> None:
    for name, dense in (("stage 0, ep 2", 0), ("stage 1, ep 4", 1)):
        found = Held(LayoutSection(**LAYOUTS[name])).predicted()  # type: ignore[arg-type]
        assert [item.axis for item in found] == ["dp_shard"] * dense


def test_rounds_are_as_wide_on_every_team() -> None:
    """Of 3 experts two ranks have 0 and 1, the other two 2 and a dead one; shards cut expert 0, and 2 elsewhere."""
    among = ((0, 2), (1, 3))
    cuts = matrices(ParamSpec("up", (3, 2, 5), STACK, "matrix", NORMAL), [((0, 8), (20, 29), (8, 20), (29, 30))], among)
    assert cuts == [((0, 8), (20, 29), (8, 10), (29, 30)), ((0, 0), (0, 0), (10, 20), (0, 0))]
    assert [(item.members, item.width) for item in gather_rounds(cuts, among)] == [((0,), 9)]
    assert muon_traffic(cuts, "edp", 4, among) == [Transfer("all_gather", "edp", "update", 9 * 4)]


def test_prefetched_rounds_change_nothing() -> None:
    layout = LayoutSection(**LAYOUTS["stage 2, etp 2"])  # type: ignore[arg-type]
    for (one, _), (many, counted) in zip(forked(4, train, layout), forked(4, train, layout, 1), strict=True):
        assert one == many and max(number for number, _ in total(counted).values()) == STEPS * 15


def test_who_updates_stacks_and_what_it_keeps() -> None:
    muon = section(name="muon")
    assert {kind_of(muon, spec) for spec in SPECS} == {"muon"}
    assert kind_of(muon, ParamSpec("conv", (5, 7, 11), ("x", "x", "x"), "matrix", NORMAL)) == "adamw"
    numel = sum(spec.numel for spec in SPECS)
    assert state_bytes(muon, SPECS, 4) == 4 * numel
    cut_by_rows = [spec for spec in SPECS for _ in range(3)]  # of a stack with etp a shard each expert
    line = f"muon, lr 0.02, decay 0.1: matrix (4 tensors, {numel} elements)"
    assert describe(muon, SPECS) == describe(muon, cut_by_rows) == [line.replace(str(numel), f"{numel:,}")]
