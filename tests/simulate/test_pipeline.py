"""The simulator against schedules timed by hand, published orders, and a second, slower simulator of its own rules."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heptad.axes.pipeline.generate import GENERATORS, generate
from heptad.errors import ConfigError
from heptad.schedule.action import Kind
from heptad.schedule.pipeline import Pair, Schedule, StageAction, parse_schedule, peak_live, singles
from heptad.simulate.pipeline import PairMode, SendMode, Simulation, simulate
from heptad.simulate.times import Links, Times

BACKWARDS = (Kind.BACKWARD, Kind.INPUT_GRAD)
PUBLISHED = [
    ("dualpipe", 4, 8, 26, 2),
    ("dualpipe", 8, 20, 66, 6),
    ("dualpipev", 4, 8, 54, 6),
    ("dualpipev", 4, 10, 66, 6),
]
"""(schedule, P, M, makespan, idle time of each rank) of the published program, F = I = W = 1, B = 2, F&B = 3."""


def spans(run: Simulation) -> dict[tuple[int, str], tuple[float, float]]:
    return {(event.rank, event.name): (event.start_s, event.end_s) for event in run.events()}


@pytest.mark.parametrize("published", PUBLISHED)
def test_published_orders_take_the_published_time(published: tuple[str, int, int, float, float]) -> None:
    """Under blocking sends too; live micro-batches are P + 1, of DualPipeV's half-size chunks 2P + 1."""
    name, num_ranks, num_microbatches, makespan, idle = published
    schedule = generate(name, num_ranks, None, num_microbatches)
    times = Times.uniform(schedule.num_stages)
    for run in (simulate(schedule, times, pairs=PairMode.BLOCK), simulate(schedule, times, sends=SendMode.RENDEZVOUS)):
        assert (run.makespan, run.idle) == (makespan, (idle,) * num_ranks)
        assert run.peak_live == (schedule.num_stages + 1,) * num_ranks
    early = simulate(schedule, times)
    assert early.idle == (idle / 2,) * num_ranks, "a pair that does not wait for its gradient idles half as long"


def test_two_stages_by_hand() -> None:
    schedule = parse_schedule("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1I1 1W1")
    times = Times.stages([1, 3], [2, 2], [1, 4], backward_s=[3, 5])
    run = simulate(schedule, times, Links.uniform(2, 0.5, 0.25))
    assert spans(run) == {
        (0, "0F0"): (0, 1), (0, "0F1"): (1, 2), (1, "1F0"): (1.75, 4.75), (1, "1B0"): (4.75, 9.75),
        (0, "0B0"): (10.5, 13.5), (1, "1F1"): (9.75, 12.75), (1, "1I1"): (12.75, 14.75), (1, "1W1"): (14.75, 18.75),
        (0, "0B1"): (15.5, 18.5), (0, "send 0F0"): (1, 1.75), (0, "send 0F1"): (2, 2.75),
        (1, "send 1B0"): (9.75, 10.5), (1, "send 1I1"): (14.75, 15.5),
    }  # fmt: skip
    assert run.makespan == 18.75 and run.idle == (10.75, 1.75) and run.idle_fraction == 12.5 / 37.5
    assert run.peak_live == (2, 1)


def test_messages_of_a_link_leave_one_after_the_other_and_the_ranks_compute() -> None:
    schedule = parse_schedule("0F0 0F1 0F2\n1F0 1F1 1F2")
    run = simulate(schedule, Times.uniform(2), Links.uniform(2, 4.0, 1.0))
    assert [spans(run)[1, f"1F{m}"] for m in range(3)] == [(6, 7), (10, 11), (14, 15)]
    assert spans(run)[0, "0F2"] == (2, 3)


def test_under_rendezvous_a_second_send_waits_for_the_first() -> None:
    schedule = parse_schedule("0F0 0F1 0F2 0F3\n1F0 1F1 1F2 1F3")
    times = Times.stages([1, 10], [1, 1], [1, 1])
    run = simulate(schedule, times, Links.uniform(2, 0.5), sends=SendMode.RENDEZVOUS)
    found = spans(run)
    assert [found[1, f"1F{m}"] for m in range(4)] == [(1.5, 11.5), (12, 22), (22.5, 32.5), (33, 43)]
    # 0F1 is posted at 2.5 (0F0 had arrived at 1.5); 0F2's message waits until 0F1's has arrived at 12.
    assert [found[0, f"0F{m}"] for m in range(4)] == [(0, 1), (1, 2), (2, 3), (12, 13)]


def test_an_early_pair_starts_its_forward_and_waits_for_the_gradient() -> None:
    """Rank 0 pairs 0F1 with 0B0, whose gradient is there at 1 + 1 + 3 = 5."""
    schedule = parse_schedule("0F0 0F1&0B0 0B1\n1F0 1B0 1F1 1B1")
    times = Times.uniform(2, f=1, i=1, w=2, pair=3.5)
    early, block = (simulate(schedule, times, pairs=mode) for mode in (PairMode.EARLY, PairMode.BLOCK))
    assert spans(early)[0, "0F1"] == (1, 2) and spans(early)[0, "0B0"] == (5, 8)
    assert spans(early)[1, "1F1"] == (5, 6)
    assert spans(block)[0, "0F1&0B0"] == (5, 8.5) and spans(block)[1, "1F1"] == (8.5, 9.5)
    assert early.idle == (early.makespan - 8, early.makespan - 8) and block.idle[0] == block.makespan - 7.5


@pytest.mark.parametrize(("backward_s", "end_s"), [(1, 8), (2, 8.5), (3, 9), (4, 10)])
def test_a_pair_hides_what_its_sides_run_together(backward_s: float, end_s: float) -> None:
    """F = 2, B = 3, F&B = 4: the pair starts at 4, its gradient comes at 3 + `backward_s`; what of F follows counts."""
    schedule = parse_schedule("0F0 0F1 0F2&0B0\n1F0 1B0")
    times = Times.stages([2, 1], [1, 1], [2, 0], backward_s=[3, backward_s], hidden_s=1)
    run = simulate(schedule, times)
    assert run.ends[0][-1] == end_s and run.idle[0] == run.makespan - (end_s - max(0, backward_s - 3))
    assert simulate(schedule, times, pairs=PairMode.BLOCK).ends[0][-1] == max(4, 3 + backward_s) + 4


@pytest.mark.parametrize("sends", SendMode)
def test_a_deadlock_is_named(sends: SendMode) -> None:
    schedule = parse_schedule("0F0 0B0 0F1 0B1\n1F1 1B1 1F0 1B0")
    here, there = ("rank 0 before 0B0 waits for the backward of stage 1 on micro-batch 0 of rank 1",
                   "rank 1 before 1F1 waits for the forward of stage 0 on micro-batch 1 of rank 0")  # fmt: skip
    with pytest.raises(ConfigError, match=f"{here}; {there}"):
        simulate(schedule, Times.uniform(2), sends=sends)
    with pytest.raises(ConfigError, match=r"never comes.*which no rank runs"):
        simulate(parse_schedule("0F0 0B0\n2F0 2B0"), Times.uniform(3), sends=sends)


def test_messages_taken_in_another_order_than_sent_hang_only_a_rendezvous() -> None:
    schedule = parse_schedule("0F0 0F1 0B0 0B1\n1F1 1F0 1B0 1B1")
    assert simulate(schedule, Times.uniform(2)).makespan == 10
    with pytest.raises(ConfigError, match=r"rank 0 before sending 0F1 waits for the receipt of the forward of stage 0"):
        simulate(schedule, Times.uniform(2), sends=SendMode.RENDEZVOUS)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("0F0 0F0", "rank 0 cannot run 0F0: it runs a second time"),
        ("0F0 0B0\n0F0 0B0", r"first on rank 0"),
        ("0B0 0F0", "0F0 has not run on this rank before it"),
        ("0F0\n0B0", "rank 1 cannot run 0B0: 0F0 has not run on this rank"),
        ("0F0 0W0 0I0", "0I0 has not run before it"),
        ("0F0 0I0 0B0", "has already run"),
        ("0F0 0B0 0W0", "has already run"),
    ],
)
def test_a_line_that_cannot_run_is_refused(text: str, why: str) -> None:
    schedule = parse_schedule(text)
    with pytest.raises(ConfigError, match=why):
        simulate(schedule, Times.uniform(schedule.num_stages))


def naive_times(schedule: Schedule, times: Times, block: bool) -> dict[str, tuple[float, float]]:
    """Another way to the same: the times of all actions from zero, corrected until nothing changes."""
    last = schedule.num_stages - 1
    found: dict[str, tuple[float, float]] = {}
    backward = {
        (a.stage, a.microbatch): str(a) for line in schedule.lines for a in singles(line) if a.kind in BACKWARDS
    }

    def there(action: StageAction) -> float:
        if (
            action.kind is Kind.WEIGHT_GRAD
            or (action.kind is Kind.FORWARD and action.stage == 0)
            or (action.kind in BACKWARDS and action.stage == last)
        ):
            return 0.0
        source = (
            f"{action.stage - 1}F{action.microbatch}"
            if action.kind is Kind.FORWARD
            else backward[action.stage + 1, action.microbatch]
        )
        return found.get(source, (0.0, 0.0))[1]

    while True:
        before = dict(found)
        for line in schedule.lines:
            now = 0.0
            for step in line:
                sides = (step.forward, step.backward) if isinstance(step, Pair) else (step,)
                seconds = [times.of(side.kind.value, side.stage) for side in sides]
                if block and len(sides) == 2:
                    start = max(now, *map(there, sides))
                    now = start + sum(seconds)
                    found |= {str(side): (start, now) for side in sides}
                    continue
                for side, long in zip(sides, seconds, strict=True):
                    start = max(now, there(side))
                    now = start + long
                    found[str(side)] = (start, now)
        if found == before:
            return found


@settings(max_examples=60)
@given(
    st.sampled_from(sorted(set(GENERATORS) - {"naive"})), st.integers(1, 3), st.integers(0, 7), st.booleans(),
    st.lists(st.integers(0, 5), min_size=36, max_size=36),
)  # fmt: skip
def test_uneven_stages_equal_the_slow_way(name: str, half: int, more: int, block: bool, numbers: list[int]) -> None:
    schedule = generate(name, 2 * half, None, 4 * half + 2 * more)
    rows = [numbers[at : at + schedule.num_stages] for at in (0, 12, 24)]
    times = Times.stages(*([float(value) for value in row] for row in rows))
    run = simulate(schedule, times, pairs=PairMode.BLOCK if block else PairMode.EARLY)
    expected = naive_times(schedule, times, block)
    got: dict[str, tuple[float, float]] = {}
    for rank, codes in enumerate(run.lines.codes):
        for at, code in enumerate(codes):
            got[run.lines.name(code)] = (run.starts[rank][at], run.ends[rank][at])
    assert got == expected
    assert run.peak_live == peak_live(schedule)
    work = [sum(times.of(a.kind.value, a.stage) for a in singles(line)) for line in schedule.lines]
    assert run.idle == pytest.approx([run.makespan - value for value in work])


@pytest.mark.parametrize("name", sorted(GENERATORS))
@pytest.mark.parametrize("comm", [0.0, 0.1, 2.0])
def test_every_schedule_passes_a_rendezvous_and_is_no_faster_there(name: str, comm: float) -> None:
    for num_ranks, num_microbatches in ((2, 4), (4, 8), (4, 16), (6, 12)):
        schedule = generate(name, num_ranks, None, num_microbatches)
        times, links = Times.uniform(schedule.num_stages), Links.uniform(schedule.num_stages, comm)
        posted = simulate(schedule, times, links, pairs=PairMode.BLOCK)
        met = simulate(schedule, times, links, sends=SendMode.RENDEZVOUS)
        assert met.makespan >= posted.makespan
        assert simulate(schedule, times, links).makespan <= posted.makespan
        assert len(met.sent) == len(posted.sent) and bool(posted.sent) == (comm > 0 and num_ranks > 1)


def test_interleaved_rounds_longer_than_p_need_more_than_one_message_a_channel() -> None:
    schedule = generate("interleaved", 4, 2, 14)
    assert simulate(schedule, Times.uniform(8)).idle == (9,) * 4
    with pytest.raises(ConfigError, match="rank 0 before sending"):
        simulate(schedule, Times.uniform(8), sends=SendMode.RENDEZVOUS)


def test_links_that_take_no_time() -> None:
    assert Links.uniform(3).free and not Links.uniform(3, 0, 1e-6).free
