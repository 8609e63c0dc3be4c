"""The benchmark harness: its arithmetic, contenders that train alike, a meter that sees what lives. No timing."""

from __future__ import annotations

import time

import pytest
import torch
from benchmarks.dtensor import TensorPeer
from benchmarks.lines import Row
from benchmarks.measure import ratio, upper_bound
from benchmarks.netbox import Netbox
from benchmarks.peers import Contender, Ours, Size, check, ddp, fsdp2, job_of, plain
from benchmarks.ranks import launch
from torch.distributed.tensor import DTensor

from benchmarks import loss, netbox, pipeline, run, tensor, waits
from heptad.mesh.collectives import Work
from heptad.mesh.meter import MemoryMeter, everything_alive

TINY = Size(layers=2, width=12, heads=2, mlp_width=23, vocab=37, seq_len=7)


def test_the_ratio_is_the_median_of_pairs_against_the_best_peer() -> None:
    launches = [{"ours": [1.0, 2.0, 3.0], "slow": [9.0, 9.0, 9.0], "fast": [2.0, 2.0, 2.0]}]
    found = ratio(launches, "ours", ["slow", "fast"])
    assert (found.value, found.ours_s, found.theirs_s, found.num_pairs) == (1.0, 2.0, 2.0, 3)
    assert found.value <= found.upper <= 1.5


def test_the_bound_of_equal_values_is_the_value_and_grows_with_spread() -> None:
    assert upper_bound([[0.9] * 5, [0.9] * 5]) == 0.9
    assert upper_bound([[0.8, 0.9, 1.0], [0.9, 1.0, 1.1]]) > upper_bound([[0.9, 0.91, 0.92], [0.9, 0.91, 0.92]])


@pytest.mark.parametrize(
    ("row", "holds"),
    [
        (Row("a", 0.9, 1.0, 1.04, 1.05), True),
        (Row("a", 0.9, 1.0, 1.06, 1.05), False),
        (Row("a", 1.1, 1.0), False),
        (Row("a", 1.1), None),
    ],
)
def test_a_row_holds_when_figure_and_bound_do(row: Row, holds: bool | None) -> None:
    assert row.holds is holds
    assert len(run.cells(row)) == 6


def test_a_part_measured_anew_leaves_the_pages_other_tables() -> None:
    first = run.page("", {"data": "old data", "pipeline": "old pipeline"})
    again = run.page(first, {"pipeline": "new pipeline", "step": "new step"})
    assert again == f"{run.HEADER}\n## data\nold data\n\n## pipeline\nnew pipeline\n\n## step\nnew step\n"


def _alike(rank: int) -> int:
    world = torch.distributed.get_world_size()
    sides: list[Contender] = [
        Ours(TINY, rank, job_of(TINY, world, 0, dp_replicate=world)),
        Ours(TINY, rank, job_of(TINY, world, 3), name="stage 3"),
        ddp(TINY, rank, 5),
        fsdp2(TINY, rank),
    ]
    check(sides)
    return len(sides)


def test_contenders_train_the_same_model() -> None:
    assert launch(2, _alike) == [4, 4]


CUTTABLE = Size(layers=2, width=12, heads=2, mlp_width=22, vocab=38, seq_len=6, sequences=2)


def _tensor_ranks_alike(rank: int) -> list[bool]:
    sides = [
        tensor.two_ranks(CUTTABLE, rank, "heptad"),
        tensor.two_ranks(CUTTABLE, rank, "cut", **tensor.CUT),
        tensor.two_ranks(CUTTABLE, rank, "kept", **tensor.KEPT),
        TensorPeer("dtensor", CUTTABLE, sequence=False),
        TensorPeer("dtensor, cut", CUTTABLE, sequence=True),
    ]
    check(sides)
    return [isinstance(param, DTensor) for side in sides[-2:] for param in (side.cut + side.whole)]


def test_heptad_and_dtensor_train_the_same_model_cut_over_two_ranks() -> None:
    for which in launch(2, _tensor_ranks_alike):
        linears, norms = 2 + 7 * CUTTABLE.layers, 1 + 2 * CUTTABLE.layers
        assert which == [True] * linears + [False] * norms + [True] * (linears + norms)


@pytest.mark.parametrize("sequence", [False, True])
def test_a_gpt_block_keeps_the_formulas_bytes_and_the_statistics(sequence: bool) -> None:
    """34/T and 10 + 24/T · B·L·D (arXiv 2205.05198, table 2), beside them fp32 statistics and the tape's anchor."""
    tokens = tensor.GPT.sequences * tensor.GPT.seq_len
    norms = 2 * 2 * 4 * (tokens // 4 if sequence else tokens)  # mean and 1/std of two norms
    attention = 4 * tokens * tensor.GPT.heads // 4  # log Σ exp of each head here
    formula = tokens * tensor.GPT.width * (34 if sequence else 4 * 10 + 24) // 4
    assert launch(4, tensor.block_bytes, sequence) == [formula + norms + attention + 4] * 4


def test_a_cut_vocabulary_in_chunks_takes_little_of_what_all_logits_take() -> None:
    ours, naive = loss.peak_bytes(num_tokens=256, width=8)
    assert ours <= 0.15 * naive


def test_waiting_is_timed_and_work_is_as_before() -> None:
    wait = Work.wait
    with tensor.waiting() as waited:
        Work(finish=lambda: time.sleep(0.01)).wait()
    assert waited.seconds >= 0.01 and Work.wait is wait


STAGED = Size(layers=4, width=12, heads=2, mlp_width=22, vocab=38, seq_len=6, sequences=2, microbatches=4)


def _pipelines_alike(rank: int, schedule: str) -> None:
    check(pipeline.Against(schedule)(rank, STAGED))


@pytest.mark.parametrize("schedule", list(pipeline.SCHEDULES))
def test_heptad_and_torch_train_the_same_model_under_one_schedule(schedule: str) -> None:
    launch(2, _pipelines_alike, schedule)


@pytest.mark.parametrize("schedule", waits.SCHEDULES)
def test_waits_run_every_schedule_and_wait_as_long_as_they_say(schedule: str) -> None:
    every = [waits.Waits(schedule, 2, 4, 0.002, 0.003, 0.001)]
    (seen,) = waits.measured(every, rounds=1)
    expected = every[0].simulated()
    assert seen.span_s >= expected.makespan and 0 < seen.idle + seen.own < 1
    least = {"F": 0.002, "B": 0.004, "I": 0.003, "W": 0.001}
    assert all(mean >= least[kind] for kind, mean in seen.means.items())
    slower = every[0].simulated_as({letter: 2 * seconds for letter, seconds in seen.means.items()}, 0.0)
    assert slower.makespan > expected.makespan


def test_without_work_between_them_messages_are_what_a_serial_step_does_not_hide() -> None:
    run = waits.Run(0.0, 4.0, {"F": [1.0, 1.0]}, 2.0)
    other = waits.Run(1.5, 3.5, {"F": [1.5]}, 0.25)
    seen = waits.Seen.of([run, other])
    assert seen.span_s == 4.0 and seen.idle == (2.0 + 2.0 + 0.25) / 8 and seen.own == pytest.approx(0.25 / 8)
    assert seen.means == {"F": 3.5 / 3} and seen.unhidden_s(2) == pytest.approx(0.5)


def _unlike(rank: int) -> None:
    check([Ours(TINY, rank, job_of(TINY, 1, 0)), plain(TINY.tokens(5))])


def test_a_contender_that_trains_something_else_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"rank 0 failed:(.|\n)*AssertionError"):
        launch(1, _unlike)


def test_the_meter_counts_live_storages_and_resizes_in_place() -> None:
    kept = torch.zeros(1000)
    with MemoryMeter(everything_alive()) as meter:
        before = meter.sample()
        big = torch.zeros(5000)
        view = big[:10]
        kept.untyped_storage().resize_(0)
        del big
        view += 1
        assert meter.sample() == before + 5000 * 4 - 1000 * 4
        del view
        assert meter.sample() == before - 1000 * 4
    assert meter.peak_bytes >= before + 5000 * 4


def test_without_root_or_tools_the_message_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(netbox.os, "geteuid", lambda: 1000)
    with pytest.raises(netbox.NoNetbox, match="needs root"), Netbox(2, "1gbit"):
        pass
    monkeypatch.setattr(netbox.os, "geteuid", lambda: 0)
    monkeypatch.setattr(netbox.shutil, "which", lambda tool: None)
    assert netbox.missing() == "a cluster in a box needs iproute2: ip and tc not found (package iproute2)"
