"""Which tokens of a row each context rank holds: one placement for everything that is cut. Pure, no torch.

`contiguous`: plain order, equal parts. Under a causal mask the last of R ranks then has (2R-1)/R times the mean work.

`zigzag`: each document by itself is cut into 2R chunks and ring rank r holds chunks r and 2R-1-r: one early, one late,
so that every rank has the same work, whatever the lengths of the documents. A rank gets ⌊n/R⌋ or ⌈n/R⌉ of a document's
n tokens; the longer parts go to the ranks with the fewest tokens so far (ties: the least work so far). Token counts of
two ranks never differ by more than one, so they are equal at the end of the padded row. Where a rank's part is odd, one
of its chunks is a token longer: all early or all late ones, whichever leaves the busiest rank with less.

Costs: O(documents · R) steps and O(L) memory a row; the last few placements are remembered, so batches of one document
a row cost a look at `documents`. Sources: 2C chunks of a row: arXiv 2407.21783 §3.3.2; every document by itself: arXiv
2503.17924. Read next: `models/placement.py`, `blocks.py`.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate, pairwise
from operator import add

import numpy as np

from heptad.models.placement import Ints, Placement, Run, Runs


def place(documents: Ints, ring: int, ulysses: int, split: str) -> Placement:
    """Cut rows over ring · ulysses context ranks; split: "zigzag" or "contiguous" (the same with one ring rank).

    documents [B, L] int64: the number of each token's document, unique within its row.
    """
    rows, length = documents.shape
    assert rows and length and ring > 0 and ulysses > 0 and split in ("zigzag", "contiguous")
    degree = ring * ulysses
    padded = -(-length // degree) * degree
    order = split if ring > 1 else "contiguous"
    return _placed(tuple(_starts(documents, padded)), padded, ring, order)


@lru_cache(maxsize=4)
def _placed(starts: tuple[tuple[int, ...], ...], padded: int, ring: int, split: str) -> Placement:
    """One object for all batches whose documents lie alike, so that what is derived from it is remembered too."""
    rows = [_row(row, padded, ring, split) for row in starts]
    return Placement(tuple(runs for runs, _ in rows), padded // ring, np.stack([index for _, index in rows]))


def pairs(placement: Placement, window: int | None = None) -> Ints:
    """(query, key) pairs that the queries of each ring rank see, over all rows: [R] int64. Padding counts as well."""
    seen = np.zeros(placement.ring, dtype=np.int64)
    for ranks in placement.runs:
        for rank, runs in enumerate(ranks):
            seen[rank] += sum(_seen(run.stop - run.document_start, window) for run in runs)
            seen[rank] -= sum(_seen(run.start - run.document_start, window) for run in runs)
    return seen


def _seen(queries: int, window: int | None) -> int:
    """Pairs of the first `queries` tokens of a document."""
    ramp = queries if window is None else min(queries, window)
    return ramp * (ramp + 1) // 2 + (queries - ramp) * ramp


def _starts(documents: Ints, padded: int) -> list[tuple[int, ...]]:
    """Where each row's documents start, padding included."""
    length = documents.shape[1]
    behind = (length,) if padded > length else ()
    changes = documents[:, 1:] != documents[:, :-1]
    found = []
    for row, changed in zip(documents, changes, strict=True):
        starts = (0, *(np.flatnonzero(changed) + 1).tolist())
        numbers = row[list(starts)].tolist()
        assert len(set(numbers)) == len(numbers), "a document lies in two parts of a row"
        found.append(starts + behind)
    return found


@lru_cache(maxsize=4)
def _row(starts: tuple[int, ...], padded: int, ring: int, split: str) -> tuple[tuple[Runs, ...], Ints]:
    """Runs of each ring rank of one row, and the token at each place [padded]."""
    bounds = list(pairwise((*starts, padded)))
    runs = _zigzag(bounds, ring) if split == "zigzag" else _contiguous(bounds, ring, padded // ring)
    flat = np.array([run[:2] for rank in runs for run in rank], dtype=np.int64)
    sizes = flat[:, 1] - flat[:, 0]
    index = np.arange(padded, dtype=np.int64) + np.repeat(flat[:, 0] - (np.cumsum(sizes) - sizes), sizes)
    return tuple(tuple(rank) for rank in runs), index


def _contiguous(bounds: list[tuple[int, int]], ring: int, tokens: int) -> list[list[Run]]:
    runs: list[list[Run]] = [[] for _ in range(ring)]
    for start, stop in bounds:
        for rank in range(start // tokens, (stop - 1) // tokens + 1):
            runs[rank].append(Run(max(start, rank * tokens), min(stop, (rank + 1) * tokens), start))
    return runs


def _zigzag(bounds: list[tuple[int, int]], ring: int) -> list[list[Run]]:
    """Plain integers: for the few numbers of a document numpy's calls would take ten times as long."""
    runs: list[list[Run]] = [[] for _ in range(ring)]
    tokens, work = [0] * ring, [0] * ring
    for start, stop in bounds:
        whole, extra = divmod(stop - start, ring)
        share = [whole] * ring
        for rank in sorted(range(ring), key=lambda rank: (tokens[rank], work[rank]))[:extra]:
            share[rank] += 1
        choices = [_chunks(share, [n // 2 for n in share]), _chunks(share, [n - n // 2 for n in share])]
        ends, added = min(choices, key=lambda choice: max(map(add, work, choice[1])))
        tokens, work = list(map(add, tokens, share)), list(map(add, work, added))
        first = start
        for chunk, end in enumerate(ends):
            if first < start + end:
                _append(runs[min(chunk, 2 * ring - 1 - chunk)], Run(first, start + end, start))
            first = start + end
    assert len(set(tokens)) == 1, tokens
    return runs


def _chunks(share: list[int], early: list[int]) -> tuple[list[int], list[int]]:
    """Ends of a document's 2R chunks and the pairs each rank sees, if ranks have `early` of their `share` early."""
    sizes = early + [total - before for total, before in zip(share, early, strict=True)][::-1]
    ends = list(accumulate(sizes))
    seen = [size * (2 * end - size + 1) // 2 for size, end in zip(sizes, ends, strict=True)]  # Σ i + 1 over tokens i
    return ends, list(map(add, seen[: len(share)], reversed(seen[len(share) :])))


def _append(runs: list[Run], run: Run) -> None:
    """Join what follows on within a document."""
    if runs and runs[-1].stop == run.start and runs[-1].document_start == run.document_start:
        run = Run(runs.pop().start, run.stop, run.document_start)
    runs.append(run)
