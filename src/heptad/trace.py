"""The two records that tie the planning side to the running side.

`Event` is a span of time on one rank: the simulator writes them and so does the executor, so one picture shows both.
`Transfer` is one kind of collective: the cost model predicts them and the ledger counts them, so *predicted == counted*
is an assertion. Read next: `mesh/ledger.py`, `report/`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Event:
    """`name` is an action's text form; `lane` says which resource it holds ("compute", "comm"); times in seconds."""

    rank: int
    lane: str
    name: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Transfer:
    """`count` collectives of one kind on one axis in one phase; `num_bytes` is what one rank sent in all of them.

    op: all_reduce, reduce_scatter, all_gather, all_to_all, broadcast, send. axis: mesh axis or axes joined by '*'.
    phase: "forward", "backward", "update", "count", "check" or what the caller named.
    """

    op: str
    axis: str
    phase: str
    num_bytes: int
    count: int = 1


def total(transfers: Iterable[Transfer]) -> dict[tuple[str, str, str], tuple[int, int]]:
    """Sum by (axis, op, phase) -> (count, bytes); empty kinds are dropped, so two sides compare with ==."""
    sums: dict[tuple[str, str, str], tuple[int, int]] = {}
    for item in transfers:
        key = (item.axis, item.op, item.phase)
        count, num_bytes = sums.get(key, (0, 0))
        sums[key] = (count + item.count, num_bytes + item.num_bytes)
    return {key: value for key, value in sums.items() if value != (0, 0)}
