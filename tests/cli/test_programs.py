"""`heptad timeline JOB --actions` with a pipeline: one line a rank, and what one rank sends the other receives."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from heptad.cli.timeline import timeline
from heptad.schedule.action import Kind, Program, parse_program

SETS = ["layout.pp=2", "model.layers=4", "layout.bucket_mb=0"]


def pairs(program: Program, kind: Kind) -> set[tuple[int, int]]:
    """(unit, micro-batch) of the actions of one kind."""
    return {(action.index, action.microbatch) for action in program if action.kind is kind}


@pytest.mark.parametrize("schedule", ["naive", "gpipe", "1f1b", "interleaved", "zbh1", "zbv", "dualpipe", "dualpipev"])
def test_every_rank_has_a_line_and_what_one_sends_the_other_receives(
    schedule: str, capsys: pytest.CaptureFixture[str]
) -> None:
    own = [] if schedule == "1f1b" else [f"layout.schedule={schedule}"]
    timeline("debug", actions=True, sets=[*SETS, *own, "layout.dp_shard=2", "train.global_batch=8"])
    shown = capsys.readouterr()
    assert "stages: 0: 0 to" in shown.err and "no pipeline" not in shown.err
    lines = [parse_program(line) for line in shown.out.splitlines()]
    assert len(lines) == 2
    for line, other in (lines, lines[::-1]):
        sent, gradients = pairs(line, Kind.SEND), pairs(line, Kind.SEND_GRAD)
        assert {(unit - 1, number) for unit, number in pairs(other, Kind.RECEIVE)} == sent
        assert {(unit + 1, number) for unit, number in pairs(other, Kind.RECEIVE_GRAD)} == gradients
        assert sent or gradients
    run = Counter((a.index, a.microbatch) for line in lines for a in line if a.kind is Kind.FORWARD)
    assert run == {(unit, number): 1 for unit in range(6) for number in range(4)}


def test_json_has_a_program_for_each_rank(capsys: pytest.CaptureFixture[str]) -> None:
    timeline("debug", actions=True, json=True, sets=[*SETS, "train.global_batch=4"])
    found = json.loads(capsys.readouterr().out)
    assert len(found["units"]) == 6 and [line.split()[-1] for line in found["programs"]] == ["U", "U"]
