"""The small job of a pipeline: its ranks, stages and schedule, uneven where it was, few micro-batches, all legal."""

from __future__ import annotations

from pathlib import Path

import pytest

from heptad.axes.pipeline.generate import GENERATORS, generate
from heptad.axes.pipeline.legal import problems as schedule_problems
from heptad.axes.program import recomputed, stages_of
from heptad.cli.job import ready
from heptad.config.check import problems
from heptad.config.schema import Job
from heptad.models.resolve import first_trained
from heptad.models.spec import unit_specs
from heptad.schedule.pipeline import format_schedule
from heptad.verify.shrink import shrink
from heptad.verify.stages import stage_sizes

SCHEDULES = sorted(GENERATORS)
PIPEDREAM = ["layout.zero=1", "optimizer.clip_norm=none"]


def small_of(*sets: str) -> Job:
    job = ready("debug", ["layout.bucket_mb=0", *sets])
    small = shrink(job, 3).job
    assert problems(small) == [] and list(schedule_problems(small)) == []
    kept = {"bucket_mb": small.layout.bucket_mb, "layers_per_stage": small.layout.layers_per_stage}
    assert small.layout == job.layout.model_copy(update=kept)
    if not job.recompute.layers:
        again = shrink(small, 3).job
        assert (again.model, again.layout, again.recompute) == (small.model, small.layout, small.recompute)
        assert again.train == small.train
    return small


def microbatches(job: Job) -> int:
    return job.train.global_batch // (job.layout.dp_shard * job.train.micro_batch)


def segments_by_stage(job: Job) -> list[list[int]]:
    """For each stage the blocks of each segment in it."""
    units = unit_specs(job.model)
    stages = stages_of(job, units)
    assert stages is not None
    found = recomputed(job, units, stages)
    return [[len(segment) for segment in found if segment[0] in stage] for stage in stages.units]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("batch", [4, 6, 9, 10, 64])
def test_every_schedule_stays_legal_with_few_micro_batches(schedule: str, ranks: int, batch: int) -> None:
    generator = GENERATORS[schedule]
    if batch < generator.least * ranks or (generator.even and batch % 2):
        return
    own = [] if schedule == "1f1b" else [f"layout.schedule={schedule}"]
    own += PIPEDREAM if schedule == "pipedream" else []
    sets = ["model.layers=30", f"layout.pp={ranks}", *own, "layout.dp_shard=2"]
    small = small_of(*sets, f"train.global_batch={2 * batch}")
    assert microbatches(small) == min(batch, microbatches(small)) <= 2 * ranks + 1
    if batch > 2 * ranks:
        multiple = batch % ranks == 0 and schedule not in ("1f1b", "gpipe", "naive", "pipedream")
        assert microbatches(small) == 2 * ranks + (not multiple and not generator.even)
    stages = ranks * generator.chunks
    assert len(stage_sizes(small)) == stages and small.model.layers <= 2 * stages


@pytest.mark.parametrize(
    ("sets", "sizes", "named"),
    [
        (["layout.pp=2"], (2, 2), False),
        (["layout.pp=8"], (1,) * 8, False),
        (["layout.pp=4", "model.layers=30"], (2, 2, 1, 1), False),
        (["layout.pp=4", "model.layers=31"], (2, 2, 2, 1), False),
        (["layout.pp=2", "model.layers=8", "model.vocab=4096"], (2, 1), False),
        (["layout.pp=2", "layout.layers_per_stage=[4, 4]"], (2, 2), True),
        (["layout.pp=2", "layout.layers_per_stage=[3, 5]"], (1, 2), True),
        (["layout.pp=3", "layout.layers_per_stage=[1, 5, 2]"], (1, 2, 2), True),
        (["layout.pp=3", "layout.layers_per_stage=[1, 6, 1]", "layout.tp=2"], (1, 2, 1), True),
        (["layout.pp=2", "layout.vpp=2", "layout.schedule=gpipe", "layout.layers_per_stage=[2, 2, 2, 2]"],
         (2, 2, 2, 2), True),
        (["layout.pp=2", "layout.schedule=zbv", "model.layers=4"], (1, 1, 1, 1), False),
    ],
)  # fmt: skip
def test_uneven_stages_stay_uneven(sets: list[str], sizes: tuple[int, ...], named: bool) -> None:
    small = small_of(*sets)
    assert stage_sizes(small) == sizes and bool(small.layout.layers_per_stage) == named


@pytest.mark.parametrize(
    ("sets", "joined"),
    [
        (["segment=2"], True),
        (["segment=sqrt"], True),
        (["segment=8"], True),
        (["segment=3", "layers=[0, 1, 2, 3, 4, 5, 6]"], True),
        (["segment=2", "layers=[6, 7]"], True),
        (["segment=2", "layers=[2, 3, 7]"], True),
        (["segment=2", "layers=[3, 4]"], False),
        (["layers=[0, 1]"], False),
        (["layers=[0, 7]"], False),
        ([], False),
    ],
)
@pytest.mark.parametrize("layout", [["pp=2"], ["pp=2", "layers_per_stage=[5, 3]"], ["pp=2", "schedule=interleaved"]])
def test_segments_stay_inside_stages(sets: list[str], joined: bool, layout: list[str]) -> None:
    options = ["recompute.mode=full", *(f"recompute.{item}" for item in sets), *(f"layout.{item}" for item in layout)]
    job = ready("debug", options)
    small = small_of(*options)
    before, after = segments_by_stage(job), segments_by_stage(small)
    assert (max(map(max, filter(None, before))) > 1) == (max(map(max, filter(None, after))) > 1)
    assert [bool(stage) for stage in before] == [bool(stage) for stage in after]
    for stage in range(len(before)):
        some = [0 < sum(item[stage]) < size for item, size in
                ((before, stage_sizes(job)[stage]), (after, stage_sizes(small)[stage]))]  # fmt: skip
        assert some[0] == some[1]
    if layout == ["pp=2"]:
        assert (max(map(max, filter(None, after))) > 1) == joined


def test_a_file_keeps_its_micro_batches(tmp_path: Path) -> None:
    path = tmp_path / "own.txt"
    path.write_text(format_schedule(generate("zbv", 2, None, 11)))
    small = small_of("layout.pp=2", f"layout.schedule=file:{path}", "train.global_batch=11")
    assert microbatches(small) == 11 and stage_sizes(small) == (2, 2, 2, 2)


def test_frozen_and_a_class_of_ones_own() -> None:
    sets = ["layout.pp=2", "model.frozen=['embed.*', 'blocks.[0-3].*']", "recompute.mode=full"]
    small = small_of(*sets, "recompute.layers=[4, 5]")
    assert small.recompute.layers == (2,) and first_trained(small.model) == 2  # stage 0 is frozen whole, as before
    job = ready("debug", ["layout.pp=4", "model.class=tests.own:Own", "train.global_batch=32"])
    kept = shrink(job, 3).job
    assert kept.model == job.model and microbatches(kept) == 9
