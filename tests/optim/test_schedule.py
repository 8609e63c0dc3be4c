"""Learning rate as a pure function of the step."""

from __future__ import annotations

import itertools
import math

import pytest
from tests.optim.fixtures import section

from heptad.config.optimizer import problems
from heptad.optim.schedule import lr_at, past_end

KINDS = ("cosine", "linear", "wsd", "constant")


@pytest.mark.parametrize("kind", KINDS)
def test_c_112_first_step_moves_the_weights(kind: str) -> None:
    warm = section(schedule=kind, lr=1.0, warmup_steps=4)
    assert [lr_at(warm, step, 10) for step in range(1, 5)] == [0.25, 0.5, 0.75, 1.0]
    assert lr_at(section(schedule=kind, lr=1.0), 1, 10) == 1.0


@pytest.mark.parametrize("kind", KINDS)
def test_c_113_total_on_every_legal_setting(kind: str) -> None:
    checked = 0
    for steps in range(1, 6):
        for warmup, decay, ratio in itertools.product((0, 1, steps), (None, 0, 1, steps), (0.0, 0.1, 1.0)):
            tried = section(schedule=kind, lr=2.0, warmup_steps=warmup, decay_steps=decay, min_lr_ratio=ratio)
            for step in range(1, steps + 3):
                lr = lr_at(tried, step, steps)
                low = 2.0 * step / warmup if step <= warmup else 2.0 * ratio
                assert math.isfinite(lr) and low <= lr <= 2.0, (tried, step, lr)
                checked += 1
    assert checked > 500


def test_c_113_warmup_longer_than_the_job_is_refused() -> None:
    (problem,) = list(problems(section(warmup_steps=6), 5))
    assert problem.field == "optimizer.warmup_steps" and "5" in problem.fix


@pytest.mark.parametrize("kind", KINDS)
def test_c_114_past_the_end_is_stated(kind: str) -> None:
    tried = section(schedule=kind, lr=1.0)
    assert past_end(tried, 10, 10) is None
    warning = past_end(tried, 11, 10)
    lr = lr_at(tried, 11, 10)
    assert warning is not None and f"{lr:g}" in warning and "step 11" in warning
    assert lr == lr_at(tried, 15, 10) == (1.0 if kind == "constant" else pytest.approx(0.1))


def test_shapes_of_the_curves() -> None:
    cosine, linear = section(lr=1.0, schedule="cosine", min_lr_ratio=0.2), section(lr=1.0, schedule="linear")
    assert lr_at(cosine, 6, 11) == pytest.approx(0.6) and lr_at(cosine, 11, 11) == pytest.approx(0.2)
    assert lr_at(linear, 6, 11) == pytest.approx(0.55) and lr_at(linear, 11, 11) == pytest.approx(0.1)
    wsd = section(lr=1.0, schedule="wsd", warmup_steps=2, decay_steps=4, min_lr_ratio=0.0)
    got = [lr_at(wsd, step, 10) for step in range(1, 11)]
    assert got == pytest.approx([0.5, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0])
    short = section(lr=1.0, schedule="linear", decay_steps=2, min_lr_ratio=0.5)
    assert [lr_at(short, step, 6) for step in range(1, 7)] == pytest.approx([1, 0.75, 0.5, 0.5, 0.5, 0.5])
