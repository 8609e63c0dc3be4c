"""Naive: one micro-batch at a time, through every stage and back. A rank works 1/P of the time: idle (P-1)/P of the
step.

The baseline of the other schedules. With V stages on a rank (rank r holds r, r+P, ...) a micro-batch passes each rank V
times and the idle fraction stays. Alive: the V chunks of one micro-batch.
"""

from __future__ import annotations

from heptad.schedule.action import Kind
from heptad.schedule.pipeline import Line, StageAction


def naive(num_ranks: int, chunks: int, num_microbatches: int) -> tuple[Line, ...]:
    """The lines of P ranks with V stages each."""
    lines = []
    for rank in range(num_ranks):
        stages = range(rank, num_ranks * chunks, num_ranks)
        turns = [(Kind.FORWARD, stage) for stage in stages] + [(Kind.BACKWARD, stage) for stage in reversed(stages)]
        lines.append(tuple(StageAction(s, kind, mb) for mb in range(num_microbatches) for kind, s in turns))
    return tuple(lines)


def live(num_ranks: int, chunks: int, num_microbatches: int, rank: int) -> int:
    """Chunks alive: V, always."""
    return chunks
