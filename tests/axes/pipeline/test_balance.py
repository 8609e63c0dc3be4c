"""Stages cover the units once, each has a block, and no cut has a smaller maximum (all cuts tried)."""

from __future__ import annotations

from itertools import combinations

import pytest

from heptad.axes.pipeline.balance import balanced, from_sizes, unit_costs
from heptad.config.schema import ModelSection


def test_thirty_equal_blocks_on_four_stages() -> None:
    stages = balanced((0.0, *[1.0] * 30, 0.0), 4)
    assert [len(stage) for stage in stages] == [9, 8, 7, 8]  # with embedding and head: 8, 8, 7, 7 blocks
    assert [stage.start for stage in stages] == [0, 9, 17, 24] and stages[-1].stop == 32


def test_a_heavy_head_takes_blocks_from_its_stage() -> None:
    stages = balanced((0.0, *[1.0] * 9, 3.0), 2)
    assert stages == (range(7), range(7, 11))  # 6 blocks; 3 blocks and the head


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
@pytest.mark.parametrize("head", [0.0, 0.4, 2.5])
def test_no_other_cut_is_better(num_stages: int, head: float) -> None:
    costs = (0.1, 1.0, 2.0, 1.5, 0.5, 1.0, 3.0, 1.0, head)
    layers = len(costs) - 2

    def most(stages: tuple[range, ...]) -> float:
        return max(sum(costs[unit] for unit in stage) for stage in stages)

    found = balanced(costs, num_stages)
    assert [unit for stage in found for unit in stage] == list(range(len(costs)))
    assert all(any(0 < unit < len(costs) - 1 for unit in stage) for stage in found)
    for cuts in combinations(range(1, layers), num_stages - 1):
        bounds = (0, *cuts, layers)
        sizes = [bounds[i + 1] - bounds[i] for i in range(num_stages)]
        assert most(found) <= most(from_sizes(sizes)) + 1e-12


def test_costs_count_matmuls_once_and_the_lookup_not_at_all() -> None:
    section = ModelSection(layers=2, width=10, heads=2, kv_heads=1, head_dim=4, mlp_width=7, vocab=11)
    embed, block, _, head = unit_costs(section, seq_len=6)
    assert (embed, head) == (0.0, 110.0)
    assert block == 10 * 8 + 2 * 10 * 4 + 8 * 10 + 8 * 6 + 3 * 10 * 7
    windowed = unit_costs(section.model_copy(update={"window": 2}), seq_len=6)[1]
    assert block - windowed == 8 * 6 - 8 * (36 - 4 * 5) // 6
