"""DualPipeV: two stages a rank, r and 2P-1-r; a forward of one overlaps a backward of the other, so communication
hides.

Eight phases (`turns`), M >= 2P. Idle time (P-1)(F&B+B-3W), F&B the time of an overlapped pair, exact for F = I >= W and
F&B = F + B with a pair run as one block; 2P+1 half-size chunks alive on every rank. W stands right after its I or waits
in a queue that drains at the end. Source: arXiv 2412.19437, §3.2.1, "cut in half" as published with the code.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import count

from heptad.schedule.action import Kind
from heptad.schedule.pipeline import Line, Pair, StageAction, Step


def dualpipev(num_ranks: int, chunks: int, num_microbatches: int) -> tuple[Line, ...]:
    """The lines of P ranks with stages r and 2P-1-r each."""
    assert chunks == 2
    return tuple(
        numbered(turns(num_ranks, num_microbatches, rank), (rank, 2 * num_ranks - 1 - rank), (0, 0))
        for rank in range(num_ranks)
    )


def turns(num_ranks: int, num_microbatches: int, rank: int) -> list[str]:
    """The order of one rank, a word a turn: side (0 is stage r, 1 the other) and kind; W is the oldest deferred."""
    ahead = num_ranks - rank - 1
    order = ["0F"] * (2 * ahead)
    order += ["0F", "1F"] * (rank + 1)
    order += ["1I", "W", "1F"] * ahead
    # The last rank's stages are neighbours: its first two turns do not overlap, so that its B ends a forward sooner.
    order += ["0F&1B", "1F&0B"] if ahead else ["0F", "1B", "1F&0B"]
    order += ["0F&1B", "1F&0B"] * (num_microbatches - 2 * num_ranks + rank)
    order += ["1B", "1F&0B"] * ahead
    # Half of these backwards are whole; the others defer W to where the rank would wait for a gradient.
    order += (["1B", "0B"] * (rank + 1))[: rank + 1] + (["1I", "0I"] * (rank + 1))[rank + 1 :]
    order += ["W", "0I"] * ahead
    return order + ["W"] * (rank + 1)


def numbered(order: Iterable[str], stages: tuple[int, int], first: tuple[int, int]) -> Line:
    """The turns as actions: each side's stage, forwards and backwards counted from `first` of the side."""
    forwards, backwards = [count(start) for start in first], [count(start) for start in first]
    deferred: deque[StageAction] = deque()
    line: list[Step] = []
    for turn in order:
        if turn == "W":
            done = deferred.popleft()
            line.append(StageAction(done.stage, Kind.WEIGHT_GRAD, done.microbatch))
            continue
        side, kind = int(turn[0]), turn[1]
        if kind == "F":
            action = StageAction(stages[side], Kind.FORWARD, next(forwards[side]))
            other = 1 - side
            pair = len(turn) > 2
            back = StageAction(stages[other], Kind.BACKWARD, next(backwards[other])) if pair else None
            line.append(action if back is None else Pair(action, back))
        elif kind == "B":
            line.append(StageAction(stages[side], Kind.BACKWARD, next(backwards[side])))
        else:
            deferred.append(StageAction(stages[side], Kind.INPUT_GRAD, next(backwards[side])))
            line.append(deferred[-1])
    return tuple(line)


def live(num_ranks: int, chunks: int, num_microbatches: int, rank: int) -> int:
    """Chunks alive: 2P+1, always."""
    return 2 * num_ranks + 1
