"""Acceptance of all axes together: every pair of options that can be computes what one device computes, in `make test`.

`everything.txt` has the jobs; `slow` runs a seeded sample of others, with more ranks and rarer degrees, and asks the
project for every placement. A failing test prints the line that runs its job again. Read next: `everything.py`.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable

import pytest
from tests.verify import cover, tally
from tests.verify.everything import FACTORS, READ, WIDE, item_of, line_of, neutral, ranks_of, refusals, well_named
from tests.verify.several import Item, together
from tests.verify.trial import as_verify, assert_right, case_of, outcomes

from heptad.cli.job import ready

COVER, NEVER = cover.read()


def named(items: list[Item]) -> str:
    return f"{ranks_of(items[0])} ranks-{len(items)} jobs-{line_of(items[0])[:40]}"


@pytest.mark.parametrize("items", together(COVER, ranks_of), ids=named)
def test_pairwise_cover(items: list[Item]) -> None:
    assert_right(items)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(len(tally.PARTS)))
def test_a_sample_of_the_rest(part: int) -> None:
    assert_right(tally.sample(part))


def test_the_cover_is_of_jobs_and_has_every_pair_that_is_not_listed_as_none_s(
    record_property: Callable[[str, object], None],
) -> None:
    assert not [line_of(item) for item in COVER if refusals(item) or not cover.fits(item)]
    assert cover.pairs_of(COVER) == cover.every_pair() - NEVER
    number = tally.PART * len(tally.PARTS)
    record_property(
        "summary",
        f"verify, everything together: pairwise cover {len(COVER)} jobs, {len(cover.every_pair() - NEVER)} pairs of "
        f"{sum(map(len, FACTORS.values()))} levels of {len(FACTORS)} factors (`-m slow` runs {number} others)",
    )
    assert len(COVER) < 200 and number >= 500


def test_no_job_has_a_pair_that_is_listed_as_none_s() -> None:
    """If a rule has gone, `python -m tests.verify.cover` finds the pairs that can be now."""
    assert not cover.pairs_of(cover.pool(150, random.Random(2))) & NEVER


@pytest.mark.slow
def test_the_pairs_that_are_none_s_are_not_found_from_other_starts() -> None:
    generator = random.Random(3)
    assert not [pair for pair in sorted(NEVER, key=str) if cover.found_with(pair, generator, starts=3)]


@pytest.mark.slow
def test_every_placement_is_a_job_or_refused_with_a_reason() -> None:
    jobs, refused, rules = tally.counted(tally.placements())
    assert jobs > 10_000 and refused and not [rule for _, rule in rules if "not built" in rule]


def test_no_reason_is_missing_code() -> None:
    _, refused, rules = tally.counted(tally.anything(300))
    assert refused > 100 and not [rule for _, rule in rules if "not built" in rule]


def test_a_line_says_its_item_and_a_call_of_verify_its_job() -> None:
    for item in COVER:
        assert item_of(line_of(item)) == item and well_named(item)
    item = max(COVER, key=lambda item: len(line_of(item)))
    words = re.findall(r"--set '([^']*)'", as_verify(case_of(item)[0]))
    assert ready("/dev/null", words) == case_of(item)[0]


def test_what_is_not_read_is_called_none() -> None:
    assert well_named(neutral()) and well_named(neutral(pp=2, ep=2, router="softmax"))
    assert not well_named(neutral() | {"schedule": "1f1b"}) and not well_named(neutral() | {"cp": 2})
    assert all(FACTORS[name][0] == "none" for name in READ)


def test_a_wrong_job_is_named_by_its_line_and_the_others_of_its_group_are_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fine, raising = neutral(dp_shard=2), neutral(dp_shard=2, zero=1)

    def broken(rank: int, cases: object, steps: int) -> None:
        raise ValueError("on purpose")

    monkeypatch.setattr("tests.verify.trial._several", broken)
    found = outcomes([fine, raising])
    assert list(found) == [line_of(fine), line_of(raising)] and all("on purpose" in text for text in found.values())
    with pytest.raises(AssertionError, match=r"python -m tests\.verify\.trial dp_shard=2 zero=1"):
        assert_right([raising])


def test_the_sample_keeps_to_its_seed_and_is_not_the_cover_s() -> None:
    part = tally.PARTS.index(2)
    drawn = tally.sample(part)
    assert drawn == tally.sample(part) and {ranks_of(item) for item in drawn} == {2}
    assert not {line_of(item) for item in drawn} & {line_of(item) for item in COVER}


def test_the_page_has_the_factors_and_levels_of_the_code() -> None:
    text = tally.PAGE.read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| `([^`]+)` \| (\d+)", text, re.MULTILINE)
    assert [(name, level) for name, level, _ in rows] == [(n, str(v)) for n, levels in WIDE.items() for v in levels]
    assert all(int(number) for name, level, number in rows if level in map(str, FACTORS[name]))
    assert set(re.findall(r"^\| \d+ `(\w+)` \|", text, re.MULTILINE)) == set(FACTORS)
    passed, everything = map(int, re.findall(r"Passed: (\d+) of (\d+)", text)[0])
    assert passed == everything >= 500 + len(COVER) and "not built" not in text


def test_counts_of_ranks() -> None:
    counts = Counter(map(ranks_of, COVER))
    assert max(counts) <= 8 and sum(counts[size] for size in (1, 2, 3, 4)) > counts[6] + counts[8]
