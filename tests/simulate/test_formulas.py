"""The papers' idle formulas against the simulator: exact where they say so, off somewhere just outside."""

from __future__ import annotations

import itertools

import pytest

from heptad.axes.pipeline.formulas import FORMULAS, Chunk, idle_fraction
from heptad.axes.pipeline.generate import GENERATORS, generate
from heptad.errors import ConfigError
from heptad.schedule.pipeline import Schedule
from heptad.simulate.pipeline import PairMode, simulate
from heptad.simulate.times import Times

UNIT = Chunk(1, 1, 1, 2, 3)
SIZES = [*itertools.product((2, 3, 4), (1, 3, 4, 5, 8, 9)), (6, 13)]
SECONDS = list(itertools.product((1, 2, 3), (1, 2, 3), (0, 1, 2, 3)))


def schedules(name: str) -> list[tuple[int, int, int, Schedule]]:
    found = []
    for (num_ranks, num_microbatches), chunks in itertools.product(SIZES, (None, 1, 2, 3)):
        try:
            schedule = generate(name, num_ranks, chunks, num_microbatches)
        except ConfigError:
            continue
        found.append((num_ranks, schedule.num_stages // num_ranks, num_microbatches, schedule))
    return found


@pytest.mark.parametrize("name", sorted(FORMULAS))
def test_idle_time_is_the_formulas_where_it_is_exact(name: str) -> None:
    formula, inside, off = FORMULAS[name], 0, 0
    for num_ranks, chunks, num_microbatches, schedule in schedules(name):
        for f, i, w in SECONDS:
            at = Chunk(f, i, w, i + w, f + i + w)
            run = simulate(schedule, Times.uniform(schedule.num_stages, f, i, w), pairs=PairMode.BLOCK)
            equal = run.idle == (formula.idle_s(num_ranks, chunks, num_microbatches, at),) * num_ranks
            if formula.exact(num_ranks, chunks, num_microbatches, at):
                inside += 1
                assert equal, (num_ranks, chunks, num_microbatches, at, run.idle)
                assert run.idle_fraction == pytest.approx(idle_fraction(name, num_ranks, chunks, num_microbatches, at))
            else:
                off += not equal
    assert inside >= 40
    assert off or all(
        formula.exact(p, v, m, Chunk(*s, s[1] + s[2], sum(s))) for p, v, m, _ in schedules(name) for s in SECONDS
    )


def test_every_schedule_has_a_formula() -> None:
    assert set(FORMULAS) == set(GENERATORS)


@pytest.mark.parametrize(("num_ranks", "chunks", "num_microbatches"), [(4, 1, 8), (8, 1, 20), (4, 2, 8), (2, 3, 4)])
def test_the_papers_idle_fractions(num_ranks: int, chunks: int, num_microbatches: int) -> None:
    p, v, m = num_ranks, chunks, num_microbatches
    assert idle_fraction("naive", p, v, m, UNIT) == pytest.approx((p - 1) / p)
    assert idle_fraction("interleaved", p, v, m, UNIT) == pytest.approx((p - 1) / (v * m + p - 1))
    for name in ("gpipe", "1f1b"):
        assert idle_fraction(name, p, 1, m, UNIT) == pytest.approx((p - 1) / (m + p - 1))


def test_interleaved_with_a_rest_of_micro_batches_needs_the_right_order() -> None:
    """P = 4, V = 2, M = 6: an order in rounds of four and two idles a third; rounds of six idle as the formula says."""
    schedule = generate("interleaved", 4, 2, 6)
    assert simulate(schedule, Times.uniform(8)).idle_fraction == pytest.approx(1 / 5)
