"""Interleaved 1F1B, depth first: rank r holds stages r, r+P, ..., r+(V-1)P, and the fill shrinks to 1/V.

Micro-batches go in rounds: a round runs on the rank's first stage, then on its second, ..., backwards the other way
round; in between, 1F1B. There are floor(M/P) rounds, at least one, whose sizes differ by at most one, the longer first;
so none is shorter than P, and every M >= P idles (P-1)/(VM+P-1) of the step. (A short last round, as with rounds of P,
would leave gaps: P = 4, V = 2, M = 6 idles over 1/3 instead of 1/5.) Chunks (1/V of a rank) alive on rank r:
min(VM, 2(P-r-1) + (V-1)m + 1) with m = ceil(M/floor(M/P)) micro-batches in the first round, P if P divides M.
M < P works, with more idle time. Source: Megatron-LM, arXiv 2104.04473.
"""

from __future__ import annotations

from heptad.axes.pipeline.generators.one_f_one_b import alternate
from heptad.schedule.action import Kind
from heptad.schedule.pipeline import Line, StageAction


def interleaved(num_ranks: int, chunks: int, num_microbatches: int) -> tuple[Line, ...]:
    """The lines of P ranks with V stages each."""
    parts, lines = rounds(num_ranks, num_microbatches), []
    for rank in range(num_ranks):
        stages = range(rank, num_ranks * chunks, num_ranks)
        forwards = [StageAction(s, Kind.FORWARD, mb) for part in parts for s in stages for mb in part]
        backwards = [StageAction(s, Kind.BACKWARD, mb) for part in parts for s in reversed(stages) for mb in part]
        lines.append(alternate(forwards, backwards, (chunks - 1) * len(parts[0]) + 2 * (num_ranks - rank - 1)))
    return tuple(lines)


def rounds(num_ranks: int, num_microbatches: int) -> list[range]:
    """Micro-batches that pass a rank's stages together; each round has at least P of them, or is the only one."""
    count = max(1, num_microbatches // num_ranks)
    least, longer = divmod(num_microbatches, count)
    ends = [least * (i + 1) + min(i + 1, longer) for i in range(count)]
    return [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]


def live(num_ranks: int, chunks: int, num_microbatches: int, rank: int) -> int:
    """Chunks alive."""
    first = len(rounds(num_ranks, num_microbatches)[0])
    return min(chunks * num_microbatches, 2 * (num_ranks - rank - 1) + (chunks - 1) * first + 1)
