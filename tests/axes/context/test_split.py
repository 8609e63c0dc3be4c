"""Placements: every token once, the same order for everything that is cut, equal tokens and equal work."""

from __future__ import annotations

import subprocess
import sys
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heptad.axes.context.blocks import blocks
from heptad.axes.context.split import pairs, place
from heptad.models.placement import Ints, Placement, Run, Runs


def rows_of(*lengths: list[int]) -> Ints:
    """documents [B, L] of rows whose documents have these lengths."""
    return np.stack([np.repeat(np.arange(len(row)), row) for row in lengths])


def busiest(placement: Placement, window: int | None = None) -> Fraction:
    """Busiest rank's (query, key) pairs ÷ the mean."""
    seen = pairs(placement, window)
    return Fraction(int(seen.max()) * len(seen), int(seen.sum()))


def one_row(length: int, ring: int, split: str = "zigzag") -> Placement:
    return place(rows_of([length]), ring, 1, split)


def documents_of(placement: Placement) -> tuple[Runs, ...]:
    """Of each row one run a document, padding included: all tokens in natural order."""
    found = []
    for held in placement.runs:
        starts = sorted({run.document_start for runs in held for run in runs})
        found.append(tuple(Run(a, b, a) for a, b in pairwise([*starts, placement.index.shape[1]])))
    return tuple(found)


def packed(length: int, seed: int) -> Ints:
    """One row of documents of lognormal lengths, mean 600, the last one cut off."""
    drawn = np.random.default_rng(seed).lognormal(np.log(600) - 0.5, 1.0, size=length)
    ends = np.cumsum(np.maximum(1, drawn.astype(np.int64)))
    return np.searchsorted(ends, np.arange(length), side="right")[None]


lengths = st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=7), min_size=1, max_size=3)
degrees = st.tuples(st.integers(1, 5), st.integers(1, 3))
splits = st.sampled_from(["zigzag", "contiguous"])


def same_length(rows: list[list[int]]) -> Ints:
    """Rows filled up by a last document to the longest."""
    longest = max(sum(row) for row in rows)
    return rows_of(*[[*row, longest - sum(row)] for row in rows])


def test_eight_tokens_on_two_ranks() -> None:
    placement = one_row(8, 2)
    assert placement.runs == (((Run(0, 2, 0), Run(6, 8, 0)), (Run(2, 6, 0),)),)
    assert placement.index.tolist() == [[0, 1, 6, 7, 2, 3, 4, 5]] and placement.tokens == 4
    assert one_row(8, 2, "contiguous").index.tolist() == [[*range(8)]]
    assert place(rows_of([3, 5]), 1, 4, "zigzag").index.tolist() == [[*range(8)]]  # heads are cut, tokens lie in order


def test_each_document_is_cut_by_itself() -> None:
    placement = place(rows_of([8, 4]), 2, 1, "zigzag")
    assert placement.runs[0][0] == (Run(0, 2, 0), Run(6, 8, 0), Run(8, 9, 8), Run(11, 12, 8))
    assert placement.runs[0][1] == (Run(2, 6, 0), Run(9, 11, 8))


@given(rows=lengths, degree=degrees, split=splits)
@settings(max_examples=150, deadline=None)
def test_every_token_lies_once_and_runs_say_where(rows: list[list[int]], degree: tuple[int, int], split: str) -> None:
    documents, (ring, ulysses) = same_length(rows), degree
    length, ranks = documents.shape[1], ring * ulysses
    placement = place(documents, ring, ulysses, split)
    padded = -(-length // ranks) * ranks
    assert placement.tokens * ring == padded and placement.ring == ring
    natural = np.arange(padded)
    assert (np.sort(placement.index, axis=1) == natural).all()
    assert (np.take_along_axis(placement.index, placement.inverse, axis=1) == natural).all()
    for row, held in enumerate(placement.runs):
        for rank, runs in enumerate(held):
            lie = [token for run in runs for token in range(run.start, run.stop)]
            assert lie == placement.part(rank, ring)[row].tolist()
            pieces = [placement.part(rank * ulysses + piece, ranks)[row] for piece in range(ulysses)]
            assert lie == np.concatenate(pieces).tolist()
            assert all(not (a.stop == b.start and a.document_start == b.document_start) for a, b in pairwise(runs))
            for run in runs:
                numbers = np.append(documents[row], [-1] * (padded - length))  # padding: a document of its own
                assert (numbers[run.start : run.stop] == numbers[run.document_start]).all()
                assert run.document_start == 0 or numbers[run.document_start - 1] != numbers[run.document_start]


@given(rows=lengths, degree=degrees)
@settings(max_examples=100, deadline=None)
def test_zigzag_chunks_are_as_even_as_they_can_be(rows: list[list[int]], degree: tuple[int, int]) -> None:
    """Rank r's tokens of a document are its r-th and (2R-1-r)-th chunk; sizes differ by one at most."""
    ring, ulysses = degree
    placement = place(same_length(rows), ring, ulysses, "zigzag")
    for row, held in enumerate(placement.runs):
        for document in documents_of(placement)[row]:
            size = document.stop - document.start
            parts = [[run for run in runs if run.document_start == document.start] for runs in held]
            counts = [sum(run.stop - run.start for run in part) for part in parts]
            assert set(counts) <= {size // ring, -(-size // ring)}
            if size % (2 * ring) == 0 and ring > 1:
                half = size // (2 * ring)
                for rank, part in enumerate(parts):
                    late = document.stop - (rank + 1) * half
                    tokens = {token for run in part for token in range(run.start, run.stop)}
                    early = range(document.start + rank * half, document.start + (rank + 1) * half)
                    assert tokens == {*early, *range(late, late + half)}


@pytest.mark.parametrize("ring", [2, 3, 4, 8])
def test_plain_causal_zigzag_gives_equal_work_exactly_when_2r_divides(ring: int) -> None:
    """Where only R divides L, the busiest has (R-1)/(L+1) more than the mean."""
    for length in range(ring, 20 * ring, ring):
        expected = 1 if length % (2 * ring) == 0 else 1 + Fraction(ring - 1, length + 1)
        assert busiest(one_row(length, ring)) == expected


@pytest.mark.parametrize("ring", [2, 3, 4, 8])
def test_contiguous_gives_the_last_rank_almost_twice_the_mean(ring: int) -> None:
    """(2L - L/R + 1)/(L + 1), in the limit (2R-1)/R."""
    length = 1024 * ring
    ratio = busiest(one_row(length, ring, "contiguous"))
    assert ratio == Fraction(2 * length - length // ring + 1, length + 1)
    assert abs(ratio - Fraction(2 * ring - 1, ring)) < Fraction(1, length)


@pytest.mark.parametrize("length", [8192, 10007, 16384, 65536])
@pytest.mark.parametrize("ring", [2, 4, 8])
def test_packed_documents_are_balanced_within_two_percent(length: int, ring: int) -> None:
    """Far within; an odd part's longer chunk always late would be 1.01. Plain order: wherever long documents lie."""
    rows = [packed(length, seed) for seed in range(5)]
    assert max(busiest(place(documents, ring, 1, "zigzag")) for documents in rows) <= 1.004
    assert max(busiest(place(documents, ring, 1, "contiguous")) for documents in rows) > 1.1


def test_a_window_leaves_the_ramp_of_a_document_to_few_ranks() -> None:
    """The first W queries see W(W-1)/2 pairs fewer, and one rank has them all where W is no longer than its chunk."""
    length, ring, window = 8192, 4, 512
    seen = pairs(one_row(length, ring), window)
    assert seen.tolist() == [2048 * window - window * (window - 1) // 2, *[2048 * window] * 3]


def test_batches_alike_share_one_placement() -> None:
    documents = rows_of([64], [64])
    assert place(documents, 2, 1, "zigzag") is place(documents + 3, 2, 1, "zigzag")
    assert place(documents, 2, 1, "zigzag") is not place(documents, 2, 1, "contiguous")


def test_a_document_in_two_parts_is_no_document() -> None:
    with pytest.raises(AssertionError, match="two parts"):
        place(np.array([[0, 0, 1, 0]]), 2, 1, "zigzag")


@pytest.mark.parametrize("split", ["zigzag", "contiguous"])
def test_c_026_labels_shifted_before_the_cut_keep_every_target(split: str) -> None:
    """Shifted after it, each rank loses a target at the end of each of its runs."""
    documents = rows_of([13, 11])
    ids = np.arange(24)[None] + 100
    labels = np.where(documents == np.roll(documents, -1, 1), np.roll(ids, -1, 1), -100)
    labels[:, -1] = -100
    placement = place(documents, 2, 2, split)
    lost = 0
    for rank in range(4):
        tokens = placement.part(rank, 4)
        mine, targets = np.take_along_axis(ids, tokens, 1), np.take_along_axis(labels, tokens, 1)
        assert ((targets == mine + 1) | np.isin(tokens, [12, 23])).all()
        shifted_here = np.append(mine[:, 1:], [[-100]], axis=1)
        lost += int((targets != shifted_here).sum())
    assert lost >= 3  # at least one at each edge of ranks


@pytest.mark.parametrize("ring", [1, 2, 4])
def test_c_030_2999_tokens_on_four_ranks(ring: int) -> None:
    """One token of padding, behind the row and seen by none of it."""
    placement = place(rows_of([2999]), ring, 4 // ring, "zigzag")
    assert placement.index.shape == (1, 3000) and all(placement.part(rank, 4).shape == (1, 750) for rank in range(4))
    padding = [run for runs in placement.runs[0] for run in runs if run.stop > 2999]
    assert padding == [Run(2999, 3000, 2999)]
    assert pairs(placement).sum() == 2999 * 3000 // 2 + 1


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 7])
@pytest.mark.parametrize("length", [1, 2, 11, 29])
def test_c_030_any_length_on_any_number_of_ranks(length: int, ranks: int) -> None:
    placement = one_row(length, ranks)
    assert placement.tokens == -(-length // ranks)
    assert sorted(placement.index[0].tolist()) == [*range(placement.tokens * ranks)]


@pytest.mark.parametrize("data, mask_of, matches", [("zigzag", "zigzag", True), ("contiguous", "zigzag", False)])
def test_c_031_head_and_ring_ranks_together_see_the_mask_of_their_tokens(
    data: str, mask_of: str, matches: bool
) -> None:
    """The U ranks of a ring rank together hold what its blocks are about; plain order would need another mask."""
    ring, ulysses, documents = 2, 2, rows_of([24])
    held, masks = place(documents, ring, ulysses, data), place(documents, ring, ulysses, mask_of)
    right = True
    for rank in range(ring):
        gathered = np.concatenate([held.part(rank * ulysses + piece, 4)[0] for piece in range(ulysses)])
        runs = (masks.runs[0][rank],)
        for other in range(ring):
            keys = held.part(other, ring)[0]
            sees = np.zeros((len(gathered), len(keys)), dtype=bool)
            for block in blocks(runs, (masks.runs[0][other],), None):
                n = block.q_stop - block.q_start
                tile = np.tri(n, dtype=bool) if block.kind == "causal" else True
                sees[block.q_start : block.q_stop, block.k_start : block.k_stop] = tile
            right &= bool((sees == (gathered[:, None] >= keys[None])).all())
    assert right == matches


def test_planning_needs_no_torch() -> None:
    program = "import sys, heptad.axes.context.blocks, heptad.axes.context.split; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)
