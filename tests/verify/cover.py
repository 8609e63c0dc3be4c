"""Few items of `everything.py` that have every pair of levels that some job has: how `everything.txt` is made.

    python -m tests.verify.cover          # writes it anew: after a rule, a factor or a level has changed

A product of forty factors can be neither listed nor asked. So items are drawn and mended until the project takes them
(`drawn`); a pair that no drawn item has is looked for by itself, from many starts (`found_with`); a pair that is not
found is listed beside the cover as one that no job has, with the rule that refuses it nearest to a job. The cover is
greedy: most new pairs for its cost (ranks) first, each item then changed level by level while that brings more pairs.
Read next: `test_everything.py`, which holds the file to all this.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, combinations
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tests.sweep import Pair
from tests.verify.everything import (
    DEGREES,
    FACTORS,
    RANKS,
    item_of,
    layers_of,
    line_of,
    microbatches_of,
    ranks_of,
    refusals,
    renamed,
    well_named,
)
from tests.verify.several import Item

FILE = Path(__file__).with_name("everything.txt")
POOL, STARTS, MENDS, ROUNDS, SEED = 2000, 12, 20, 60, 1
OFTEN: dict[str, tuple[Any, ...]] = {"engine": ("heptad",) * 9, "tied": (False,) * 2}
"""Levels that are drawn more often than others: what is legal with few others is tried seldom."""
OWNERS = (*DEGREES, "context", "ep", "router")
"""What makes others be read."""
COSTLY = (*DEGREES, "microbatches", "stages", "vpp", "recompute")
DRAWS = 100
AT = {(name, level): at for at, (name, level) in enumerate((n, v) for n, found in FACTORS.items() for v in found)}
Levels = Mapping[str, tuple[Any, ...]]


def fits(item: Item) -> bool:
    """Few enough ranks, each level named as it should be: whether the project is asked."""
    return ranks_of(item) <= RANKS and well_named(item)


def drawn(generator: random.Random, kept: Item | None = None, factors: Levels = FACTORS) -> Item | None:
    """A job with the levels of `kept`, the others drawn; None where this start led to none."""
    return _started({}, kept or {}, generator, factors)


def near(generator: random.Random, kept: Item) -> Item | None:
    """A job with the levels of `kept` and of the others the first ones, as far as it can be."""
    others = {name: levels[0] for name, levels in FACTORS.items() if name not in OWNERS}
    return _started(others, kept, generator, FACTORS)


def _started(given: Item, kept: Item, generator: random.Random, factors: Levels) -> Item | None:
    """Levels are drawn until those kept are read by some job of so few ranks; then mended."""
    for _ in range(DRAWS):
        item = {name: generator.choice(levels + OFTEN.get(name, ())) for name, levels in factors.items()} | given
        limit, degrees = generator.choice((2, 4, 4, RANKS)), {name: kept.get(name, 1) for name in DEGREES}
        for name in generator.sample(DEGREES, len(DEGREES)):
            room = max(1, limit * degrees[name] // ranks_of(degrees))
            degrees[name] = kept.get(name) or generator.choice([level for level in factors[name] if level <= room])
        item = renamed(item | degrees | kept, kept, generator)
        if fits(item):
            return mended(item, kept, generator, factors)
    return None


def mended(item: Item, kept: Item, generator: random.Random, factors: Levels = FACTORS) -> Item | None:
    """`item` with levels changed until the project takes it, one that lessens its problems at a time."""
    left = refusals(item)
    for _ in range(MENDS):
        if not left:
            return item
        free = [name for name in factors if name not in kept]
        said = [name for name in free if any(name in f"{problem.field} {problem.rule}" for problem in left)]
        name = generator.choice(said if said and generator.random() < 0.8 else free)
        level = factors[name][0] if generator.random() < 0.4 else generator.choice(factors[name])
        other = renamed(item | {name: level}, kept, generator)
        if fits(other) and len(found := refusals(other)) <= len(left):
            item, left = other, found
    return None


def found_with(pair: Pair, generator: random.Random, starts: int = STARTS) -> Item | None:
    """A job that has `pair`, from that many starts: at the first levels of all other factors, and drawn ones."""
    kept = dict(pair)
    found = chain((near(generator, kept) for _ in range(starts)), (drawn(generator, kept) for _ in range(starts)))
    return next((item for item in found if item is not None), None)


Marks = NDArray[np.float32]


def marks(items: Iterable[Item]) -> Marks:
    """[items, levels]: 1 where an item has a level."""
    rows = [[AT[pair] for pair in item.items()] for item in items]
    found = np.zeros((len(rows), len(AT)), np.float32)
    for row, columns in zip(found, rows, strict=True):
        row[columns] = 1
    return found


def cost(item: Item) -> float:
    """About its share of the time: of each rank, its start, and its blocks in each micro-batch."""
    return 0.3 + ranks_of(item) * (0.2 + 0.05 * microbatches_of(item) * (1 + layers_of(item) / item["pp"]))


class Left:
    """Pairs that are still to be covered: [levels, levels], upper half."""

    def __init__(self, pairs: Iterable[Pair]) -> None:
        self.matrix = np.zeros((len(AT), len(AT)), np.float32)
        for one, two in pairs:
            self.matrix[AT[one], AT[two]] = 1

    def new(self, some: Marks) -> Marks:
        """How many of them each row of `some` has."""
        return ((some @ self.matrix) * some).sum(1)

    def take(self, item: Item) -> None:
        """They are covered now."""
        levels = [AT[pair] for pair in item.items()]
        self.matrix[np.ix_(levels, levels)] = 0


def covering(pool: list[Item], left: Left, generator: random.Random) -> list[Item]:
    """Items, of the pool or changed ones of it, that together have all pairs that are left."""
    table, costs = marks(pool), np.array([cost(item) for item in pool], np.float32)
    chosen: list[Item] = []
    while left.matrix.any():
        item = improved(pool[int(np.argmax(left.new(table) / costs))], left, generator)
        left.take(item)
        chosen.append(item)
    return chosen


def searched(chosen: list[Item], pool: list[Item], generator: random.Random, rounds: int) -> list[Item]:
    """`chosen`, made cheaper: some are taken out and what they alone had is covered anew, as often as that helps."""
    pairs = pairs_of(pool)
    for _ in range(rounds):
        kept = generator.sample(chosen, len(chosen) * 5 // 6)
        left = Left(pairs - pairs_of(kept))
        other = reduced(kept + covering(pool, left, generator), generator)
        chosen = min(chosen, other, key=lambda items: sum(map(cost, items)))
    return chosen


def reduced(items: list[Item], generator: random.Random) -> list[Item]:
    """`items` with the same pairs: none whose pairs the others have, and each on as few ranks as its own pairs let."""
    counts = Counter(pair for item in items for pair in pairs_of([item]))
    found = []
    for item in sorted(items, key=cost, reverse=True):
        mine = {pair for pair in pairs_of([item]) if counts[pair] == 1}
        counts.subtract(pairs_of([item]))
        if mine:
            found.append(smaller(item, mine, generator))
            counts.update(pairs_of([found[-1]]))
    return found


def smaller(item: Item, mine: set[Pair], generator: random.Random) -> Item:
    """A cheaper job with the pairs `mine`, or `item`."""
    needed = {name for pair in mine for name, _ in pair}
    for name in generator.sample(COSTLY, len(COSTLY)):
        for level in FACTORS[name] if name not in needed else ():
            other = renamed(item | {name: level}, {}, generator)
            if cost(other) < cost(item) and fits(other) and mine <= pairs_of([other]) and not refusals(other):
                return smaller(other, mine, generator)
    return item


def improved(item: Item, left: Left, generator: random.Random) -> Item:
    """`item`, levels changed while that makes it worth more."""

    def worth(some: Item) -> float:
        return float(left.new(marks([some]))[0]) / cost(some)

    best, better = worth(item), True
    while better:
        better = False
        for name in generator.sample(list(FACTORS), len(FACTORS)):
            for level in FACTORS[name]:
                other = renamed(item | {name: level}, {name: level}, generator)
                if fits(other) and (value := worth(other)) > best and not refusals(other):
                    item, best, better = other, value, True
    return item


def pool(number: int, generator: random.Random) -> list[Item]:
    """So many jobs."""
    found: list[Item] = []
    while len(found) < number:
        item = drawn(generator)
        found += [] if item is None else [item]
    return found


def every_pair() -> set[Pair]:
    """Of two different factors."""
    levels = list(AT)
    return {(one, two) for one, two in combinations(levels, 2) if one[0] != two[0]}


def completed(items: list[Item], generator: random.Random) -> tuple[list[Item], list[Pair]]:
    """`items` and one more for each pair that they lack and that is found; the pairs that are not."""
    seen, never = pairs_of(items), []
    for pair in sorted(every_pair() - seen, key=lambda pair: (AT[pair[0]], AT[pair[1]])):
        if pair in seen:
            continue
        item = found_with(pair, generator)
        if item is None:
            never.append(pair)
        else:
            items = [*items, item]
            seen |= pairs_of([item])
    return items, never


def pairs_of(items: Iterable[Item]) -> set[Pair]:
    """All pairs of levels that one of them has."""
    return {pair for item in items for pair in combinations(item.items(), 2)}


HEAD = """\
# Made by `python -m tests.verify.cover`: items of everything.py, one a line, that have every pair of levels that some
# job of at most 8 ranks has. Below `never`: the pairs that none has, all levels of one factor with one of another.
"""


def text_of(items: Sequence[Item], never: Sequence[Pair]) -> str:
    """The file."""
    grouped: dict[tuple[str, Any, str], list[Any]] = {}
    for (one, level), (two, other) in never:
        grouped.setdefault((one, level, two), []).append(other)
    found = [f"{one}={level} {two}={'|'.join(map(str, others))}" for (one, level, two), others in grouped.items()]
    lines = sorted(map(line_of, items), key=lambda line: (ranks_of(item_of(line)), line))
    return HEAD + "\n".join(["", *lines, "", "never", *found, ""])


def read() -> tuple[list[Item], set[Pair]]:
    """The cover, and the pairs that no job has."""
    text = "\n".join(line for line in FILE.read_text(encoding="utf-8").splitlines() if not line.startswith("#"))
    jobs, _, never = text.partition("\nnever\n")
    levels = {name: {str(level): level for level in found} for name, found in FACTORS.items()}
    pairs = set()
    for line in filter(None, never.splitlines()):
        (one, level), (two, others) = (word.split("=") for word in line.split())
        pairs |= {((one, levels[one][level]), (two, levels[two][other])) for other in others.split("|")}
    return [item_of(line) for line in filter(None, jobs.splitlines())], pairs


def main() -> None:
    """Write the file."""
    generator = random.Random(SEED)
    drawn_ones = pool(POOL, generator)
    items, never = completed(drawn_ones, generator)
    print(f"{len(drawn_ones)} drawn, {len(items) - len(drawn_ones)} looked for; {len(never)} pairs no job has")
    chosen = reduced(covering(items, Left(pairs_of(items)), generator), generator)
    print(f"{len(chosen)} chosen of them, about {sum(map(cost, chosen)):.0f} s of a CPU")
    chosen = searched(chosen, items, generator, ROUNDS)
    FILE.write_text(text_of(chosen, never), encoding="utf-8")
    found = f"{len(chosen)} jobs in {FILE.name}: {sorted(Counter(map(ranks_of, chosen)).items())} by ranks"
    print(f"{found}, about {sum(map(cost, chosen)):.0f} s of a CPU")


if __name__ == "__main__":
    main()
