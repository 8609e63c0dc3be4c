"""The global order: permutations, epochs, mixtures. Needs numpy only."""

from __future__ import annotations

import itertools
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heptad.loader.order import CYCLE, GlobalOrder, Origin, SourceShare, epoch_order, permuted, rank_slots, shares


def one(num_samples: int, seed: int = 0, shuffle: bool = True) -> GlobalOrder:
    return GlobalOrder([SourceShare("data", num_samples)], seed, shuffle)


def read(order: GlobalOrder, start: int, stop: int) -> list[int]:
    return order.read(np.arange(start, stop)).sample.tolist()


@given(size=st.integers(1, 700), key=st.text(max_size=5))
def test_a_permutation_holds_every_entry_once(size: int, key: str) -> None:
    assert sorted(permuted(np.arange(size), size, key).tolist()) == list(range(size))


@given(size=st.integers(1, 10**15), data=st.data())
def test_any_entry_of_a_huge_permutation_comes_by_itself(size: int, data: st.DataObject) -> None:
    places = np.asarray(data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=20, unique=True)))
    together = permuted(places, size, "k")
    assert together.min() >= 0 and together.max() < size and len(set(together.tolist())) == len(places)
    assert [int(permuted(places[i : i + 1], size, "k")[0]) for i in range(len(places))] == together.tolist()


def test_permutations_are_close_to_uniform() -> None:
    """Each of 24 orders of 4 within 5 sigma of its share; over 97 samples the mean of the first is the middle."""
    counts: dict[tuple[int, ...], int] = {}
    for number in range(2400):
        order = tuple(permuted(np.arange(4), 4, f"{number}").tolist())
        counts[order] = counts.get(order, 0) + 1
    assert len(counts) == 24 and max(abs(count - 100) for count in counts.values()) < 5 * 100**0.5
    firsts = [int(permuted(np.zeros(1, dtype=np.int64), 97, f"{number}")[0]) for number in range(2000)]
    assert abs(np.mean(firsts) - 48) < 5 * 28 / 2000**0.5


@settings(max_examples=60)
@given(
    num_samples=st.integers(1, 60),
    per_rank=st.integers(1, 4),
    data_ranks=st.integers(1, 5),
    epochs=st.integers(1, 4),
    seed=st.integers(0, 3),
    resume_at=st.integers(0, 10),
)
def test_every_sample_once_an_epoch_for_any_ranks_and_any_resume(
    num_samples: int, per_rank: int, data_ranks: int, epochs: int, seed: int, resume_at: int
) -> None:
    batch = per_rank * data_ranks
    steps = -(-num_samples * epochs // batch)
    order = one(num_samples, seed)
    stream: list[int] = []
    for step in range(steps):
        parts = [rank_slots(batch, rank, data_ranks) for rank in range(data_ranks)]
        slots = [slot for part in parts for slot in part]
        assert slots == list(range(batch))  # disjoint, complete, in order
        if step == resume_at:
            order = one(num_samples, seed)
        for part in parts:
            stream += read(order, step * batch + part.start, step * batch + part.stop)
    assert stream == read(one(num_samples, seed), 0, steps * batch)  # the same for any number of ranks
    for epoch in range(epochs):
        assert sorted(stream[epoch * num_samples : (epoch + 1) * num_samples]) == list(range(num_samples))


def test_epochs_differ_and_an_unshuffled_order_does_not() -> None:
    order = one(101)
    assert read(order, 0, 101) != read(order, 101, 202)
    assert read(one(101, seed=1), 0, 101) != read(order, 0, 101)
    assert read(one(5, shuffle=False), 3, 12) == [3, 4, 0, 1, 2, 3, 4, 0, 1]
    assert epoch_order(np.asarray([7, 1]), 5, "x", shuffle=False).tolist() == [2, 1]


def test_c_131_partition_is_disjoint_and_complete_and_agreed_by_all_ranks() -> None:
    """4 shards, 2 ranks; every rank builds its own order from the job alone."""
    seen = [read(one(4), rank_slots(4, rank, 2).start, rank_slots(4, rank, 2).stop) for rank in range(2)]
    assert sorted(seen[0] + seen[1]) == [0, 1, 2, 3]


def test_c_133_samples_that_share_a_step_change_between_epochs() -> None:
    order, pairs = one(8), []
    for epoch in range(3):
        steps = [read(order, epoch * 8 + start, epoch * 8 + start + 2) for start in range(0, 8, 2)]
        pairs.append({frozenset(step) for step in steps})
    assert all(a != b for a, b in itertools.combinations(pairs, 2))


def test_c_139_a_resume_on_other_ranks_drops_a_prefix_of_the_global_order() -> None:
    """24 samples, 8 consumed on 2 ranks (batch 4); on 3 ranks (batch 3) the other 16 come once before a repeat."""
    order = one(24)
    before = [i for step in range(2) for r in range(2) for i in read(order, step * 4 + r * 2, step * 4 + r * 2 + 2)]
    after = [
        i for step in range(6) for rank in range(3) for i in read(one(24), 8 + step * 3 + rank, 9 + step * 3 + rank)
    ]
    assert sorted(before + after[:16]) == list(range(24))


@given(weights=st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=20))
def test_shares_fill_the_cycle_and_follow_the_weights(weights: list[float]) -> None:
    counts = shares(weights)
    assert counts.sum() == CYCLE and counts.min() >= 1
    exact = np.asarray(weights) / sum(weights) * CYCLE
    assert np.abs(counts - exact).max() <= 1 + len(weights)


@settings(max_examples=20)
@given(
    sizes=st.lists(st.integers(1, 40), min_size=2, max_size=4),
    weights=st.lists(st.floats(0.1, 5), min_size=4, max_size=4),
    new_weights=st.lists(st.floats(0.1, 5), min_size=4, max_size=4),
    stop=st.integers(0, 300),
)
def test_c_143_a_mixture_changes_at_resume_without_repeating(
    sizes: list[int], weights: list[float], new_weights: list[float], stop: int
) -> None:
    names = [f"s{i}" for i in range(len(sizes))]
    before = GlobalOrder([SourceShare(*facts) for facts in zip(names, sizes, weights, strict=False)], seed=5)
    origin = Origin(stop, tuple(before.consumed(stop).items()))
    after = GlobalOrder(
        [SourceShare(*facts) for facts in zip(names, sizes, new_weights, strict=False)], 5, True, origin
    )
    first, second = before.read(np.arange(stop)), after.read(np.arange(stop, stop + 400))
    reads: list[list[int]] = [[] for _ in sizes]
    for slots in (first, second):
        for source, sample in zip(slots.source.tolist(), slots.sample.tolist(), strict=True):
            reads[source].append(sample)
    for index, size in enumerate(sizes):
        for start in range(0, len(reads[index]) - size + 1, size):
            assert sorted(reads[index][start : start + size]) == list(range(size))
        rest = reads[index][len(reads[index]) // size * size :]
        assert len(set(rest)) == len(rest)
        assert after.consumed(stop + 400)[names[index]] == len(reads[index])
        share = new_weights[index] / sum(new_weights[: len(sizes)])
        assert abs(int((second.source == index).sum()) - 400 * share) <= len(sizes) + 1


def test_a_mixture_spreads_its_sources_evenly_at_every_length() -> None:
    order = GlobalOrder([SourceShare("a", 10, 5.0), SourceShare("b", 10, 3.0), SourceShare("c", 10, 1.0)], seed=0)
    source = order.read(np.arange(3 * CYCLE)).source
    for index, weight in enumerate((5, 3, 1)):
        ahead = np.cumsum(source == index) - np.arange(1, 3 * CYCLE + 1) * weight / 9
        assert np.abs(ahead).max() <= 2 + 3  # half a read, the cycle's rounding over three cycles


def test_sources_must_stand_in_one_agreed_order() -> None:
    with pytest.raises(AssertionError, match="order of their names"):
        GlobalOrder([SourceShare("b", 1), SourceShare("a", 1)], seed=0)


def test_reading_a_step_of_a_trillion_samples_needs_no_memory() -> None:
    order = one(10**12)
    assert len(set(read(order, 10**12 - 4, 10**12 + 4))) == 8


def test_order_does_not_import_torch() -> None:
    code = "import sys, heptad.loader.order, heptad.loader.prepare; sys.exit('torch' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": ":".join(sys.path)}, check=False).returncode
        == 0
    )
