"""How often each pair of options passed: runs the cover and the sample of `everything.py` and writes docs/layouts.md.

    python -m tests.verify.tally          # or `make layouts`: half an hour on two cores; what has run is kept in build/

Placements (degrees, schedule, stream, how a sequence is cut, expert axes, stage, kind of model) are enumerated, each
asked of the project, and what it refuses is counted by field and rule, numbers written as n. Options beyond the
placement are drawn. Read next: `everything.py`, `cover.py`, `trial.py`.
"""

from __future__ import annotations

import random
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from pathlib import Path

from tests.verify import cover
from tests.verify.everything import DEGREES, NONE, RANKS, READ, WIDE, line_of, neutral, ranks_of, refusals, renamed
from tests.verify.layouts_page import page
from tests.verify.several import Item, together
from tests.verify.trial import outcomes

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "layouts.md"
RESULTS = ROOT / "build" / "layouts.txt"
PARTS = (8,) * 16 + (4,) * 10 + (6,) * 8 + (2,) * 3 + (3,) * 2 + (1, 5, 7)
"""Ranks of each part of the sample, which is of jobs that run in the same processes."""
PART, SEED, DRAWN = 12, 20, 20_000
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "etp")
PLACED = ("schedule", "stream", "context", "split", "zero", "router", "ep", "etp", "ep_inner")
"""What a placement says beside its degrees; each is read or not by those before it."""
LEVELS = WIDE | {"router": ("dense", "deepseek"), "ep": (1, 2, 3, 4, 8), "ep_inner": (NONE, 1, 2)}

NUMBER = r"(?<![\w-])\d+(\.\d+)?(?!\w)"

Refused = Counter[tuple[str, str]]


def degrees() -> list[Item]:
    """Every way to write at most 8 ranks as a product of the five axes."""
    found = [dict(zip(DEGREES, sizes, strict=True)) for sizes in product(range(1, RANKS + 1), repeat=len(DEGREES))]
    return sorted((item for item in found if ranks_of(item) <= RANKS), key=ranks_of)


def placements() -> Iterator[Item]:
    """Every one of at most 8 ranks, whether it can be or not, of a dense model and of a mixture. Sequences are long
    enough, a pipeline has two micro-batches a rank and nothing is clipped, so that no placement is refused for these.
    """
    for sizes in degrees():
        said = sizes | {"microbatches": "2P", "length": 13, "clip": NONE}
        yield from _placed(neutral(**said), said, PLACED)


def _placed(item: Item, said: Item, names: Sequence[str]) -> Iterator[Item]:
    if not names:
        yield item
        return
    name, *others = names
    levels = [level for level in LEVELS[name] if (level != NONE) == READ[name](item)] if name in READ else LEVELS[name]
    levels = levels[:1] if name in ("ep", "etp") and item["router"] == "dense" else levels
    for level in levels:
        now = said | {name: level}
        yield from _placed(renamed(item | now, now), now, others)


def sample(part: int) -> list[Item]:
    """Jobs of `PARTS[part]` ranks that the cover has not: degrees drawn first, each way as often, then the rest."""
    generator, covered = random.Random(f"{SEED}.{part}"), {line_of(item) for item in cover.read()[0]}
    ways = [sizes for sizes in degrees() if ranks_of(sizes) == PARTS[part]]
    found: dict[str, Item] = {}
    while len(found) < PART:
        item = cover.drawn(generator, generator.choice(ways), WIDE)
        if item is not None and line_of(item) not in covered:
            found[line_of(item)] = item
    return list(found.values())


def counted(items: Iterable[Item]) -> tuple[int, int, Refused]:
    """Jobs and refused items, and how often each rule refused one: (field, rule), numbers written as n."""
    jobs, refused, rules = 0, 0, Refused()
    for item in items:
        found = refusals(item)
        jobs, refused = jobs + (not found), refused + bool(found)
        rules.update({(problem.field, re.sub(NUMBER, "n", problem.rule)) for problem in found})
    return jobs, refused, rules


def anything(number: int) -> Iterator[Item]:
    """Well named items of at most 8 ranks, drawn and not mended: most are no jobs."""
    generator, ways = random.Random(SEED), degrees()
    for _ in range(number):
        item = {name: generator.choice(levels) for name, levels in WIDE.items()} | generator.choice(ways)
        yield renamed(item, {}, generator)


def run() -> dict[str, str]:
    """Line -> what is wrong ("" if nothing), of the cover and the sample; what an earlier call ran is not run again."""
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.touch()
    found = dict(line.split("\t") for line in RESULTS.read_text(encoding="utf-8").splitlines())
    covered, drawn = cover.read()[0], [item for part in range(len(PARTS)) for item in sample(part)]
    wanted = covered + drawn
    left = [[item for item in some if line_of(item) not in found] for some in (covered, drawn)]
    for group in (group for some in left for group in together(some, ranks_of)):
        new = {line: " ".join(wrong.split()) for line, wrong in outcomes(group).items()}
        with RESULTS.open("a", encoding="utf-8") as file:
            file.writelines(f"{line}\t{wrong}\n" for line, wrong in new.items())
        found |= new
        wrong = sum(map(bool, found.values()))
        print(f"\r{len(found)} run, {len(wanted)} wanted, {wrong} wrong", end="", file=sys.stderr)
    return {line: found[line] for line in map(line_of, wanted)}


def main() -> int:
    """Run what has not run, count what is refused, write the page; 1 where a job is wrong."""
    results = run()
    PAGE.write_text(page(results, counted(placements()), counted(anything(DRAWN))), encoding="utf-8")
    wrong = {line: text for line, text in results.items() if text}
    print("\n".join(f"python -m tests.verify.trial {line}\n    {text}" for line, text in wrong.items()))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
