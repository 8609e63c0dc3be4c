"""A schedule's rules on ranks, stages and micro-batches, said in the job's words, in one message with all others."""

from __future__ import annotations

from pathlib import Path

import pytest

from heptad.axes.pipeline.generate import GENERATORS, generate
from heptad.axes.pipeline.legal import check_job, legal_microbatches, problems
from heptad.cli.job import ready
from heptad.config.load import load
from heptad.config.pipeline import STAGES_A_RANK, even_split, num_stages
from heptad.errors import ConfigError
from heptad.schedule.pipeline import format_schedule


def refused(*sets: str) -> ConfigError:
    with pytest.raises(ConfigError) as error:
        ready("debug", sets)
    return error.value


def test_stages_a_rank_are_those_of_the_generators() -> None:
    assert {name: STAGES_A_RANK.get(name, 1) for name in GENERATORS} == {n: g.chunks for n, g in GENERATORS.items()}
    for name, generator in GENERATORS.items():
        layout = load("debug", ["layout.pp=2", f"layout.schedule={name}"]).layout
        assert num_stages(layout) == 2 * generator.chunks == generate(name, 2, None, 8).num_stages


@pytest.mark.parametrize(
    ("fixes", "sets"),
    [
        ({"layout.pp": "pp = 2, or 4"}, ["layout.pp=3", "layout.schedule=dualpipe"]),
        ({"layout.vpp": 'schedule = "interleaved", which takes vpp = 2'}, ["layout.pp=2", "layout.vpp=2"]),
        ({"layout.schedule": '"zbh1"'}, ["layout.pp=2", "layout.schedule=zbh"]),
        ({"layout.schedule": "path of a text file"}, ["layout.pp=2", "layout.schedule=file:nowhere.txt"]),
        (
            {"train.global_batch": 'global_batch = 8 or 10, or schedule = "1f1b"'},
            ["layout.pp=2", "layout.schedule=dualpipe", "train.global_batch=9"],
        ),
        (
            {"train.global_batch": "global_batch = 16, or micro_batch = 1,"},
            ["layout.pp=4", "layout.schedule=dualpipe", "train.micro_batch=2", "train.global_batch=8"],
        ),
        (
            {"train.global_batch": "global_batch = 64, or schedule"},
            ["layout.pp=4", "layout.schedule=dualpipev", "layout.dp_shard=4", "train.micro_batch=2"],
        ),
        (
            {"train.global_batch": "global_batch = 12 or 16, or micro_batch = 2 or 7", "layout.vpp": "vpp = 1"},
            ["layout.pp=2", "layout.vpp=3", "layout.schedule=dualpipe", "train.micro_batch=4", "train.global_batch=14"],
        ),
    ],
)
def test_what_a_schedule_cannot_do(fixes: dict[str, str], sets: list[str]) -> None:
    found = {problem.field: problem.fix for problem in refused(*sets).problems}
    assert found.keys() == fixes.keys() and all(fixes[field] in found[field] for field in fixes), found


def test_everything_wrong_with_a_pipeline_is_one_message() -> None:
    error = refused(
        "layout.pp=5", "layout.schedule=dualpipe", "layout.layers_per_stage=[1, 2]", "layout.vpp=4",
        "train.global_batch=3", "optimizer.warmup_steps=99", "layout.engine=fsdp2",
    )  # fmt: skip
    assert {problem.field for problem in error.problems} == {
        "layout.pp", "layout.vpp", "train.global_batch", "optimizer.warmup_steps", "layout.engine",
    }  # fmt: skip


@pytest.mark.parametrize("schedule", sorted(GENERATORS))
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_schedule_is_a_legal_job(schedule: str, ranks: int) -> None:
    sets = ["layout.zero=1", "optimizer.clip_norm=none"] if GENERATORS[schedule].asynchronous else []
    job = load("debug", [f"layout.pp={ranks}", f"layout.schedule={schedule}", *sets])
    assert list(problems(job)) == [] and legal_microbatches(job, 8) == 8
    check_job(job)
    assert legal_microbatches(job, 1) == max(1, GENERATORS[schedule].least * ranks)


def test_a_file_has_the_numbers_of_the_job(tmp_path: Path) -> None:
    path = tmp_path / "own.txt"
    path.write_text(format_schedule(generate("zbv", 2, None, 3)))
    sets = ["layout.pp=2", f"layout.schedule=file:{path}"]
    ready("debug", [*sets, "train.global_batch=3"])
    ready("debug", [*sets, "train.global_batch=3", "layout.layers_per_stage=[1, 3, 2, 2]"])
    assert "3 micro-batches, the job 2 ranks" in str(refused(*sets))
    assert "for each of the 4 stages" in str(refused(*sets, "train.global_batch=3", "layout.layers_per_stage=[4, 4]"))
    assert "layers >= 4" in str(refused(*sets, "train.global_batch=3", "model.layers=3"))
    path.write_text("0F0 0B0\n1B0 1F0\n")
    assert "file:" in str(refused(*sets, "train.global_batch=1"))


def test_an_even_split_gives_the_first_stages_more() -> None:
    assert even_split(30, 4) == [8, 8, 7, 7] and even_split(4, 4) == [1, 1, 1, 1]
