"""Ranks, coordinates and groups of a layout."""

from __future__ import annotations

from itertools import permutations

from hypothesis import given
from hypothesis import strategies as st

from heptad.config.schema import LayoutSection
from heptad.mesh.layout import AXES, Layout

DEGREES = st.integers(1, 4)


@given(
    DEGREES,
    DEGREES,
    DEGREES,
    DEGREES,
    DEGREES,
    st.sampled_from(list(permutations(AXES))),
    st.sets(st.sampled_from(AXES)),
)
def test_coordinates_and_groups_partition_the_world(
    pp: int, replicate: int, shard: int, cp: int, tp: int, order: tuple[str, ...], axes: set[str]
) -> None:
    section = LayoutSection(pp=pp, dp_replicate=replicate, dp_shard=shard, cp=cp, tp=tp, order="-".join(order))
    layout = Layout.of(section)
    assert layout.world == pp * replicate * shard * cp * tp
    assert all(layout.rank_of(layout.coords(rank)) == rank for rank in range(layout.world))
    wanted = tuple(axis for axis in order if axis in axes)
    groups = layout.groups(wanted)
    assert sorted(rank for group in groups for rank in group) == list(range(layout.world))
    assert all(len(group) == layout.degree(*wanted) for group in groups)
    for group in groups:
        assert all(layout.group_of(rank, wanted) == group for rank in group)
        fixed = [{axis: layout.coords(rank)[axis] for axis in order if axis not in axes} for rank in group]
        assert all(coords == fixed[0] for coords in fixed)


def test_the_last_axis_of_the_order_has_neighbouring_ranks() -> None:
    layout = Layout.of(LayoutSection(dp_replicate=2, dp_shard=2, tp=2))
    assert layout.groups(("tp",)) == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert layout.groups(("dp_shard",)) == ((0, 2), (1, 3), (4, 6), (5, 7))
    other = Layout.of(LayoutSection(dp_replicate=2, dp_shard=2, tp=2, order="tp-pp-cp-dp_replicate-dp_shard"))
    assert other.groups(("dp_shard",)) == ((0, 1), (2, 3), (4, 5), (6, 7))


def test_data_ranks_read_different_shares_and_their_peers_the_same() -> None:
    layout = Layout.of(LayoutSection(pp=2, dp_replicate=2, dp_shard=3, tp=2))
    shares = [layout.data_rank(rank) for rank in range(layout.world)]
    assert layout.data_ranks == 6
    assert all(shares.count(share) == 4 for share in range(6))


def test_which_groups_cross_nodes() -> None:
    layout = Layout.of(LayoutSection(dp_replicate=2, dp_shard=4))
    assert not layout.crosses_nodes(("dp_shard",), 4)
    assert layout.crosses_nodes(("dp_replicate",), 4)
    assert layout.crosses_nodes(("dp_shard",), 2)


def test_deepseek_v3_carves_its_experts_from_the_dense_ranks() -> None:
    """FIELD.md: 2048 = P16 × 128, EP 64 inside the 128: two copies of each expert."""
    layout = Layout.of(LayoutSection(pp=16, dp_shard=128, ep=64))
    assert layout.world == 2048
    assert layout.expert_data_parallel == 2
