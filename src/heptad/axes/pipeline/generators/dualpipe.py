"""DualPipe: micro-batches enter at both ends; P stages, each on two ranks (r holds r and P-1-r), whose gradients are
summed.

The first M/2 micro-batches enter at rank 0, the others at rank P-1. Rank r < P/2 has the order of DualPipeV(P/2, M/2)
on rank r; rank P-1-r is rank r with the directions swapped. P and M even, M >= 2P. Idle time (P/2-1)(F&B+B-3W), exact
for F = I >= W and F&B = F + B with a pair run as one block; 2x parameters, P+1 micro-batches alive on every rank.
Source: DeepSeek-V3, arXiv 2412.19437, §3.2.1.
"""

from __future__ import annotations

from heptad.axes.pipeline.generators.dualpipev import numbered, turns
from heptad.schedule.pipeline import Line


def dualpipe(num_ranks: int, chunks: int, num_microbatches: int) -> tuple[Line, ...]:
    """The lines of P ranks; the second direction's micro-batches count from M/2."""
    assert chunks == 1 and num_ranks % 2 == num_microbatches % 2 == 0
    half, lines = num_microbatches // 2, []
    for rank in range(num_ranks):
        # Side 0 of the order is the direction that enters at the nearer end: there this rank has the lower stage.
        near, far = sorted((rank, num_ranks - 1 - rank))
        first = (0, half) if rank == near else (half, 0)
        lines.append(numbered(turns(num_ranks // 2, half, near), (near, far), first))
    return tuple(lines)


def live(num_ranks: int, chunks: int, num_microbatches: int, rank: int) -> int:
    """Micro-batches alive: P+1, always."""
    return num_ranks + 1
