"""Loading: keys, values, overrides, round trips; every problem of a file in one error."""

from __future__ import annotations

import string
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heptad.config.load import dump, load, parse
from heptad.config.presets import job_presets
from heptad.config.schema import Job
from heptad.errors import ConfigError

Snapshot = Callable[[str, str], None]


def refused(text: str, *sets: str) -> ConfigError:
    with pytest.raises(ConfigError) as error:
        parse(text, "job.toml", sets)
    return error.value


C_119 = """
steps = 100
learning_rate = 0.1

[trian]
steps = 100

[optimizer]
learning_rte = 1e-3
global_batch = 32
warmup-steps = 10
lr = "1e-3"
betas = [0.9]
name = "adam"
zzz = 1

[train]
steps = "many"
global_batch = 0
micro_batch = 2.5
deterministic = 1

[layout]
zero = true

[recompute]
segment = "all"

[log]
name = 3

[model]
frozen = "head.*"
rope_theta = inf

[model.rope_scaling]
kind = "llama"
factr = 8.0
"""


def test_c_119_wrong_keys_and_values_are_all_named_with_a_suggestion(snapshot: Snapshot) -> None:
    snapshot("c_119_keys_and_values", str(refused(C_119)))


def test_c_119_each_kind_alone() -> None:
    (problem,) = refused("[optimizer]\nlearning_rte = 1e-3").problems
    assert problem.field == "optimizer.learning_rte" and "optimizer.lr" in problem.fix
    (problem,) = refused("[optimizer]\nglobal_batch = 8").problems
    assert problem.field == "optimizer.global_batch" and "train.global_batch" in problem.fix
    (problem,) = refused("[train]\nglobal-batch = 8").problems
    assert problem.field == "train.global-batch" and "global_batch" in problem.fix
    (problem,) = refused('[train]\nsteps = "10"').problems
    assert problem.field == "train.steps" and "whole number" in problem.rule and "without quotes" in problem.fix


@pytest.mark.parametrize("name", ["", "a/b", "../up", ".hidden", "x" * 201])
def test_a_run_name_is_part_of_file_names(name: str) -> None:
    (problem,) = refused(f'[log]\nname = "{name}"').problems
    assert problem.field == "log.name" and ("letters, digits" in problem.rule or "200 characters" in problem.rule)


@pytest.mark.parametrize("field", ["data.path", "data.tokenizer", "data.cache_dir", "checkpoint.dir", "log.dir"])
def test_an_empty_path_is_refused(field: str) -> None:
    (problem,) = refused("", f"{field}=''").problems
    assert problem.field == field and "not empty" in problem.rule


def test_c_119_a_key_twice(snapshot: Snapshot) -> None:
    twice = refused("[train]\nsteps = 1\nglobal_batch = 8\nsteps = 2")
    assert twice.problems[0].field == "train.steps"
    section = refused("[train]\nsteps = 1\n\n[train]\nglobal_batch = 8")
    override = refused("", "train.steps=1", "train.steps=2")
    snapshot("c_119_a_key_twice", "\n".join(map(str, (twice, section, override))))


def test_broken_toml_names_the_line(snapshot: Snapshot) -> None:
    errors = [refused("[train]\nsteps = 1 2\n"), refused("[train]\nsteps ="), refused("[train"), refused("= 1")]
    snapshot("broken_toml", "\n".join(map(str, errors)))


def test_overrides_are_toml_values_or_bare_words() -> None:
    job = parse(
        "[train]\nsteps = 5",
        "job.toml",
        [
            "train.steps=7",
            "data.path=../some/where",
            'log.name="3"',
            "optimizer.betas=[0.8, 0.99]",
            "optimizer.roles.matrix=muon",
            "optimizer.clip_norm=none",
            "data.shuffle=false",
            "optimizer.lr = 1e-2",
            'data.sources=[{name = "a", path = "b"}]',
        ],
    )
    assert (job.train.steps, job.data.path, job.log.name, job.optimizer.betas) == (7, "../some/where", "3", (0.8, 0.99))
    assert (job.optimizer.roles, job.optimizer.clip_norm, job.data.shuffle) == ({"matrix": "muon"}, None, False)
    assert job.optimizer.lr == 0.01 and job.data.sources[0].path == "b"


def test_bad_overrides_and_the_files_own_problems_come_in_one_error(snapshot: Snapshot) -> None:
    sets = ("steps", "train=3", "data.path=[1", "train.seed.x=3", "train.stesp=3", "train.micro_batch=two", ".a=1")
    snapshot("bad_overrides", str(refused("[layout]\nzero = 7", *sets)))


def test_an_override_cannot_smuggle_a_second_key() -> None:
    assert parse("", "job.toml", ["data.path=1\nx = 2"]).data.path == "1\nx = 2"


def test_a_job_is_a_preset_then_a_path_then_refused(tmp_path: Path, snapshot: Snapshot) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("[train]\nsteps = 3\n")
    assert load(str(path), ["train.seed=5"]).train.steps == 3
    with pytest.raises(ConfigError) as error:
        load("defualt")
    snapshot("unknown_job", str(error.value))
    with pytest.raises(ConfigError, match="give debug as the job, and --set model"):
        load("deepseek-v3")
    assert load("debug", ["model.preset=deepseek-v3"]).model.preset == "deepseek-v3"
    with pytest.raises(ConfigError, match=r"mine\.toml"):
        load(str(tmp_path / "mien.toml"))
    with pytest.raises(ConfigError, match="not a folder"):
        load(str(tmp_path))
    path.write_bytes(b"[log]\nname = '\xff'\n")
    with pytest.raises(ConfigError, match="UTF-8"):
        load(str(path))


@pytest.mark.parametrize("name", sorted(job_presets()))
def test_dump_round_trips_presets(name: str) -> None:
    job = load(name, ['data.text_field="a\\"b"', "optimizer.clip_norm=none"])
    assert parse(dump(job), "run/job.toml") == job


TEXT = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=8)
NAME = TEXT.filter(bool)


@given(
    field=TEXT,
    options=st.dictionaries(TEXT, st.one_of(st.booleans(), st.integers(-(2**60), 2**60), TEXT), max_size=3),
    lr=st.floats(min_value=1e-300, max_value=1e300, exclude_min=True),
    sources=st.lists(st.tuples(NAME, NAME), max_size=2),
    clip=st.one_of(st.none(), st.floats(min_value=1e-6, max_value=1e6)),
)
def test_dump_round_trips_any_values(
    field: str, options: dict[str, int | str], lr: float, sources: list[tuple[str, str]], clip: float | None
) -> None:
    job = Job.model_validate(
        {
            "model": {"options": options},
            "optimizer": {"lr": lr, "clip_norm": clip, "roles": {"matrix": "muon"}},
            "data": {"text_field": field, "sources": tuple({"name": key, "path": path} for key, path in sources)},
        }
    )
    assert parse(dump(job), "run/job.toml") == job


@given(key=st.text(string.ascii_lowercase + "_-", min_size=1, max_size=12))
def test_any_unknown_key_is_refused_by_name(key: str) -> None:
    if key not in type(Job().train).model_fields:
        problems = refused(f"[train]\n{key} = 1").problems
        assert [problem.field for problem in problems] == [f"train.{key}"] and problems[0].fix
