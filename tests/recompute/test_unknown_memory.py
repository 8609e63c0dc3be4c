"""Whose bytes of activations are not known: refused by name, not estimated."""

from __future__ import annotations

from typing import Any

import pytest
from tests.recompute.memory import memory_job

from heptad.config.schema import Job
from heptad.errors import ConfigError
from heptad.recompute.peak import alive
from heptad.recompute.sizes import Sizes
from heptad.schedule.action import parse_program

UNKNOWN: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "frozen": (dict(frozen=("blocks.0.*",)), {}, "what is frozen keeps less"),
    "fsdp2": ({}, dict(dp_shard=2, zero=3, engine="fsdp2", microbatches=2), "autograd keeps what torch's layers save"),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_job_whose_bytes_are_not_known_is_refused(name: str) -> None:
    model, job, why = UNKNOWN[name]
    with pytest.raises(ConfigError, match=why):
        Sizes.of(memory_job(model, **job), False)


def test_sides_that_run_in_turns_are_refused() -> None:
    """Each is half-way when the other ends: there is no moment between two actions."""
    job = memory_job({})
    with pytest.raises(ConfigError, match="two micro-batches that run in turns"):
        alive(Sizes.of(job, False), parse_program("0F0 1F0 2F0 3F0 3B0 2B0 & 0F1 1B0"))


def test_weights_that_are_kept_are_not_left_out() -> None:
    with pytest.raises(AssertionError, match="the schedule keeps weights, and their bytes are not given"):
        alive(Sizes.of(memory_job({}), False), parse_program("0F0 0K0 0V0 1F0"))


def test_every_reason_is_in_one_message() -> None:
    job = memory_job(dict(frozen=("blocks.0.*",)))
    offload = job.offload.model_copy(update={"activations": "cpu"})
    model = job.model.model_copy(update={"class_": "mine:Model"})
    with pytest.raises(ConfigError) as caught:
        Sizes.of(Job.model_construct(**{**dict(job), "offload": offload, "model": model}), False)
    assert [problem.field for problem in caught.value.problems] == [
        "model.class", "model.frozen", "offload.activations",
    ]  # fmt: skip
