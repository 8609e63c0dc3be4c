"""Ranks, coordinates and groups of a layout."""

from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heptad.config.schema import LayoutSection
from heptad.mesh.layout import AXES, BLOCK, EXPERT_AXES, Layout

DEGREES = st.integers(1, 4)
SMALL = st.integers(1, 3)


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
    """arXiv 2412.19437: 2048 = P16 × 128, EP 64 inside the 128: two copies of each expert."""
    layout = Layout.of(LayoutSection(pp=16, dp_shard=128, ep=64))
    assert layout.world == 2048
    assert layout.expert_data_parallel == 2


@given(SMALL, SMALL, SMALL, SMALL, SMALL, st.sampled_from(list(permutations(AXES))), st.data())
def test_expert_axes_are_carved_from_every_block_whatever_the_order(
    pp: int, replicate: int, shard: int, cp: int, tp: int, order: tuple[str, ...], draw: st.DataObject
) -> None:
    block = shard * cp * tp
    degrees = st.sampled_from([(ep, etp) for ep in range(1, 28) for etp in range(1, 28) if block % (ep * etp) == 0])
    ep, etp = draw.draw(degrees)
    degrees_of = dict(pp=pp, dp_replicate=replicate, dp_shard=shard, cp=cp, tp=tp, ep=ep, etp=etp)
    layout = Layout.of(LayoutSection(**degrees_of, order="-".join(order)))
    assert layout.degree("edp", "ep", "etp") == block and layout.degree("ep") == ep
    every = ("pp", "dp_replicate", *EXPERT_AXES)
    for ranks in layout.groups(EXPERT_AXES):  # those of dp_shard × cp × tp, by number
        assert ranks == tuple(sorted(layout.group_of(ranks[0], BLOCK)))
        for number, rank in enumerate(ranks):
            coords = layout.expert_coords(rank)
            assert number == (coords["edp"] * ep + coords["ep"]) * etp + coords["etp"]
            assert all(coords[axis] == layout.coords(rank)[axis] for axis in ("pp", "dp_replicate"))
    wanted = tuple(draw.draw(st.lists(st.sampled_from(every), unique=True)))
    wanted = wanted if set(wanted) & set(EXPERT_AXES) else (*wanted, "ep")
    groups = layout.groups(wanted)
    assert sorted(rank for group in groups for rank in group) == list(range(layout.world))
    for group in groups:
        assert len(group) == layout.degree(*wanted) and layout.group_of(group[-1], wanted) == group
        places = [layout.expert_coords(rank) for rank in group]
        assert len({tuple(coords[axis] for axis in every if axis not in wanted) for coords in places}) == 1
        inside = [tuple(coords[axis] for axis in wanted) for coords in places]
        assert inside == sorted(inside)


def test_the_expert_axes_of_an_odd_order() -> None:
    """tp outermost, dp_replicate between cp and dp_shard: a block is no run of ranks."""
    layout = Layout.of(
        LayoutSection(tp=2, cp=2, dp_replicate=2, dp_shard=2, ep=2, etp=2, order="tp-cp-dp_replicate-dp_shard-pp")
    )
    assert layout.groups(EXPERT_AXES) == ((0, 1, 4, 5, 8, 9, 12, 13), (2, 3, 6, 7, 10, 11, 14, 15))
    assert layout.groups(("etp",))[:2] == ((0, 1), (4, 5))
    assert layout.groups(("ep",))[:2] == ((0, 4), (1, 5))
    assert layout.groups(("edp",))[:2] == ((0, 8), (1, 9))
    assert layout.groups(("dp_replicate", "edp"))[0] == (0, 8, 2, 10)
    assert layout.group_name(("dp_replicate", "edp")) == "dp_replicate*edp" and layout.group_name(("etp",)) == "etp"
    assert layout.expert_coords(14) == {"pp": 0, "dp_replicate": 1, "edp": 1, "ep": 1, "etp": 0}
    assert layout.crosses_nodes(("ep",), 4) and not layout.crosses_nodes(("etp",), 4)
    with pytest.raises(AssertionError, match="mixes dense and expert axes"):
        layout.groups(("tp", "ep"))
