"""ZB-H1 (ZB1P): 1F1B with the backward split; W waits to fill the drain, and the fill shrinks to a third.

Rank r runs P-r-1 forwards, then F and I in turn; from its (r+1)-th I on, one W follows each, so r weight gradients stay
deferred and fill the time in which gradients come back. Idle time (P-1)(F+B-2W), exact for M >= P and W <= min(F, I);
min(M, P) micro-batches alive on every rank, W included. With V stages on a rank (r, r+P, ...) micro-batches go in the
rounds of `interleaved.py`. Source: arXiv 2401.10241, §2.3.1 (ZB-H1) and §3.
"""

from __future__ import annotations

from heptad.axes.pipeline.generators.interleaved import rounds
from heptad.schedule.action import Kind
from heptad.schedule.pipeline import Line, StageAction, Step


def zbh1(num_ranks: int, chunks: int, num_microbatches: int) -> tuple[Line, ...]:
    """The lines of P ranks with V stages each."""
    parts, lines = rounds(num_ranks, num_microbatches), []
    for rank in range(num_ranks):
        stages = range(rank, num_ranks * chunks, num_ranks)
        down = [(s, mb) for part in parts for s in reversed(stages) for mb in part]
        forwards = [StageAction(s, Kind.FORWARD, mb) for part in parts for s in stages for mb in part]
        inputs = [StageAction(s, Kind.INPUT_GRAD, mb) for s, mb in down]
        weights = [StageAction(s, Kind.WEIGHT_GRAD, mb) for s, mb in down]
        total = len(down)
        warmup = min((chunks - 1) * len(parts[0]) + num_ranks - rank - 1, total)
        line: list[Step] = [*forwards[:warmup]]
        for i in range(total):
            line += forwards[warmup + i : warmup + i + 1]
            line.append(inputs[i])
            line += weights[i - rank : i - rank + 1] if i >= rank else []
        lines.append((*line, *weights[max(0, total - rank) :]))
    return tuple(lines)


def live(num_ranks: int, chunks: int, num_microbatches: int, rank: int) -> int:
    """Chunks alive."""
    first = len(rounds(num_ranks, num_microbatches)[0])
    return min(chunks * num_microbatches, num_ranks + (chunks - 1) * first)
