"""A deadlock said by name: which rank stands where, and for whom it waits, around the circle. Pure, no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from heptad.errors import ConfigError
from heptad.schedule.pipeline import Schedule

MOST_LINES = 12


@dataclass(frozen=True, slots=True)
class Wait:
    """A rank stands before `action` and waits for `wanted` of rank `of` (-1: no rank)."""

    action: str
    wanted: str
    of: int


def deadlock(schedule: Schedule, stuck: Mapping[int, Wait]) -> ConfigError:
    """`stuck`: every rank that waits. The error names the circle, or the rank that waits for what nobody runs."""
    path: list[int] = []
    rank = next((rank for rank, wait in stuck.items() if wait.of not in stuck), min(stuck))
    while rank in stuck and rank not in path:
        path.append(rank)
        rank = stuck[rank].of
    circle = path[path.index(rank) :] if rank in path else path
    said = [_said(rank, stuck[rank]) for rank in circle[:MOST_LINES]]
    if len(circle) > MOST_LINES:
        said.append(f"and so on over {len(circle)} ranks")
    head = "no rank can go on" if rank in path else "a rank waits for what never comes"
    rule = f"deadlock, {head}: " + "; ".join(said)
    return ConfigError.of("schedule", schedule.name, rule, "reorder the lines of the ranks named")


def _said(rank: int, wait: Wait) -> str:
    of = f"of rank {wait.of}" if wait.of >= 0 else "which no rank runs"
    return f"rank {rank} before {wait.action} waits for {wait.wanted} {of}"
