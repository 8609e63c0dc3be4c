"""What the sweeps over an axis' layouts, and the tests of its planted faults, have in common."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
from tests.verify.layouts import layout_job

from heptad.config.schema import Job
from heptad.errors import ConfigError
from heptad.launch.forked import forked
from heptad.loader.prepare import PreparedData
from heptad.loader.synthetic import synthetic
from heptad.mesh.layout import Layout
from heptad.verify.compare import compare
from heptad.verify.faults import parse
from heptad.verify.ranks import RankReport, _rank
from heptad.verify.run import Verdict
from heptad.verify.stale import reference_of

Item = dict[str, Any]
Case = tuple[Job, PreparedData]
TOGETHER = 6


def together(items: list[Item], ranks_of: Callable[[Item], int]) -> list[list[Item]]:
    """Jobs of as many ranks, at most `TOGETHER` of them."""
    by_world: dict[int, list[Item]] = defaultdict(list)
    for item in items:
        by_world[ranks_of(item)].append(item)
    return [found[at : at + TOGETHER] for found in by_world.values() for at in range(0, len(found), TOGETHER)]


def fast(names: Iterable[str], also: Callable[[str], bool]) -> list[Any]:
    """Parameters of a test: those for which `also` does not hold run under `slow`."""
    return [name if also(name) else pytest.param(name, marks=pytest.mark.slow) for name in names]


def first_of_each(cases: Mapping[str, tuple[Any, ...]]) -> list[Any]:
    """Names of cases (fault, ...): those after the first one of their fault run under `slow`."""
    first: dict[str, str] = {}
    for name, (fault, *_) in cases.items():
        first.setdefault(fault, name)
    return fast(cases, lambda name: name in first.values())


def by_ranks(jobs: Mapping[str, dict[str, Any]], also: Callable[[str], bool] = lambda name: True) -> list[Any]:
    """Parameters of a test, names of `jobs` (arguments of `layout_job`), as many ranks together; as in `fast`."""

    def groups(names: Iterable[str]) -> list[list[Item]]:
        items = [{"name": name} for name in names]
        return together(items, lambda item: Layout.of(layout_job(**jobs[item["name"]]).layout).world)

    def parameters(names: list[str], *marks: Any) -> list[Any]:
        found = [[item["name"] for item in items] for items in groups(names)]
        return [pytest.param(group, id=", ".join(group), marks=marks) for group in found]

    slow = [name for name in jobs if not also(name)]
    return parameters([name for name in jobs if also(name)]) + parameters(slow, pytest.mark.slow)


def assert_jobs_right(names: Iterable[str], jobs: Mapping[str, dict[str, Any]]) -> None:
    """`assert_all_right` of these of `jobs`, each with its synthetic tokens."""
    found = [layout_job(**jobs[name]) for name in names]
    assert_all_right([(job, synthetic(job)) for job in found])


def _several(rank: int, cases: list[Case], steps: int) -> list[RankReport]:
    return [_rank(rank, job, tokens, steps, (), False) for job, tokens in cases]


def assert_all_right(cases: list[Case], steps: int = 2) -> None:
    """Jobs of as many ranks, one after the other in the same processes, each against one device."""
    world = Layout.of(cases[0][0].layout).world
    ranks = forked(world, _several, cases, steps, timeout_s=300)
    for at, (job, tokens) in enumerate(cases):
        found = compare(job, reference_of(job, tokens), [reports[at] for reports in ranks], steps)
        assert not found.differences, (job.layout, job.model, job.recompute, found.differences[:5])
        assert found.traffic_matches, (job.layout, job.model, job.recompute, found.predicted, found.counted)
        assert found.reorder_ratio is None or found.reorder_ratio <= 2


def assert_named(verdict: Verdict, axis: str, module: str) -> None:
    """The fault is caught, `axis` is blamed, and the first differing module's name holds `module`."""
    assert not verdict.ok and verdict.blame is not None and verdict.module is not None
    assert verdict.blame.axis == axis and module in verdict.module


def assert_refused(fault: str, job: Job, steps: int, says: str) -> None:
    """A fault that cannot be planted in `job` is refused, with the reason."""
    with pytest.raises(ConfigError) as error:
        parse((fault,), job, steps)
    assert says in str(error.value)
