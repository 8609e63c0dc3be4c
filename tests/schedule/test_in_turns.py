"""Overlapped pairs as data, and as they run: what is paired, what is refused, bits, order, traffic, errors."""

from __future__ import annotations

import threading
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.schedule.test_program import RULES, plain
from tests.tiny import tiny_batches, tiny_job
from torch import Tensor

from heptad.axes.pipeline.generate import generate
from heptad.axes.program import microbatches_of, step_program
from heptad.config.schema import Job
from heptad.launch.forked import forked
from heptad.mesh.collectives import Group, all_to_all
from heptad.mesh.turns import give
from heptad.schedule.action import COMPUTE, Action, Kind, format_program, parse_program, steps_of
from heptad.schedule.check import ScheduleError, check
from heptad.schedule.expand import Stages, expand
from heptad.schedule.lower import DataRule, lower, phases
from heptad.trace import Event
from heptad.train.step import Trainer

LOCAL = DataRule("never", "never")


def stages_of(schedule: str, pp: int, units: int, microbatches: int, giving: tuple[int, ...]) -> Stages:
    """`units` units over the stages as evenly as they go."""
    lines = generate(schedule, pp, None, microbatches)
    ends = [units * at // lines.num_stages for at in range(lines.num_stages + 1)]
    return Stages.of(lines, tuple(map(range, ends, ends[1:])), giving)


def middle(program: tuple[Action, ...]) -> str:
    """The steps of two actions and more, in order."""
    return ", ".join(format_program([program[i] for i in at]) for at in steps_of(program) if len(at) > 1)


def test_what_is_paired_and_who_begins() -> None:
    """Units that send inside themselves are 1, 2 and 4 of six; each stage of the middle pair has three units."""
    units = plain(6)
    stages = stages_of("dualpipe", 2, 6, 6, (1, 2, 4))
    shown = "2B0 & 3F4, 1B0 & 4F4, 4B4 & 1F2, 2F2 & 3B4, 2B1 & 3F5, 1B1 & 4F5"
    assert middle(lower(expand(stages, 0, units), units, LOCAL)) == shown
    recompute = ((1,), (4,))
    again = lower(expand(stages, 0, units, recompute), units, LOCAL, recompute=recompute)
    assert middle(again) == shown.replace("1B", "1C0 & 1B", 1).replace("4B", "4C4 & 4B").replace("1B1", "1C1 & 1B1")
    alone = expand(replace(stages, giving=frozenset()), 0, units)
    assert all(len(step) == 1 for step in alone.steps)
    line = "5B0 4B0 & 1F1 2F1 & 3B0"
    assert format_program(parse_program(line)) == line
    assert [len(at) for at in steps_of(parse_program(line))] == [1, 3, 3]


@given(
    st.sampled_from(["dualpipe", "dualpipev"]), st.sampled_from([2, 4]), st.integers(0, 5), st.integers(0, 3),
    st.sampled_from(RULES), st.integers(0, 3), st.booleans(), st.data(),
)  # fmt: skip
def test_every_lowering_of_pairs_is_proven(
    schedule: str, pp: int, more_units: int, more: int, rule: DataRule, recompute: int, offload: bool,
    data: st.DataObject,
) -> None:  # fmt: skip
    """It round-trips, and without its pairs a rank computes the same of each micro-batch in the same order."""
    number = 2 * pp + more_units
    units = plain(number)
    giving = tuple(data.draw(st.sets(st.integers(0, number - 1))))
    stages = stages_of(schedule, pp, number, 2 * pp + 2 * more, giving)
    rank = data.draw(st.integers(0, pp - 1))
    inner = [range(max(stage.start, 1), min(stage.stop, number - 1)) for stage in stages.units]
    segments = tuple(
        tuple(stage[i : i + recompute]) for stage in inner if recompute for i in range(0, len(stage), recompute)
    )
    work = expand(stages, rank, units, segments)
    program = lower(work, units, rule, recompute=segments, offload=offload)
    check(program, units, rule, segments, work=work.pairs)
    assert parse_program(format_program(program)) == program
    assert len(phases(program)) == len(program)
    alone = expand(replace(stages, giving=frozenset()), rank, units, segments)
    for microbatch in range(stages.schedule.num_microbatches):
        assert [a for a in work.compute if a.microbatch == microbatch] == [
            a for a in alone.compute if a.microbatch == microbatch
        ]
    for kinds in ({Kind.FORWARD}, COMPUTE - {Kind.FORWARD}):
        assert [a for a in work.compute if a.kind in kinds] == [a for a in alone.compute if a.kind in kinds]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("0F0 & 0R0 1F0", "an & stands between compute actions"),
        ("& 0F0", "an & stands between compute actions"),
        ("0F0 &", "an & stands between compute actions"),
        ("0F0 1F0 1B0 0B0 & 1F1", "0F1 has not run"),
        ("0F0 1F0 0F1 & 1F1", "a pair has one forward"),
        ("0F0 1F0 1B0 & 0B0", "a pair has one forward"),
        ("0F0 1F0 1B0 & 0F1 & 0B0", "a pair has one forward"),
        ("0F0 1F0 & 1B0", "runs in turns with a backward of one other micro-batch"),
        ("0F0 1F0 0F1 1B0 & 1F1", "runs in turns with a backward of one other micro-batch, of other units"),
    ],
)
def test_pairs_that_must_not_run(line: str, says: str) -> None:
    with pytest.raises(ScheduleError, match=says):
        check(parse_program(line), plain(2), LOCAL)


def test_a_gather_before_a_pair_counts_for_the_side_that_reads_it() -> None:
    program = parse_program("0F0 1F0 1G0 0G1 1g0 0g1 1B0 & 0F1 1D0 0D1")
    assert phases(program)[2:6] == ("backward", "forward", "backward", "forward")
    assert phases(program)[6:9] == ("backward", "forward", "forward")


class _Travel(torch.autograd.Function):
    """Every other rank's rows there and, in the backward, their gradients back; `log` notes both ends of a transfer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, log: list[str]) -> Tensor:
        ctx.group, ctx.log = group, log
        return _travelled(x, group, log)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return _travelled(dy, ctx.group, ctx.log), None, None


def _travelled(x: Tensor, group: Group, log: list[str]) -> Tensor:
    rows = x.flatten(0, -2)
    padded = torch.nn.functional.pad(rows, (0, 0, 0, rows.shape[0] % group.size)).contiguous()
    out = torch.empty_like(padded)
    work = all_to_all(out, padded, group, group.ledger.phase)
    log.append(f"start {group.ledger.phase}")
    give()
    log.append(f"wait {group.ledger.phase}")
    work.wait()
    return out[: rows.shape[0]].view_as(x)


def _job(**changes: Any) -> Job:
    layout = {"pp": 2, "dp_shard": 2, "schedule": "dualpipev", **changes.pop("layout", {})}
    return tiny_job({"layers": 6}, global_batch=12, **changes, **layout)


Seen = tuple[float, dict[str, Tensor], list[Any], list[str], list[Event]]


def _stepped(rank: int, job: Job, giving: tuple[int, ...], bad: int | None = None) -> Seen:
    """One step of a model whose blocks' MLPs send their input to the other data rank and back."""
    torch.manual_seed(0)
    trainer, log, record = Trainer(job, rank, torch.device("cpu")), list[str](), list[Event]()
    parallel = trainer.parallel
    group = trainer.mesh.group("dp_shard", "cp")
    assert parallel.stages is not None

    def travelling(unit: int, mlp: Any) -> Any:
        def run(x: Tensor, batch: Any) -> Tensor:
            if unit == bad and any(entry == "start backward" for entry in log):
                raise ValueError(f"unit {unit} is broken")
            there: Tensor = _Travel.apply(x, group, log)
            return mlp(_Travel.apply(there * there.abs(), group, log), batch)

        return run

    for unit in parallel.stages.held(trainer.mesh.layout.coords(rank)["pp"]):
        if 0 < unit < 7:
            block: Any = parallel.model.units[unit]
            block.mlp.forward = travelling(unit, block.mlp.forward)
    stages, place = replace(parallel.stages, giving=frozenset(giving)), trainer.mesh.layout.coords(rank)["pp"]
    number = microbatches_of(job)
    trainer.program = step_program(job, parallel.engine.uses, number, parallel.recompute, True, stages, place)
    trainer.mesh.ledger.reset()
    data_rank = trainer.mesh.layout.coords(rank)["dp_shard"]
    loss = trainer.step(1, tiny_batches(job, data_rank, 2, 1), record=record).loss
    shards = {f"{s.spec.name} {s.start}": s.master.clone() for s in trainer.engine.shards}
    assert threading.active_count() == 1
    return loss, shards, trainer.mesh.ledger.transfers(), log, record


def _both(rank: int, job: Job) -> tuple[Seen, Seen]:
    return _stepped(rank, job, ()), _stepped(rank, job, tuple(range(1, 7)))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"layout": {"zero": 3, "schedule": "dualpipe"}, "recompute": "full"},
    ],
    ids=["dualpipev", "dualpipe, stage 3, recomputed"],
)
def test_a_pair_hides_transfers_and_has_the_bits_of_one_after_the_other(changes: dict[str, Any]) -> None:
    for alone, overlapped in forked(4, _both, _job(**changes)):
        assert alone[0] == overlapped[0] and alone[1].keys() == overlapped[1].keys()
        for name, value in alone[1].items():
            assert torch.equal(value, overlapped[1][name]), name
        sent, also = ([t for t in seen[2] if t.op == "all_to_all"] for seen in (alone, overlapped))
        assert sent == also and {t.phase for t in sent} == {"forward", "backward"}, "each in the phase of its side"
        starts = range(0, len(alone[3]), 2)
        assert all(alone[3][i].startswith("start") and alone[3][i + 1].startswith("wait") for i in starts)
        hidden = sum(log[0].startswith("start") and log[1].startswith("start") for log in pairwise(overlapped[3]))
        assert hidden >= 4, "one side starts a transfer while the other's is on its way"
        names = [event.name for event in overlapped[4] if event.lane == "compute"]
        assert len(names) > len(set(names)), "a pair's actions come in stretches"
        spans = [event for event in overlapped[4] if event.lane == "compute"]
        assert all(a.end_s <= b.start_s for a, b in pairwise(spans))


def _order(rank: int, job: Job) -> list[str]:
    return _stepped(rank, job, tuple(range(1, 7)))[3]


def test_the_order_of_starts_and_waits_is_that_of_the_program() -> None:
    """The same on both data ranks and in a second run; in a pair whose backward begins, each waits under the other."""
    ranks, again = forked(4, _order, _job()), forked(4, _order, _job())
    assert ranks == again and ranks[0] == ranks[1] and ranks[2] == ranks[3]
    pair = ["start backward", "start forward", "wait backward", "start backward", "wait forward", "start forward"]
    pair += ["wait backward", "wait forward"]
    found = " ".join(ranks[0])
    assert " ".join(pair) in found


@pytest.mark.parametrize("unit", [1, 6])
def test_what_one_side_raises_ends_the_step_by_its_name(unit: int) -> None:
    with pytest.raises(Exception, match=f"unit {unit} is broken"):
        forked(4, _stepped, _job(), tuple(range(1, 7)), unit)
