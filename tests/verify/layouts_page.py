"""docs/layouts.md, from what `tally.py` found: which options passed with which axes, each pair of options, refusals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from itertools import combinations
from typing import Any

from tests.sweep import Pair
from tests.verify.cover import read
from tests.verify.everything import FACTORS, WIDE, item_of, ranks_of
from tests.verify.several import Item

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "etp")
IDLE = "it would have no effect"
Refused = tuple[int, int, Counter[tuple[str, str]]]

HEAD = """# Layouts that were run against one device

Made by `make layouts` on {day}. A factor is an option, or a few that belong together;
`tests/verify/everything.py` says what its levels are. A job has one level of each factor, "none"
where it does not read it at all. A job *passed* if, in float64, every gradient was within 1e-10 of
one device's, so was every parameter after each of two updates, ranks that hold the same elements
held the same bits, and each rank's ledger was what had been predicted for it.

- **Pairwise cover**: {cover} jobs with every pair of levels that any job of at most 8 ranks has;
  part of `make test`.
- **Sample**: {sample} other jobs, drawn by a seed: degrees first, each way to make so many ranks as
  often as the others, then the rest; part of `make test-all`.
- **Passed: {passed} of {all}.**{wrong}

Ranks: {ranks}.
"""

LEAST = """## Each pair of options

Of any two factors (rows, and columns by number), the jobs that passed with the *rarest* pair of
their levels. {possible} pairs of levels are some job's, {never} are none's: the end of
`tests/verify/everything.txt` lists these.
"""

REFUSED = """## What is refused

Placements (degrees, schedule, stream, how a sequence is cut, stage, expert axes; a dense model and a
mixture) of at most 8 ranks, all of them: {jobs} are jobs, {refused} are refused. Of {number} items
with all options drawn blindly, {drawn} are jobs. Each is refused before any process starts; one item
can break several rules. Numbers are written as n.
"""


def page(results: Mapping[str, str], placed: Refused, drawn: Refused) -> str:
    """The whole page."""
    covered, never = read()
    lines = {line for line, wrong in results.items() if not wrong}
    items = [item_of(line) for line in lines]
    wrong = [f"`{line}`" for line, text in results.items() if text]
    ranks = Counter(map(ranks_of, items))
    head = HEAD.format(
        day=date.today().isoformat(), cover=len(covered), sample=len(results) - len(covered), passed=len(items),
        all=len(results), ranks=", ".join(f"{number} jobs of {size}" for size, number in sorted(ranks.items())),
        wrong=" Not these: " + "; ".join(wrong) if wrong else "",
    )  # fmt: skip
    return "\n".join([head, *by_axis(items), "", *by_pair(items, never), "", *refused(placed, drawn)]) + "\n"


def table(head: Sequence[Any], rows: Iterable[Sequence[Any]]) -> list[str]:
    """In Markdown."""
    body = ["|".join(["", *map(str, row), ""]) for row in (head, ["---"] * len(head), *rows)]
    return [line.replace("|", " | ").strip() for line in body]


def by_axis(items: Sequence[Item]) -> list[str]:
    """Each level beside each axis of degree above 1."""
    rows = []
    for name, levels in WIDE.items():
        for level in levels:
            found = [item for item in items if item[name] == level]
            counts = [sum(item[axis] > 1 for item in found) for axis in AXES]
            rows.append([f"`{name}`", f"`{level}`", len(found), *counts])
    text = [
        "## Each option with each axis",
        "",
        "Jobs that passed: all that had the level, and those of them in which",
        "",
    ]
    text[2] += " the axis had more than one rank."
    return [*text, *table(["factor", "level", "jobs", *AXES], rows)]


def by_pair(items: Sequence[Item], never: set[Pair]) -> list[str]:
    """For two factors, how many jobs the rarest pair of levels had that a job can have."""
    counts = Counter(pair for item in items for pair in combinations(item.items(), 2))
    names = list(FACTORS)
    rows = []
    for at, two in enumerate(names):
        cells: list[Any] = []
        for one in names[:at]:
            pairs = [((one, a), (two, b)) for a in FACTORS[one] for b in FACTORS[two]]
            cells.append(min((counts[pair] for pair in pairs if pair not in never), default="–"))
        rows.append([f"{at + 1} `{two}`", *cells, *[""] * (len(names) - at)])
    possible = sum(len(FACTORS[a]) * len(FACTORS[b]) for a, b in combinations(names, 2)) - len(never)
    head = LEAST.format(possible=possible, never=len(never))
    return [head, *table(["", *range(1, len(names) + 1)], rows)]


def refused(placed: Refused, drawn: Refused) -> list[str]:
    """What is no job, and why."""
    rules = sorted(placed[2] | drawn[2], key=lambda key: (key[1].startswith(IDLE), key))
    kinds = {True: "no effect", False: "cannot be"}
    rows = [
        [
            f"`{f}`",
            kinds[rule.startswith(IDLE)],
            rule.removeprefix(IDLE).removeprefix(": "),
            placed[2][f, rule],
            drawn[2][f, rule],
        ]
        for f, rule in rules
    ]
    head = REFUSED.format(jobs=placed[0], refused=placed[1], number=sum(drawn[:2]), drawn=drawn[0])
    return [head, *table(["field", "why", "rule", "placements", "drawn"], rows)]
