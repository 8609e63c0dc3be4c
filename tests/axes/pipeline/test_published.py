"""Generators against orders that others published: DualPipe's own program, torch's generators where they are right."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining import schedules as theirs

from heptad.axes.pipeline.generate import generate
from heptad.schedule.pipeline import Schedule, format_schedule, parse_schedule, peak_live
from heptad.schedule.pipeline_check import BrokenSchedule, check_schedule
from heptad.schedule.slots import Run

ORDERS = Path(__file__).parent / "dualpipe_orders.txt"


def published() -> Iterator[tuple[str, int, int, int, int, list[str]]]:
    """Name, P, M, unit slots, chunks alive, and a line of tokens for each rank."""
    rows = [row for row in ORDERS.read_text(encoding="utf-8").splitlines() if not row.startswith("#")]
    heads = [i for i, row in enumerate(rows) if row.startswith("dualpipe")]
    for head in heads:
        name = rows[head].split()[0]
        p, m, slots, live = map(int, re.findall(r"=(\d+)", rows[head]))
        yield name, p, m, slots, live, rows[head + 1 : head + 1 + p]


def renamed(token: str, stages: tuple[int, int], first: tuple[int, int]) -> str:
    """`F0.3&B1.1` of the publication in our form."""
    parts = [re.fullmatch(r"([FBIW])([01])\.(\d+)", part) for part in token.split("&")]
    assert all(parts), token
    return "&".join(f"{stages[int(p[2])]}{p[1]}{first[int(p[2])] + int(p[3])}" for p in parts if p)


def test_dualpipe_and_dualpipev_are_the_published_orders_token_for_token() -> None:
    seen = 0
    for name, p, m, slots, live, lines in published():
        schedule = generate(name, p, None, m)
        for rank, line in enumerate(lines):
            stages, first = (
                ((rank, p - 1 - rank), (0, m // 2)) if name == "dualpipe" else ((rank, 2 * p - 1 - rank), (0, 0))
            )
            assert " ".join(renamed(token, stages, first) for token in line.split()) == " ".join(
                map(str, schedule.lines[rank])
            )
            seen += 1
        assert Run(schedule).end == slots
        assert peak_live(schedule) == (live,) * p
    assert seen == 4 + 8 + 4 + 4


def torch_schedule(name: str, num_ranks: int, chunks: int, num_microbatches: int) -> Schedule:
    """What torch's class would run, made without stages: its order per rank is a function of a few numbers."""
    kinds = {
        "gpipe": theirs.ScheduleGPipe,
        "1f1b": theirs.Schedule1F1B,
        "interleaved": theirs.ScheduleInterleaved1F1B,
        "zbh1": theirs.ScheduleInterleavedZeroBubble,
        "zbv": theirs.ScheduleZBVZeroBubble,
        "dualpipev": theirs.ScheduleDualPipeV,
    }
    rounds = max(1, num_microbatches // num_ranks)
    self = SimpleNamespace(
        pp_group_size=num_ranks, n_local_stages=chunks, num_stages=num_ranks * chunks, _num_stages=num_ranks * chunks,
        _n_microbatches=num_microbatches, number_of_rounds=rounds, microbatches_per_round=num_microbatches // rounds,
    )  # fmt: skip
    made: Any = kinds[name]
    if chunks == 1 and name in ("gpipe", "1f1b"):
        orders = made._get_pipeline_order(self)
    else:
        orders = {rank: made._calculate_single_rank_operations(self, rank) for rank in range(num_ranks)}
    lines = [" ".join(filter(None, map(token, orders[rank]))) for rank in range(num_ranks)]
    return parse_schedule("\n".join(lines), name)


def token(action: Any) -> str:
    """torch's action in our form, "" for its idle slots and its reductions."""
    if action is None or action.computation_type is theirs._ComputationType.REDUCE_GRAD:
        return ""
    if action.sub_actions:
        return "&".join(map(token, action.sub_actions))
    return f"{action.stage_index}{action.computation_type.value}{action.microbatch_index}"


EQUAL = [
    *(("gpipe", p, 1, m) for p in (1, 2, 3, 4, 8) for m in (1, 2, 4, 7, 16)),
    *(("interleaved", p, v, m) for p in (1, 2, 3, 4, 8) for v in (1, 2, 3) for m in (1, 3, 4, 6, 8, 10, 12, 16, 32)),
    *(("zbh1", p, v, m) for p in (1, 2, 3, 4, 8) for v in (1, 2, 3) for m in (1, 3, 4, 6, 8, 10, 12, 16, 32)),
    *(("zbv", p, 2, m) for p in (1, 2, 3, 4, 8) for m in (1, 2, 4, 7, 16, 31)),
    *(("dualpipev", p, 2, m) for p in (1, 2, 3, 4, 8) for m in (2 * p, 2 * p + 1, 3 * p + 2)),
]


def test_equal_to_torchs_generators() -> None:
    compared = 0
    for name, p, v, m in EQUAL:
        if name in ("interleaved", "zbh1") and m % max(1, m // p):
            continue  # torch refuses it, we do not
        assert format_schedule(generate(name, p, v, m)) == format_schedule(torch_schedule(name, p, v, m)), (
            name,
            p,
            v,
            m,
        )
        compared += 1
    assert compared > 200


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (8, 20)])
def test_torchs_1f1b_order_never_runs_micro_batch_0_on_the_last_rank(p: int, m: int) -> None:
    """Its counter starts at 0 and is raised before the first use where no warm-up has set it; other ranks are ours."""
    order = torch_schedule("1f1b", p, 1, m)
    ours = generate("1f1b", p, 1, m)
    assert order.lines[:-1] == ours.lines[:-1]
    assert str(order.lines[-1][0]) == f"{p - 1}F1" and str(ours.lines[-1][0]) == f"{p - 1}F0"
    with pytest.raises(BrokenSchedule, match=f"^0F{m} is missing"):
        check_schedule(order)
