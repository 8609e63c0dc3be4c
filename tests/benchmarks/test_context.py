"""The lines of the context axis at tiny sizes: contenders that compute the same, exact bytes, the arithmetic. No
timing."""

from __future__ import annotations

import math

import pytest
from benchmarks.attention import Case, Compute, Side, Transfer, alike
from benchmarks.context import Slope
from benchmarks.peers import Size
from benchmarks.ranks import launch
from benchmarks.torchcp import refusal

from benchmarks import context, ringlink, run

TINY = Size(layers=2, width=12, heads=2, mlp_width=23, vocab=37, seq_len=24)


def test_a_slope_is_the_power_and_its_bound_grows_with_what_does_not_fit() -> None:
    lengths = (2, 4, 8, 16)
    exact = Slope.of(lengths, [3 * n**2 for n in lengths])
    assert exact.value == pytest.approx(2) and exact.upper == pytest.approx(2)
    rough = Slope.of(lengths, [3 * n**2 * (1.1 if n == 4 else 1) for n in lengths])
    assert rough.upper is not None and rough.upper > rough.value
    assert Slope.of((2, 4), [1, 8]) == Slope(pytest.approx(3), None)


def test_one_rank_holds_eight_tensors_and_statistics_at_its_peak() -> None:
    """q, k, v, out, their gradients, and log Σ exp of each query."""
    (seen,) = launch(1, context.attention_seen, Case(64), 1)
    assert seen.peak_bytes == 4 * (8 * 64 * 32 + 64) and seen.seconds > 0


@pytest.mark.parametrize("degree", [2, 4])
def test_a_rings_peak_grows_with_its_share_of_the_length(degree: int) -> None:
    (short, long), *_ = launch(degree, context.sweep, (256, 512))
    assert Slope.of((256, 512), [short.peak_bytes, long.peak_bytes]).value == pytest.approx(1, abs=0.01)


def test_a_steps_peak_falls_with_the_degree() -> None:
    whole, cut = (launch(degree, context.step_peak, TINY.tokens(256))[0] for degree in (1, 2))
    assert cut < whole


@pytest.mark.parametrize("degree", [2, 4])
def test_every_way_and_torchs_ring_compute_the_same_and_both_orders_train_alike(degree: int) -> None:
    times = [
        *launch(degree, context.timed_ways, Case(32, heads=4, kv_heads=4), 1),
        *launch(degree, context.timed_torch, Case(32, heads=2, kv_heads=2), 1),
        *launch(degree, context.timed_splits, TINY, 1),
    ]
    assert all(len(seconds) == 1 for found in times for seconds in found.values())
    assert set(times[0]) >= {"ring", "ulysses", "gather"} and set(times[degree]) == {"heptad", "allgather", "alltoall"}


def _unlike(rank: int) -> None:
    side, other = Side(rank, Case(32), "ring"), Side(rank, Case(32), "other")
    other.dout = other.dout * 1.01
    alike([side, other])


def test_a_side_that_computes_something_else_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"AssertionError: \('other', 'dq'"):
        launch(2, _unlike)


def test_torchs_own_call_says_why_it_does_not_run_on_cpu_ranks() -> None:
    """When this fails because torch runs, the line compares with what it runs in place of its private ring."""
    assert launch(2, refusal) == [
        "NotImplementedError: Operator aten._scaled_dot_product_flash_attention_for_cpu.default does not have a "
        "sharding strategy registered."
    ] * 2  # fmt: skip


def test_blocks_that_run_are_balanced_as_planned() -> None:
    rows = context.balance(run.Effort(1, 1, 1), run=512, plan=2048)
    assert len(rows) == 4 and all(row.holds for row in rows)
    assert all(sum(context.packed(512, seed)) == 512 for seed in range(4))
    (flops,) = launch(1, context.counted, [Case(64)])
    assert flops == [0]  # a rank without the axis runs no blocks
    flops = launch(2, context.counted, [Case(64)])
    assert flops[0] == flops[1] and sum(one[0] for one in flops) == 2 * 32 * 7 * 64 * 65 // 2


def _parts(rank: int) -> list[int]:
    case, sent = Case(64), []
    for kind in (Side, Compute, Transfer):
        side = kind(rank, case, "part")
        side.mesh.ledger.reset()
        side.step(0)
        sent.append(sum(transfer.num_bytes for transfer in side.mesh.ledger.transfers()))
    return sent


def test_messages_alone_send_what_the_ring_sends_and_compute_alone_nothing() -> None:
    for degree in (2, 4):
        for ring, compute, transfer in launch(degree, _parts):
            assert ring == transfer == ringlink.sent_bytes(Case(64), degree) and compute == 0


def test_a_ring_beside_its_bounds_gives_a_row_with_the_prediction() -> None:
    runs = launch(2, ringlink.against_bounds, Case(64), 2)[:1]
    row = ringlink.row(Case(64), runs, 1.10)
    assert len(runs[0]["bound"]) == 2 and math.isfinite(row.value) and "by formula 0.02 MB" in row.note


def test_a_ring_of_two_hides_all_where_compute_is_seven_thirds_of_transfer() -> None:
    assert ringlink.predicted(7.0, 3.0) == pytest.approx(7.0)
    assert ringlink.predicted(1.0, 1.0) == pytest.approx(1.5)
    assert ringlink.predicted(0.0, 3.0) == pytest.approx(3.0)
