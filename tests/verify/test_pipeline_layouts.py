"""Acceptance of the pipeline axis: every schedule on every layout computes what one device computes.

Every gradient within 1e-10 of one device's in float64, every parameter after the update, copies and replicas bit for
bit, and the ledger equal to the prediction on every rank. A pairwise cover and a seeded sample of the rest run under
`slow`: the pairs of options are in the fast part of `test_everything.py` (`test_older_covers.py`).
Jobs of as many ranks run one after the other in the same processes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from tests.sweep import every, pairs, pairwise, possible, sampled
from tests.verify.layouts import layout_job
from tests.verify.several import Case, Item, assert_all_right, together

from heptad.axes.pipeline.generate import GENERATORS
from heptad.axes.pipeline.generate import problems as schedule_problems
from heptad.axes.pipeline.legal import check_job
from heptad.config.schema import Job
from heptad.loader.synthetic import synthetic

RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "full": dict(mode="full"),
    "segments": dict(mode="full", segment=2),
    "selective": dict(mode="selective"),
}
FACTORS: dict[str, tuple[Any, ...]] = {
    "schedule": tuple(name for name, generator in GENERATORS.items() if not generator.asynchronous),
    "pp": (2, 3, 4),
    "vpp": (1, 2),
    "microbatches": ("P", "2P", "2P+1"),
    "zero": (0, 1, 2, 3),
    "tensor": ("1", "2", "2cut"),
    "data": (1, 2),
    "recompute": tuple(RECOMPUTE),
    "tied": (False, True),
}
SAMPLE, POOL, SEED = 300, 1000, 7


def ranks_of(item: Item) -> int:
    found: int = item["pp"] * int(item["tensor"][0]) * item["data"]
    return found


def microbatches(item: Item) -> int:
    found: int = {"P": item["pp"], "2P": 2 * item["pp"], "2P+1": 2 * item["pp"] + 1}[item["microbatches"]]
    return found


@cache
def _possible(schedule: str, pp: int, vpp: int, number: int) -> bool:
    return not list(schedule_problems(schedule, pp, vpp, number))


def valid(item: Item) -> bool:
    """At most 8 ranks, and what the schedule can do."""
    return ranks_of(item) <= 8 and _possible(item["schedule"], item["pp"], item["vpp"], microbatches(item))


def job_of(item: Item, **sections: Any) -> Job:
    """A block a stage, tied models one more so that stages are uneven; at least three, for segments of two."""
    stages = item["pp"] * item["vpp"]
    described = dict(tied=item["tied"], layers=max(3, stages + item["tied"]), dropout=0.1) | sections.pop("model", {})
    layout = dict(pp=item["pp"], vpp=item["vpp"], schedule=item["schedule"], tp=int(item["tensor"][0]))
    return layout_job(
        zero=item["zero"],
        ranks=item["data"],
        accumulation=microbatches(item),
        tied=item["tied"],
        model=described,
        layout=layout | dict(sequence_parallel=item["tensor"] == "2cut"),
        recompute=RECOMPUTE[item["recompute"]],
        **sections,
    )


DRAWN = sampled(FACTORS, valid, POOL, SEED)
COVER = pairwise(FACTORS, valid, DRAWN)
REST = [item for item in DRAWN if item not in COVER][:SAMPLE]


def named(items: list[Item]) -> str:
    schedules = "-".join(item["schedule"] for item in items)
    return f"{ranks_of(items[0])} ranks-{schedules}"


def cases_of(items: list[Item]) -> list[Case]:
    return [(job, synthetic(job)) for job in map(job_of, items)]


@pytest.mark.slow
@pytest.mark.parametrize("items", together(COVER, ranks_of), ids=named)
def test_pairwise_cover(items: list[Item]) -> None:
    assert_all_right(cases_of(items))


@pytest.mark.slow
@pytest.mark.parametrize("items", together(REST, ranks_of), ids=named)
def test_a_sample_of_the_rest(items: list[Item]) -> None:
    assert_all_right(cases_of(items))


def test_the_cover_has_every_pair_and_both_counts_are_printed(record_property: Callable[[str, object], None]) -> None:
    number = len(every(FACTORS, valid))
    assert set().union(*map(pairs, COVER)) == possible(FACTORS, valid)
    record_property(
        "summary",
        f"verify, pipeline: pairwise cover {len(COVER)} of {number} jobs and {len(REST)} of the others under `-m slow`",
    )
    assert len(COVER) < 80 and len(REST) == SAMPLE < number


def test_every_job_of_the_sweep_is_a_legal_one() -> None:
    for item in (*COVER, *REST):
        check_job(job_of(item))
