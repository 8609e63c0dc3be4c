"""ZB-V: two stages a rank, r and 2P-1-r, so the loss is on rank 0 and gradients turn back at once; W fills what is
left.

Each I is followed by its W except while draining, where I goes first and W last. With F = I = W and M >= 2P-1 nothing
idles but the P-1 slots in which rank r waits for its first input or has finished; 2P half-size chunks alive on every
rank, as much as 1F1B's first rank. The order is made for at least 2P-1 micro-batches; with fewer, it is that order
without the ones that are not there. Source: arXiv 2401.10241, §6 and arXiv 2405.15362.
"""

from __future__ import annotations

from itertools import count

from heptad.schedule.action import Kind
from heptad.schedule.pipeline import Line, StageAction, Step


def zbv(num_ranks: int, chunks: int, num_microbatches: int) -> tuple[Line, ...]:
    """The lines of P ranks with stages r and 2P-1-r each."""
    assert chunks == 2
    lines = []
    for rank in range(num_ranks):
        stages, line = (rank, 2 * num_ranks - 1 - rank), list[Step]()
        numbers = {side + kind: count() for side in "01" for kind in "FIW"}
        for turn in turns(num_ranks, max(2 * num_ranks - 1, num_microbatches), rank):
            microbatch = next(numbers[turn])
            if microbatch < num_microbatches:
                line.append(StageAction(stages[int(turn[0])], Kind(turn[1]), microbatch))
        lines.append(tuple(line))
    return tuple(lines)


def turns(num_ranks: int, num_microbatches: int, rank: int) -> list[str]:
    """The order of one rank, each word one turn: side (0 is stage r, 1 the other) and kind."""
    to_end = num_ranks - rank
    fill = ["0F"] * (2 * to_end - 1) + ["1F", "0F"] * rank + ["1F", "1I", "1W"] * to_end
    started, returned = 2 * num_ranks - rank - 1, num_ranks  # forwards of either side so far
    both = ["0I", "0W", "1F", "1I", "1W"]
    steady = ["0F", *both] * (num_microbatches - started) + both * (started - returned)
    drain = ["0I", "1I"] * rank + ["0I", "0W"] * to_end + ["1W"] * rank + ["0W"] * rank
    return fill + steady + drain


def live(num_ranks: int, chunks: int, num_microbatches: int, rank: int) -> int:
    """Chunks alive: min(2M, 2P, M+r+1), always."""
    return min(2 * num_microbatches, 2 * num_ranks, num_microbatches + rank + 1)
