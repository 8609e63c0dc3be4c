"""Mixtures in bf16: no right layout is called wrong, over a seeded sample of all axes, and no fault is excused."""

from __future__ import annotations

import random
from itertools import product

import pytest
from tests.verify import cover
from tests.verify.everything import NONE, WIDE, line_of, ranks_of
from tests.verify.several import Item
from tests.verify.tally import degrees
from tests.verify.trial import assert_right

PARTS, SEED = (2, 3, 4, 4, 5, 6, 6, 7, 8, 8, 8, 8), 9
"""Ranks of each part of the sample, whose jobs run in the same processes."""
CUT = ("tp", "cp", "pp", "ep", "etp", "ep_inner")
"""Of each part's jobs one is on more than one rank along each of these, where some drawn job has that."""
TRIES = 30
ROUTERS = ("softmax", "deepseek")


def placed(ranks: int) -> list[Item]:
    """Degrees of all axes, those of experts too."""
    found = []
    for sizes, ep, etp, inner in product(degrees(), range(1, 9), (1, 2, 3), (1, 2, 3)):
        block = sizes["dp_shard"] * sizes["cp"] * sizes["tp"]
        if ranks_of(sizes) == ranks and block % (ep * etp) == 0 and ep % inner == 0 and inner < max(ep, 2):
            found.append(sizes | {"ep": ep, "etp": etp, "ep_inner": inner if ep > 1 else NONE})
    return found


def sample(part: int) -> list[Item]:
    """Mixtures on `PARTS[part]` ranks, of either router as many; degrees are drawn first, then the rest."""
    generator, ways = random.Random(f"{SEED}.{part}"), placed(PARTS[part])
    found: dict[str, Item] = {}
    for at, axis in enumerate(CUT):
        cut = [way for way in ways if way[axis] not in (1, NONE)] or ways
        tries = 0
        while len(found) <= at:
            tries += 1
            kept = generator.choice(cut if tries < TRIES else ways) | {"router": ROUTERS[(part + at) % len(ROUTERS)]}
            item = cover.drawn(generator, kept, WIDE)
            found |= {} if item is None else {line_of(item): item}
    return list(found.values())


@pytest.mark.slow
@pytest.mark.parametrize("part", range(len(PARTS)))
def test_a_sample_of_right_layouts(part: int) -> None:
    assert_right(sample(part), "bf16")
