"""Which rank writes which range: each element of each tensor once, whatever is replicated, bytes spread evenly. Pure.

Ranks announce the flat ranges they hold. Ranges that several ranks hold (stage 0's parameters, HSDP's copies, norms and
kv heads on several tensor ranks) go to the rank with the fewest bytes so far, the largest first, so saving a replicated
model on N ranks takes each 1/N of it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Held:
    """The flat range [start, stop) of tensor `name` on one rank; `dtype` as safetensors names it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    item_bytes: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Range:
    """What a rank writes: flat range [start, stop) of `name`."""

    name: str
    start: int
    stop: int


def assign(held: Sequence[Sequence[Held]]) -> list[list[Range]]:
    """`held[rank]` -> what each rank writes. Asserts that all ranks agree on shapes and that no element is missing."""
    by_name: dict[str, list[tuple[int, Held]]] = {}
    for rank, ranges in enumerate(held):
        for item in ranges:
            by_name.setdefault(item.name, []).append((rank, item))
    segments = [(item, holders) for name in by_name for item, holders in _segments(name, by_name[name])]
    load = [0] * len(held)
    plan: list[list[Range]] = [[] for _ in held]
    for item, holders in sorted(segments, key=lambda pair: (len(pair[1]) > 1, -_num_bytes(pair[0]), pair[0].name)):
        rank = min(holders, key=lambda holder: (load[holder], holder))
        load[rank] += _num_bytes(item)
        plan[rank].append(Range(item.name, item.start, item.stop))
    return [sorted(ranges, key=lambda item: (item.name, item.start)) for ranges in plan]


def _num_bytes(item: Held) -> int:
    return (item.stop - item.start) * item.item_bytes


def _segments(name: str, held: Sequence[tuple[int, Held]]) -> list[tuple[Held, tuple[int, ...]]]:
    """The tensor cut at every boundary, each segment with the ranks that hold it."""
    kinds = {(item.shape, item.dtype) for _, item in held}
    assert len(kinds) == 1, f"ranks disagree on {name}: {sorted(kinds)}"
    first = held[0][1]
    num_elements = math.prod(first.shape)
    opens: dict[int, list[int]] = {}
    closes: dict[int, list[int]] = {}
    for rank, item in held:
        if item.start < item.stop:
            opens.setdefault(item.start, []).append(rank)
            closes.setdefault(item.stop, []).append(rank)
    cuts = sorted({0, num_elements, *opens, *closes})
    assert cuts[0] == 0 and cuts[-1] == num_elements, f"{name}: a range outside [0, {num_elements})"
    active: dict[int, int] = {}
    found = []
    for start, stop in itertools.pairwise(cuts):
        for rank in closes.get(start, []):
            active[rank] -= 1
        for rank in opens.get(start, []):
            active[rank] = active.get(rank, 0) + 1
        holders = tuple(rank for rank, count in active.items() if count)
        assert holders, f"{name}: no rank holds elements [{start}, {stop}) of {num_elements}"
        found.append((Held(name, first.shape, first.dtype, first.item_bytes, start, stop), holders))
    return found
