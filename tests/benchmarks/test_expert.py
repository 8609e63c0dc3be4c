"""The lines of the expert axis at tiny sizes: contenders that compute the same, counted rows, arithmetic. No timing."""

from __future__ import annotations

import math

import pytest
import torch
from benchmarks.expert import Crossing, grouped_products, levels, mixed, no_gpu, sent
from benchmarks.lines import Effort
from benchmarks.peers import Size, job_of
from benchmarks.ranks import launch
from benchmarks.turns import Mixture, both

from benchmarks import run
from heptad.account.parameters import multiplying

TINY = Mixture(layers=4, width=8, experts=4, tokens=6, microbatches=4, sleep=1.0)
SMALL = Crossing(experts=8, choices=3, width=6, tokens=5)


def _both(rank: int) -> list[int]:
    return [sum(str(action) == "&" for action in side.trainer.program) for side in both(rank, TINY)]  # type: ignore[attr-defined]


def test_a_step_in_turns_trains_as_one_after_the_other() -> None:
    """Bit for bit (`check` inside), with a pair of units for each & of the program."""
    for in_turns, one_by_one in launch(4, _both):
        assert in_turns > 0 and one_by_one == 0


def test_the_prediction_is_that_pairs_hide_their_transfers() -> None:
    mixture = Mixture()
    hidden = mixture.predicted_s(False) - mixture.predicted_s(True)
    assert 0 < hidden <= mixture.microbatches * mixture.layers * 4 * mixture.travel_s
    assert mixture.predicted_s(True) / mixture.predicted_s(False) < 0.85


def _levels(rank: int) -> list[str]:
    return [side.name for side in levels(rank, SMALL)]


def test_one_level_and_two_compute_the_same_and_rows_are_counted() -> None:
    assert launch(4, _levels) == [["one level", "two levels"]] * 4
    one, two = (launch(4, sent, SMALL, inner, 1) for inner in (1, 2))
    assert one == two
    assert all(few <= SMALL.tokens and few <= many <= SMALL.tokens * SMALL.choices for many, few in one)
    chosen = torch.tensor([[0, 4, 5], [1, 2, 3], [5, 6, 7]])
    assert SMALL.crossing(0, chosen) == (5, 2) and SMALL.crossing(2, chosen) == (4, 2)
    assert math.isclose(Crossing().beside, 8 * 12 / (16 * 1024))


def test_a_mixture_has_the_dense_models_active_flops_but_for_its_router() -> None:
    size = Size(layers=2, width=12, heads=2, mlp_width=22, vocab=38, seq_len=6)
    job = mixed(size)
    assert job.model.expert_width == 11 and job.model.experts == 8
    dense = job_of(size, 1, 0).model
    assert multiplying(job.model) - multiplying(dense) == size.layers * size.width * 8


def test_what_needs_a_gpu_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert no_gpu() == "it needs CUDA"
    rows, missing = run.measured(["expert-grouped"], Effort(1, 1, 1))
    assert rows == [] and missing == "\nNot measured (it needs CUDA): expert-grouped.\n"
    assert capsys.readouterr().err == "expert-grouped: not measured: it needs CUDA\n"


@pytest.mark.gpu
def test_grouped_products_on_a_gpu() -> None:
    assert all(row.value > 0 for row in grouped_products(Effort(1, 1, 1)))
