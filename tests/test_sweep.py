from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tests.sweep import Combination, every, name_of, pairs, pairwise, possible, sampled

FACTORS = {"stage": (0, 1, 2, 3), "ranks": (1, 2, 4, 8), "hsdp": (False, True), "accumulation": (1, 3)}


def legal(item: Combination) -> bool:
    return not item["hsdp"] or item["ranks"] >= 4


@given(st.dictionaries(st.sampled_from("abcde"), st.integers(1, 4), min_size=2), st.integers(0, 5))
def test_every_pair_that_can_occur_occurs(sizes: dict[str, int], forbidden: int) -> None:
    factors = {name: range(size) for name, size in sizes.items()}

    def valid(item: Combination) -> bool:
        return sum(item.values()) % 7 != forbidden

    whole, cover = every(factors, valid), pairwise(factors, valid)
    assert all(item in whole for item in cover)
    assert set().union(*map(pairs, cover)) == set().union(*map(pairs, whole)) == possible(factors, valid)


def test_a_cover_is_deterministic_small_and_valid() -> None:
    cover = pairwise(FACTORS, legal)
    assert cover == pairwise(FACTORS, legal)
    assert all(map(legal, cover)) and len({name_of(item) for item in cover}) == len(cover)
    assert 16 <= len(cover) <= 20 and len(every(FACTORS, legal)) == 4 * (4 * 2 + 2 * 2)


def test_a_sample_is_of_different_valid_ones_and_keeps_to_its_seed() -> None:
    drawn = sampled(FACTORS, legal, 30, seed=1)
    assert drawn == sampled(FACTORS, legal, 30, seed=1) != sampled(FACTORS, legal, 30, seed=2)
    assert len({name_of(item) for item in drawn}) == 30 and all(map(legal, drawn))
