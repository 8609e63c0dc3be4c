"""Every generator over (P, V, M): complete, no deadlock with blocking sends, alive and idle as the formulas say."""

from __future__ import annotations

from time import process_time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.axes.pipeline.legal import Case, cases, small
from tests.schedule.messages import check_messages, with_messages

from heptad.axes.pipeline.formulas import FORMULAS, Chunk
from heptad.axes.pipeline.generate import GENERATORS, claimed_live, generate
from heptad.axes.pipeline.generators.pipedream import versions
from heptad.schedule.action import Kind
from heptad.schedule.pipeline import format_schedule, parse_schedule, peak_live, placement, singles
from heptad.schedule.pipeline_check import check_schedule
from heptad.simulate.pipeline import PairMode, simulate
from heptad.simulate.times import Times


def prove(case: Case) -> None:
    """Complete, in order, without deadlock, with exactly the claimed micro-batches alive; the text form round-trips."""
    name, num_ranks, chunks, num_microbatches = case
    schedule = generate(*case)
    claim = claimed_live(*case)
    assert claim is not None
    check_schedule(schedule, claim)
    assert peak_live(schedule) == claim == tuple(published(name, num_ranks, chunks, num_microbatches))
    check_messages(with_messages(schedule))
    again = parse_schedule(format_schedule(schedule), name)
    assert (again.lines, again.num_stages, again.num_microbatches) == (
        schedule.lines,
        schedule.num_stages,
        schedule.num_microbatches,
    )
    assert placement(schedule) == holders(name, num_ranks, chunks)


def published(name: str, num_ranks: int, chunks: int, num_microbatches: int) -> list[int]:
    """Chunks alive by the papers' formulas, written again, with the round m where interleaved 1F1B's has P."""
    p, v, m = num_ranks, chunks, num_microbatches
    longest = -(-m // max(1, m // p))
    each = {
        "naive": lambda r: v,
        "gpipe": lambda r: v * m,
        "1f1b": lambda r: min(m, p - r),
        "pipedream": lambda r: min(m, p - r),
        "interleaved": lambda r: min(v * m, 2 * (p - r - 1) + (v - 1) * longest + 1),
        "zbh1": lambda r: min(v * m, p + (v - 1) * longest),
        "zbv": lambda r: min(2 * m, 2 * p, m + r + 1),
        "dualpipe": lambda r: p + 1,
        "dualpipev": lambda r: 2 * p + 1,
    }[name]
    if name == "interleaved" and m % p == 0:
        assert longest == p  # then it is Megatron's formula to the letter
    return [each(rank) for rank in range(p)]


def holders(name: str, num_ranks: int, chunks: int) -> tuple[tuple[int, ...], ...]:
    """Looped, V-shaped, or both ways."""
    ranks = tuple(range(num_ranks))
    if name == "dualpipe":
        return (ranks, ranks[::-1])
    return (ranks + ranks[::-1],) if name in ("zbv", "dualpipev") else (ranks * chunks,)


@pytest.mark.parametrize("name", sorted(GENERATORS))
def test_every_small_size(name: str) -> None:
    for case in small(ranks=5, microbatches=11):
        if case[0] == name:
            prove(case)


@pytest.mark.parametrize("name", sorted(GENERATORS))
@given(st.data())
@settings(max_examples=6)
def test_any_size(name: str, data: st.DataObject) -> None:
    prove(data.draw(cases(name, actions=1500)))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(GENERATORS))
@given(st.data())
@settings(max_examples=25)
def test_any_size_at_length(name: str, data: st.DataObject) -> None:
    prove(data.draw(cases(name)))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["1f1b", "zbh1", "dualpipe"])
def test_512_ranks_and_2048_micro_batches_are_proven_in_seconds(name: str) -> None:
    start_s = process_time()
    check_schedule(generate(name, 512, None, 2048), claimed_live(name, 512, None, 2048))
    assert process_time() - start_s < 60  # 6 to 9 on an idle core


def idle_is_exact(case: Case, f: int, i: int, w: int) -> bool:
    """The simulated idle time equals the formula on every rank; False where the formula claims nothing."""
    name, num_ranks, chunks, num_microbatches = case
    at = Chunk(f, i, w, i + w, f + i + w)
    if not FORMULAS[name].exact(num_ranks, chunks, num_microbatches, at):
        return False
    run = simulate(generate(*case), Times.uniform(num_ranks * chunks, f, i, w), pairs=PairMode.BLOCK)
    assert run.idle == (FORMULAS[name].idle_s(num_ranks, chunks, num_microbatches, at),) * num_ranks
    return True


@pytest.mark.parametrize("name", sorted(GENERATORS))
@given(st.data(), st.integers(1, 5), st.integers(0, 5))
@settings(max_examples=6)
def test_idle_time_of_any_size(name: str, data: st.DataObject, forward: int, weight: int) -> None:
    """F = I >= W and F = I = W, in which every formula claims something for enough micro-batches."""
    case = data.draw(cases(name, actions=1500))
    exact = [idle_is_exact(case, forward, forward, time) for time in (min(forward, weight), forward)]
    assert exact[1] or case[3] < 2 * case[1] - 1


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(GENERATORS))
@given(st.data(), st.integers(1, 7), st.integers(1, 7), st.integers(0, 7))
@settings(max_examples=100)
def test_idle_time_of_any_size_at_length(
    name: str, data: st.DataObject, forward: int, inputs: int, weight: int
) -> None:
    case = data.draw(cases(name))
    for times in ((forward, inputs, weight), (forward, forward, min(forward, weight)), (forward, forward, forward)):
        idle_is_exact(case, *times)


@given(st.integers(1, 12), st.integers(6, 40))
@settings(max_examples=20)
def test_dualpipe_is_two_dualpipev_and_its_mirror(num_ranks: int, num_microbatches: int) -> None:
    """DualPipe(2P, 2M) on rank r < P is DualPipeV(P, M) on rank r; rank 2P-1-r is rank r with directions swapped."""
    num_microbatches = max(num_microbatches, 2 * num_ranks)
    both = generate("dualpipe", 2 * num_ranks, None, 2 * num_microbatches).lines
    half = generate("dualpipev", num_ranks, None, num_microbatches).lines
    last = 2 * num_ranks - 1
    for rank in range(num_ranks):
        # The stages have the same numbers: r and 2P-1-r. The second direction counts from M.
        plain = [(a.stage, a.kind, a.microbatch % num_microbatches) for a in singles(both[rank])]
        assert plain == [(a.stage, a.kind, a.microbatch) for a in singles(half[rank])]
        assert [str(step).count("&") for step in both[rank]] == [str(step).count("&") for step in half[rank]]
        swapped = [
            (a.stage, a.kind, (a.microbatch + num_microbatches) % (2 * num_microbatches)) for a in singles(both[rank])
        ]
        assert swapped == [(a.stage, a.kind, a.microbatch) for a in singles(both[last - rank])]
        for action in singles(both[rank]):
            assert action.stage == (rank if action.microbatch < num_microbatches else last - rank)


@given(st.integers(1, 8), st.integers(1, 40))
@settings(max_examples=20)
def test_pipedream_is_stale_by_the_ranks_that_follow(num_ranks: int, num_microbatches: int) -> None:
    for rank, line in enumerate(generate("pipedream", num_ranks, None, num_microbatches).lines):
        used = versions(line)
        assert used == {m: max(0, m - (num_ranks - rank - 1)) for m in range(num_microbatches)}
        kept, most = set[int](), 0
        for action in singles(line):  # versions that some micro-batch alive still needs
            update = kept.add if action.kind is Kind.FORWARD else kept.remove
            update(action.microbatch)
            most = max(most, len(kept))
        assert most == min(num_microbatches, num_ranks - rank)
    assert generate("pipedream", 3, None, 4).lines == generate("1f1b", 3, None, 4).lines


def test_known_orders() -> None:
    assert format_schedule(generate("naive", 2, None, 2)).splitlines() == ["0F0 0B0 0F1 0B1", "1F0 1B0 1F1 1B1"]
    assert format_schedule(generate("gpipe", 1, 2, 2)) == "0F0 0F1 1F0 1F1 1B0 1B1 0B0 0B1"
    assert format_schedule(generate("1f1b", 2, None, 3)).splitlines()[0] == "0F0 0F1 0B0 0F2 0B1 0B2"
    assert format_schedule(generate("zbh1", 2, None, 3)).splitlines()[1] == "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2"
    assert format_schedule(generate("dualpipe", 2, None, 4)).splitlines() == [
        "0F0 1F2 0F1 1B2 1F3&0B0 1B3 0I1 0W1",
        "0F2 1F0 0F3 1B0 1F1&0B2 1B1 0I3 0W3",
    ]
