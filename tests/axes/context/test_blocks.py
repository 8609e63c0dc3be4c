"""Blocks cover exactly what a query may see, each pair once, with small masks and few calls."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.axes.context.test_split import degrees, documents_of, lengths, one_row, packed, rows_of, same_length, splits

from heptad.axes.context import blocks as module
from heptad.axes.context.blocks import TILE, Block, between, blocks, work
from heptad.axes.context.split import pairs, place
from heptad.models.placement import Ints, Placement, Run, Runs


def counted(some: Iterable[Block], shape: tuple[int, ...]) -> NDArray[np.int64]:
    """[B, queries, keys]: in how many blocks each pair is."""
    found = np.zeros(shape, dtype=np.int64)
    for block in some:
        queries, keys = block.q_stop - block.q_start, block.k_stop - block.k_start
        i, j = np.arange(queries)[:, None], np.arange(keys)[None]
        assert queries > 0 and keys > 0 and block.rows[0] < block.rows[1]
        seen = np.ones((queries, keys), dtype=bool)
        if block.kind == "causal":
            assert queries == keys
            seen = i >= j
        elif block.kind == "window":
            assert queries <= module.TILE and keys <= module.TILE
            seen = i - j < block.offset
            assert seen.any(axis=1).all() and not seen.all()  # no row without a key, no mask without a need
        else:
            assert block.kind == "full" and block.offset == 0
        found[slice(*block.rows), block.q_start : block.q_stop, block.k_start : block.k_stop] += seen
    return found


def visible(documents: Ints, queries: Ints, keys: Ints, window: int | None) -> NDArray[np.bool_]:
    """Brute force, from tokens [B, n] and [B, m] and the documents [B, padded] alone."""
    same = np.take_along_axis(documents, queries, 1)[:, :, None] == np.take_along_axis(documents, keys, 1)[:, None]
    before = queries[:, :, None] - keys[:, None]
    return same & (before >= 0) & (before < (1 << 60 if window is None else window))


def check(documents: Ints, placement: Placement, window: int | None) -> None:
    """All ring ranks' queries against each rank's keys, and against all keys in natural order."""
    rows, padded = placement.index.shape
    ring, total = placement.ring, 0
    whole = np.concatenate([documents, np.full((rows, padded - documents.shape[1]), -1)], axis=1)
    natural = np.tile(np.arange(padded), (rows, 1))
    for rank in range(ring):
        q_runs, queries = tuple(held[rank] for held in placement.runs), placement.part(rank, ring)
        sets = [(tuple(held[other] for held in placement.runs), placement.part(other, ring)) for other in range(ring)]
        mine = 0
        for k_runs, keys in [*sets, (documents_of(placement), natural)]:
            some = blocks(q_runs, k_runs, window)
            expected = visible(whole, queries, keys, window)
            assert (counted(some, expected.shape) == expected).all()
            assert work(some) == expected.sum()
            mine += work(some)
        assert mine == 2 * pairs(placement, window)[rank]
        total += mine
    assert total == 2 * visible(whole, natural, natural, window).sum()


@given(
    rows=lengths,
    degree=degrees,
    split=splits,
    window=st.none() | st.integers(1, 50),
    tile=st.sampled_from([1, 2, 3, 8, TILE]),
    alike=st.booleans(),
)
@settings(max_examples=250, deadline=None)
def test_the_blocks_of_all_hops_are_what_is_visible_each_pair_once(
    rows: list[list[int]], degree: tuple[int, int], split: str, window: int | None, tile: int, alike: bool
) -> None:
    documents = same_length([rows[0]] * 3 if alike else rows)
    with mock.patch.object(module, "TILE", tile):
        check(documents, place(documents, *degree, split), window)


@st.composite
def shuffled(draw: st.DrawFn) -> tuple[Ints, list[list[Runs]]]:
    """documents [2, L], and two sets of runs of each row: cut anywhere, lying anyhow, with tokens in common or not."""
    documents = same_length([draw(st.lists(st.integers(1, 12), min_size=1, max_size=3)) for _ in range(2)])
    sets: list[list[Runs]] = [[], []]
    size = draw(st.integers(1, documents.shape[1]))
    for row in documents:
        starts = [0, *(np.flatnonzero(np.diff(row)) + 1).tolist()]
        cuts = sorted({*starts, *draw(st.lists(st.integers(0, len(row) - 1), max_size=5)), len(row)})
        runs = [Run(a, b, max(start for start in starts if start <= a)) for a, b in pairwise(cuts)]
        for each in sets:
            each.append(_first(draw(st.permutations(runs)), size))
    return documents, sets


def _first(runs: list[Run], size: int) -> Runs:
    """The first `size` tokens of these runs."""
    found: list[Run] = []
    for run in runs:
        length = min(run.stop - run.start, size)
        size -= length
        if length:
            found.append(run._replace(stop=run.start + length))
    return tuple(found)


@given(case=shuffled(), window=st.none() | st.integers(1, 20), tile=st.sampled_from([2, 3, TILE]))
@settings(max_examples=200, deadline=None)
def test_any_two_sets_of_runs_will_do(case: tuple[Ints, list[list[Runs]]], window: int | None, tile: int) -> None:
    documents, (q_runs, k_runs) = case
    queries, keys = (np.array([[t for run in row for t in range(*run[:2])] for row in rows]) for rows in case[1])
    expected = visible(documents, queries, keys, window)
    with mock.patch.object(module, "TILE", tile):
        some = blocks(tuple(q_runs), tuple(k_runs), window)
        assert (counted(some, expected.shape) == expected).all()
    assert work(some) == expected.sum()


@pytest.mark.parametrize("window", [None, 300, 700])
@pytest.mark.parametrize("split", ["zigzag", "contiguous"])
def test_the_same_with_tiles_of_256(window: int | None, split: str) -> None:
    documents = rows_of([1499], [701, 3, 795])
    check(documents, place(documents, 2, 1, split), window)


@pytest.mark.parametrize("ring", [1, 2, 3, 4, 8])
def test_a_plain_causal_hop_is_one_block(ring: int) -> None:
    """Own keys: one triangle. A rank's before: all queries; behind: the late half of the queries, all keys."""
    for length in (2 * ring * 10, ring * 7):
        placement = place(rows_of(*[[length]] * 5), ring, 1, "zigzag")
        for rank in range(ring):
            for other in range(ring):
                (block,) = between(placement, rank, other, None)
                assert block.kind == ("causal" if rank == other else "full") and block.rows == (0, 5)
            whole = blocks(tuple(held[rank] for held in placement.runs), documents_of(placement), None)
            assert len(whole) <= 4  # a triangle for each chunk and what is before it


def test_the_blocks_of_zigzag_on_two_ranks() -> None:
    placement = one_row(8, 2)
    assert between(placement, 0, 0, None) == (Block(0, 4, 0, 4, "causal", (0, 1)),)
    assert between(placement, 0, 1, None) == (Block(2, 4, 0, 4, "full", (0, 1)),)
    assert between(placement, 1, 0, None) == (Block(0, 4, 0, 2, "full", (0, 1)),)
    assert between(placement, 1, 1, None) == (Block(0, 4, 0, 4, "causal", (0, 1)),)


def test_contiguous_hops_behind_the_queries_have_no_block() -> None:
    placement = one_row(12, 3, "contiguous")
    sizes = [[len(between(placement, rank, other, None)) for other in range(3)] for rank in range(3)]
    assert sizes == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]


def test_hops_no_document_spans_have_no_block() -> None:
    placement = place(rows_of([4, 4, 4]), 3, 1, "contiguous")
    sizes = [[len(between(placement, rank, other, None)) for other in range(3)] for rank in range(3)]
    assert sizes == np.eye(3).tolist()


@pytest.mark.parametrize("ring", [2, 4, 8])
def test_packed_documents_have_at_most_one_block_each_a_hop(ring: int) -> None:
    documents = packed(16384, 0)
    placement = place(documents, ring, 1, "zigzag")
    for other in range(ring):
        assert len(between(placement, ring - 1, other, None)) <= len(documents_of(placement)[0])


@pytest.mark.parametrize("window", [64, 256, 512, 1024])
@pytest.mark.parametrize("ring", [1, 2, 4])
def test_a_window_costs_about_three_blocks_a_tile_over_all_hops(window: int, ring: int) -> None:
    """Of the tile, of all of it, of the window's edge; one to four more where a tile meets the edge of a chunk."""
    placement = one_row(8192, ring)
    tiles = placement.tokens // min(TILE, window)
    for rank in range(ring):
        some = [block for other in range(ring) for block in between(placement, rank, other, window)]
        masked = [block for block in some if block.kind == "window"]
        assert len(some) <= 3 * tiles + 4
        assert all(max(b.q_stop - b.q_start, b.k_stop - b.k_start) <= TILE for b in masked)
        assert work(masked) <= tiles * TILE * (TILE + 1) // 2


def test_a_window_as_long_as_the_document_is_none() -> None:
    placement = one_row(24, 2)
    for rank in range(2):
        for other in range(2):
            assert between(placement, rank, other, 24) == between(placement, rank, other, None)
    assert between(placement, 0, 0, 23) != between(placement, 0, 0, None)


def test_rows_cut_alike_are_one_block_and_others_are_not() -> None:
    placement = place(rows_of([8], [8], [4, 4], [8]), 2, 1, "zigzag")
    rows = [block.rows for block in between(placement, 0, 1, None)]
    assert rows == [(0, 2), (2, 3), (2, 3), (3, 4)]
    one, other = blocks(((Run(4, 8, 0),),) * 2, ((Run(0, 2, 0),), (Run(0, 1, 0), Run(8, 9, 0))), None)
    assert one == Block(0, 4, 0, 2, "full", (0, 1)) and other == Block(0, 4, 0, 1, "full", (1, 2))
