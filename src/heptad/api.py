"""Heptad from Python: train a job, with a model of your own if you like.

    from heptad import api
    api.train("debug")                                  # a preset's name, a TOML path or a Job
    api.train("my-job.toml", model=MyModel, sets=["layout.dp_shard=4"])

A model is a class called with the job's [model] section; what it must have stands in `models/build.py`, a whole one in
`examples/custom_model.py`. Ranks find the class by its name, so it must be importable (or stand in the script itself).
Read next: `config/schema.py` (every option), `train/loop.py`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from torch import nn

from heptad.axes.pipeline.legal import check_job
from heptad.config.load import load
from heptad.config.schema import Job
from heptad.errors import ConfigError
from heptad.launch import local
from heptad.models.resolve import resolve


class TrainingFailed(RuntimeError):
    """The job ended with an error or was stopped; the cause stands on stderr. `code`: `heptad train`'s exit code."""

    def __init__(self, code: int) -> None:
        super().__init__(f"training ended with exit code {code}; the cause stands above")
        self.code = code


def job(ref: str | Path | Job, model: type[nn.Module] | None = None, sets: Sequence[str] = ()) -> Job:
    """A checked and resolved job. `ref`: preset's name, TOML path or Job; `sets`: overrides such as "layout.zero=2".

    Raises ConfigError with every problem found.
    """
    if isinstance(ref, Job):
        if sets:
            raise ConfigError.of("sets", list(sets), "overrides apply to a file or a preset", "change the Job itself")
        found = ref
    else:
        found = load(os.fspath(ref), list(sets))
    if model is not None:
        section = found.model.model_copy(update={"class_": _path_of(model)})
        section.model_fields_set.add("class_")
        found = found.model_copy(update={"model": section})
    check_job(found)
    return resolve(found)


def train(
    ref: str | Path | Job,
    model: type[nn.Module] | None = None,
    sets: Sequence[str] = (),
    ledger: bool = False,
    trace: bool = False,
) -> None:
    """Train `ref` on local ranks (or as one rank of torchrun), as `heptad train` does; returns when it is done.

    model: a class to train instead of the decoder. ledger, trace: as the command line's. Raises ConfigError before any
    process starts, TrainingFailed when a rank failed or the job was stopped.
    """
    code = local.train(job(ref, model, sets), False, ledger, trace)
    if code:
        raise TrainingFailed(code)


def _path_of(model: type[nn.Module]) -> str:
    given: object = model
    if not (isinstance(given, type) and issubclass(given, nn.Module)):
        rule = "a model is a class (its values come from its specs, so an instance's would be lost)"
        raise ConfigError.of("model", given, rule, "pass the class: api.train(job, model=MyModel)")
    if "<locals>" in model.__qualname__ or "." in model.__qualname__:
        rule = "every rank imports the class by name, and one inside another scope has none"
        raise ConfigError.of("model", model.__qualname__, rule, "define the class at the top level of a module")
    return f"{model.__module__}:{model.__qualname__}"
