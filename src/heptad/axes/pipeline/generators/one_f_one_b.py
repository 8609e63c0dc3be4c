"""1F1B: rank r runs P-r-1 forwards, then one forward and one backward in turn. Idle (P-1)/(M+P-1), as GPipe; it bounds
memory: min(M, P-r) micro-batches alive on rank r.

Source: PipeDream-Flush, arXiv 2006.09503; Megatron-LM, arXiv 2104.04473.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from heptad.schedule.action import Kind
from heptad.schedule.pipeline import Line, Step, row


def one_f_one_b(num_ranks: int, chunks: int, num_microbatches: int) -> tuple[Line, ...]:
    """The lines of P ranks; `chunks` is 1, see `interleaved.py` for more."""
    assert chunks == 1
    lines, every = [], range(num_microbatches)
    for rank in range(num_ranks):
        forwards, backwards = row(rank, Kind.FORWARD, every), row(rank, Kind.BACKWARD, every)
        lines.append(alternate(forwards, backwards, num_ranks - rank - 1))
    return tuple(lines)


def alternate(forwards: Sequence[Step], backwards: Sequence[Step], warmup: int) -> Line:
    """`warmup` forwards, then forward and backward in turn, then the backwards that remain."""
    warmup = min(warmup, len(forwards))
    steady = len(forwards) - warmup
    turns = chain.from_iterable(zip(forwards[warmup:], backwards[:steady], strict=True))
    return (*forwards[:warmup], *turns, *backwards[steady:])


def live(num_ranks: int, chunks: int, num_microbatches: int, rank: int) -> int:
    """Micro-batches alive: min(M, P-r), always."""
    return min(num_microbatches, num_ranks - rank)
