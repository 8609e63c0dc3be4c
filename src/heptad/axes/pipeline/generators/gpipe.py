"""GPipe: all micro-batches forward, then all backward, in the same order. Idle (P-1)/(M+P-1); every micro-batch is
alive.

With V stages on a rank (rank r holds r, r+P, ...) the stages come one after another, breadth first: the idle fraction
is (P-1)/(VM+P-1) for M >= P. Source: GPipe, arXiv 1811.06965; breadth first, arXiv 2211.05953.
"""

from __future__ import annotations

from heptad.schedule.action import Kind
from heptad.schedule.pipeline import Line, Step, row


def gpipe(num_ranks: int, chunks: int, num_microbatches: int) -> tuple[Line, ...]:
    """The lines of P ranks with V stages each."""
    lines, every = [], range(num_microbatches)
    for rank in range(num_ranks):
        stages, line = range(rank, num_ranks * chunks, num_ranks), list[Step]()
        for stage in stages:
            line += row(stage, Kind.FORWARD, every)
        for stage in reversed(stages):
            line += row(stage, Kind.BACKWARD, every)
        lines.append(tuple(line))
    return tuple(lines)


def live(num_ranks: int, chunks: int, num_microbatches: int, rank: int) -> int:
    """Chunks alive: V·M, always."""
    return chunks * num_microbatches
