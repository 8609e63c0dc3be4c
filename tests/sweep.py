"""Pairwise covers: a few combinations of factors in which every pair of levels that can occur together does occur.

Most faults of a layout need one or two conditions at once, so the cover finds them in a twentieth of the runs; the
whole product runs under `slow`. Deterministic: the same factors give the same combinations.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

Combination = dict[str, Any]
Pair = tuple[tuple[str, Any], tuple[str, Any]]


def every(factors: Mapping[str, Sequence[Any]], valid: Callable[[Combination], bool]) -> list[Combination]:
    """The whole product, less what is not valid, in order."""
    found = (dict(zip(factors, levels, strict=True)) for levels in product(*factors.values()))
    return [item for item in found if valid(item)]


def sampled(
    factors: Mapping[str, Sequence[Any]], valid: Callable[[Combination], bool], number: int, seed: int
) -> list[Combination]:
    """`number` different ones of `every`, drawn by `seed`, without making it."""
    generator, found = random.Random(seed), dict[tuple[Any, ...], Combination]()
    while len(found) < number:
        item = {name: generator.choice(levels) for name, levels in factors.items()}
        if valid(item):
            found[tuple(item.values())] = item
    return list(found.values())


def pairs(combination: Combination) -> set[Pair]:
    """All pairs of (factor, level) of one combination."""
    return set(combinations(combination.items(), 2))


def possible(factors: Mapping[str, Sequence[Any]], valid: Callable[[Combination], bool]) -> set[Pair]:
    """All pairs of (factor, level) that some valid combination has, without making the whole product."""
    found: set[Pair] = set()
    for one, two in combinations(factors, 2):
        for pair in product(*([(name, level) for level in factors[name]] for name in (one, two))):
            fixed = {**factors, **{name: (level,) for name, level in pair}}
            items = (dict(zip(fixed, levels, strict=True)) for levels in product(*fixed.values()))
            if any(map(valid, items)):
                found.add((pair[0], pair[1]))
    return found


def pairwise(
    factors: Mapping[str, Sequence[Any]],
    valid: Callable[[Combination], bool],
    among: Sequence[Combination] | None = None,
) -> list[Combination]:
    """A subset of `every` (or of `among`, a part of it) with all of its pairs: greedy, most new pairs first, the
    earliest of equals. A product of tens of thousands takes long: some thousand of it have its pairs too.
    """
    candidates = [(item, pairs(item)) for item in (every(factors, valid) if among is None else among)]
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
