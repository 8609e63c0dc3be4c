"""Mixtures in bf16: no right layout is called wrong, over a seeded sample of all axes, and no fault is excused."""

from __future__ import annotations

import random
from itertools import product
from typing import Any

import pytest
from tests.verify import cover
from tests.verify.everything import NONE, WIDE, line_of, ranks_of
from tests.verify.layouts import compared, layout_job
from tests.verify.several import Item
from tests.verify.tally import degrees
from tests.verify.test_moe_layouts import LIMITED, SOFTMAX
from tests.verify.trial import assert_right

PARTS, SEED = (2, 3, 4, 4, 5, 6, 6, 7, 8, 8, 8, 8), 9
"""Ranks of each part of the sample, whose jobs run in the same processes."""
CUT = ("tp", "cp", "pp", "ep", "etp", "ep_inner")
"""Of each part's jobs one is on more than one rank along each of these, where some drawn job has that."""
TRIES = 30
ROUTERS = ("softmax", "deepseek")


def placed(ranks: int) -> list[Item]:
    """Degrees of all axes, those of experts too."""
    found = []
    for sizes, ep, etp, inner in product(degrees(), range(1, 9), (1, 2, 3), (1, 2, 3)):
        block = sizes["dp_shard"] * sizes["cp"] * sizes["tp"]
        if ranks_of(sizes) == ranks and block % (ep * etp) == 0 and ep % inner == 0 and inner < max(ep, 2):
            found.append(sizes | {"ep": ep, "etp": etp, "ep_inner": inner if ep > 1 else NONE})
    return found


def sample(part: int) -> list[Item]:
    """Mixtures on `PARTS[part]` ranks, of either router as many; degrees are drawn first, then the rest."""
    generator, ways = random.Random(f"{SEED}.{part}"), placed(PARTS[part])
    found: dict[str, Item] = {}
    for at, axis in enumerate(CUT):
        cut = [way for way in ways if way[axis] not in (1, NONE)] or ways
        tries = 0
        while len(found) <= at:
            tries += 1
            kept = generator.choice(cut if tries < TRIES else ways) | {"router": ROUTERS[(part + at) % len(ROUTERS)]}
            item = cover.drawn(generator, kept, WIDE)
            found |= {} if item is None else {line_of(item): item}
    return list(found.values())


def test_right_layouts_of_which_one_gathers_keys_and_drops_choices() -> None:
    jobs = sample(0)
    assert_right([jobs[0], jobs[3]], "bf16")


def test_a_last_bit_of_a_master_is_no_error_of_the_next_step() -> None:
    """Muon's masters differ in fp32's last bits, some casts to bf16 by one of theirs; nothing else differs here."""
    jobs = [item for item in sample(3) if (item["schedule"], item["optimizer"]) == ("dualpipev", "muon")]
    assert len(jobs) == 1
    assert_right(jobs, "bf16")


@pytest.mark.slow
@pytest.mark.parametrize("part", range(len(PARTS)))
def test_a_sample_of_right_layouts(part: int) -> None:
    assert_right(sample(part), "bf16")


JITTER = {**SOFTMAX, "mtp_depth": 1}
PLANTED: dict[str, dict[str, Any]] = {
    "missing_reduction": dict(zero=2, model=JITTER, layout=dict(ep=2)),
    "dropped_microbatch": dict(zero=1, model=JITTER, layout=dict(ep=2)),
    "norm_not_summed": dict(ranks=1, model=LIMITED, layout=dict(tp=2, ep=2, sequence_parallel=True)),
    "kv_not_summed": dict(ranks=1, model=SOFTMAX, layout=dict(tp=4, ep=2)),
    "kv_gradient_lost": dict(ranks=1, model=SOFTMAX, layout=dict(cp=2, etp=2)),
    "dropped_grad": dict(ranks=1, accumulation=4, model=JITTER, layout=dict(pp=2)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANTED)
def test_faults_of_other_axes_are_caught_on_a_mixture(name: str) -> None:
    assert compared(layout_job(**PLANTED[name], params="bf16"), inject=(name,)).differences
