"""Blocks cut into halves and tiles see the same pairs, each once."""

from __future__ import annotations

import gc
from unittest import mock
from weakref import ref

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tests.axes.context.test_blocks import counted
from tests.axes.context.test_split import degrees, lengths, same_length, splits

from heptad.axes.context import blocks as module
from heptad.axes.context.blocks import Block, between, blocks, work
from heptad.axes.context.pieces import _tiled, halved, halves, pieces
from heptad.axes.context.split import place

TILE = 4


@given(rows=lengths, degree=degrees, split=splits, window=st.none() | st.integers(1, 9), data=st.data())
def test_halves_and_tiles_see_what_the_blocks_see(
    rows: list[list[int]],
    degree: tuple[int, int],
    split: str,
    window: int | None,
    data: st.DataObject,
) -> None:
    placement = place(same_length(rows), *degree, split)
    ranks = st.integers(0, degree[0] - 1)
    held = [tuple(row[data.draw(ranks)] for row in placement.runs) for _ in range(2)]
    shape = len(rows), placement.tokens, placement.tokens
    with mock.patch.object(module, "TILE", TILE):
        whole = blocks(held[0], held[1], window)
    first, second = halved(whole)
    tiles = tuple(_tiled((*first, *second), TILE))
    assert np.array_equal(counted((*first, *second), shape), counted(whole, shape))
    assert np.array_equal(counted(tiles, shape), counted(whole, shape))
    assert all(max(block.q_stop - block.q_start, block.k_stop - block.k_start) <= TILE for block in tiles)


def test_halves_are_of_the_same_work() -> None:
    """To a row of the block that is cut."""
    for length, ring in ((1009, 1), (2003, 2), (2003, 3)):
        placement = place(np.zeros((1, length), dtype=np.int64), ring, 1, "zigzag")
        for rank in range(ring):
            first, second = halves(placement, rank, None, None)
            assert abs(work(first) - work(second)) <= 2 * placement.tokens
            assert work(first) + work(second) == work(between(placement, rank, rank, None))


def test_blocks_are_made_once_and_forgotten_with_their_batch() -> None:
    """Packed rows differ in every batch: what was derived from past ones must not pile up (1 MB each at 64K tokens)."""
    batches = []
    for length in range(20, 120):
        documents = np.repeat(np.arange(3), (length, 7, 140 - length))[None]
        placement = place(documents, 2, 1, "zigzag")
        batches.append(ref(placement))
        for rank in range(2):
            assert pieces(placement, 0, rank, 5, 256) is pieces(placement, 0, rank, 5, 256)
            assert halves(placement, rank, 5, None) is halves(placement, rank, 5, None)
        assert pieces(placement, 0, 0, 5, 256) != pieces(placement, 0, 0, None, 256)
    del placement
    gc.collect()
    assert sum(batch() is not None for batch in batches) <= 4  # `place` itself remembers a few


def test_little_work_is_not_cut() -> None:
    one = Block(0, 1, 0, 1, "causal", (0, 1))
    assert halved(()) == ((), ())
    assert sorted(halved((one,)), key=len) == [(), (one,)]
