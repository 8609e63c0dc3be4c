"""Predicted traffic of a pipeline's ranks: closed forms of its boundaries, and two ways to one number."""

from __future__ import annotations

from typing import Any

import pytest
from tests.tiny import tiny_job

from heptad.account.traffic import buckets_of, step_traffic
from heptad.axes.data import cost
from heptad.axes.data.buckets import unit_uses
from heptad.axes.pipeline.cost import unit_runs
from heptad.axes.program import microbatches_of, recomputed, stages_of, step_program
from heptad.config.schema import Job
from heptad.mesh.layout import Layout
from heptad.models.spec import param_specs, unit_specs
from heptad.trace import total


def sent(job: Job) -> list[dict[tuple[str, str, str], tuple[int, int]]]:
    """By place along the pipeline."""
    units, specs = unit_specs(job.model), param_specs(job.model)
    again = recomputed(job, units, stages_of(job, units))
    return [total(step_traffic(job, units, specs, again, place=place)) for place in range(job.layout.pp)]


@pytest.mark.parametrize(
    ("schedule", "vpp", "boundaries"),
    [("gpipe", 1, 3), ("1f1b", None, 3), ("interleaved", 2, 7), ("zbv", None, 6), ("dualpipe", None, 3)],
)
def test_every_boundary_between_ranks_is_crossed_once_each_way_a_micro_batch(
    schedule: str, vpp: int | None, boundaries: int
) -> None:
    """V-shaped stages turn on the last rank, where nothing is sent: 2P - 2 boundaries instead of 2P - 1."""
    job = tiny_job(dict(layers=8), global_batch=8, pp=4, schedule=schedule, vpp=vpp)
    stream = 11 * 10 * 8  # tokens × width × bytes of fp64
    for phase in ("forward", "backward"):
        counts = [place.get(("pp", "send", phase), (0, 0)) for place in sent(job)]
        assert sum(count for count, _ in counts) == 8 * boundaries
        assert all(num_bytes == count * stream for count, num_bytes in counts)


def test_a_frozen_stage_is_sent_no_gradient() -> None:
    job = tiny_job(dict(layers=4, frozen=("embed.*", "blocks.[01].*")), pp=2, layers_per_stage=(2, 2))
    below, above = sent(job)
    assert below["pp", "send", "forward"][0] == 8 and ("pp", "send", "backward") not in above


def test_a_cut_stream_sends_each_ranks_rows() -> None:
    job = tiny_job(pp=2, tp=2, sequence_parallel=True)
    assert sent(job)[0]["pp", "send", "forward"] == (8, 8 * 6 * 10 * 8)  # 11 tokens on 2 ranks: 6 rows each


def test_dualpipe_runs_half_of_the_micro_batches_on_each_of_two_ranks() -> None:
    job = tiny_job(dict(layers=4), pp=4, schedule="dualpipe")
    stages = stages_of(job, unit_specs(job.model))
    assert stages is not None
    assert [set(unit_runs(stages, place)) for place in range(4)] == [{0, 4}] * 4
    assert [sum(runs) for runs in zip(*(unit_runs(stages, place) for place in range(4)), strict=True)] == [8] * 6


LAYOUTS: list[dict[str, Any]] = [
    dict(zero=0, dp_replicate=2),
    dict(zero=1, dp_shard=2, dp_replicate=2),
    dict(zero=2, dp_shard=4),
    dict(zero=3, dp_shard=2),
    dict(zero=3, dp_shard=2, dp_replicate=2, bucket_mb=0.01),
]


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("options", LAYOUTS, ids=str)
def test_walking_the_program_gives_what_the_formula_says(options: dict[str, Any], recompute: str) -> None:
    """Without a pipeline, where the formula holds."""
    job = tiny_job(dict(tied=True), recompute=recompute, **options)
    units, specs, layout = unit_specs(job.model), param_specs(job.model), Layout.of(job.layout)
    buckets, _ = buckets_of(job, units, specs)
    uses, again = unit_uses(units, buckets), recomputed(job, units)
    zero, number = job.layout.zero, microbatches_of(job)
    ranks = cost.families(layout, zero)
    formula = cost.traffic(buckets, uses, zero, ranks, number, 8, 8, again)
    program = step_program(job, uses, number, again)
    assert total(cost.program_traffic(buckets, program, zero, ranks, 8, 8)) == total(formula)
