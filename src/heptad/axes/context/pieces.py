"""Blocks cut further: into tiles for kernels that form scores, and in two so that a backward has work left at its end.

What is seen stays the same, pair for pair. Pure, no torch. Read next: `blocks.py`, `local.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from heptad.axes.context.blocks import Block, between, remembered, work
from heptad.models.placement import Placement


@remembered
def pieces(placement: Placement, q_rank: int, k_rank: int, window: int | None, tile: int | None) -> tuple[Block, ...]:
    """`between`, and in tiles unless `tile` is None."""
    whole = between(placement, q_rank, k_rank, window)
    return whole if tile is None else tuple(_tiled(whole, tile))


@remembered
def halves(
    placement: Placement, rank: int, window: int | None, tile: int | None
) -> tuple[tuple[Block, ...], tuple[Block, ...]]:
    """The `pieces` of a rank's queries and its own keys, as two lists of about the same work."""
    return halved(pieces(placement, rank, rank, window, tile))


def halved(blocks: tuple[Block, ...]) -> tuple[tuple[Block, ...], tuple[Block, ...]]:
    """Two lists with half of the work each, but for a row of the block that is cut for it; masked tiles stay whole."""
    first: list[Block] = []
    left = work(blocks) / 2
    for at, block in enumerate(blocks):
        size = work((block,))
        if size > left:
            below, above = _cut(block, left / size)
            return (*first, *below), (*above, *blocks[at + 1 :])
        first.append(block)
        left -= size
    return tuple(first), ()


def _cut(block: Block, share: float) -> tuple[tuple[Block, ...], tuple[Block, ...]]:
    """Queries up to where `share` of the work is done, and the rest."""
    queries = block.q_stop - block.q_start
    if block.kind == "window":
        return ((block,), ()) if share >= 0.5 else ((), (block,))
    rows = round(queries * (share if block.kind == "full" else math.sqrt(share)))
    if rows in (0, queries):
        return ((), (block,)) if rows == 0 else ((block,), ())
    below = block._replace(q_stop=block.q_start + rows)
    above = block._replace(q_start=block.q_start + rows)
    if block.kind == "full":
        return (below,), (above,)
    middle = block.k_start + rows
    corner = above._replace(k_start=middle)
    return (below._replace(k_stop=middle),), (above._replace(k_stop=middle, kind="full"), corner)


def _tiled(blocks: tuple[Block, ...], tile: int) -> Iterator[Block]:
    for block in blocks:
        for q_start in range(block.q_start, block.q_stop, tile):
            for k_start in range(block.k_start, block.k_stop, tile):
                yield from _tile(block, q_start, k_start, tile)


def _tile(block: Block, q_start: int, k_start: int, tile: int) -> Iterator[Block]:
    ends = min(q_start + tile, block.q_stop), min(k_start + tile, block.k_stop)
    piece = Block(q_start, ends[0], k_start, ends[1], block.kind, block.rows, block.offset)
    if block.kind == "causal":
        behind = (q_start - block.q_start) - (k_start - block.k_start)
        if behind < 0:
            return
        yield piece if behind == 0 else piece._replace(kind="full")
    else:
        assert block.kind == "full" or piece == block, "masked blocks are tiles already"
        yield piece
