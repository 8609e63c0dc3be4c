"""Pairwise covers: a few combinations of factors in which every pair of levels that can occur together does occur.

Most faults of a layout need one or two conditions at once, so the cover finds them in a twentieth of the runs; the
whole product runs under `slow`. Deterministic: the same factors give the same combinations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

Combination = dict[str, Any]
Pair = tuple[tuple[str, Any], tuple[str, Any]]


def every(factors: Mapping[str, Sequence[Any]], valid: Callable[[Combination], bool]) -> list[Combination]:
    """The whole product, less what is not valid, in order."""
    found = (dict(zip(factors, levels, strict=True)) for levels in product(*factors.values()))
    return [item for item in found if valid(item)]


def pairs(combination: Combination) -> set[Pair]:
    """All pairs of (factor, level) of one combination."""
    return set(combinations(combination.items(), 2))


def pairwise(factors: Mapping[str, Sequence[Any]], valid: Callable[[Combination], bool]) -> list[Combination]:
    """A subset of `every` with all of its pairs: greedy, most new pairs first, the earliest of equals."""
    candidates = [(item, pairs(item)) for item in every(factors, valid)]
    left = set().union(*(found for _, found in candidates))
    chosen = []
    while left:
        best, found = max(candidates, key=lambda candidate: len(candidate[1] & left))
        chosen.append(best)
        left -= found
    return chosen


def name_of(combination: Combination) -> str:
    """A test's name for it."""
    return "-".join(f"{key}={value}" for key, value in combination.items())
