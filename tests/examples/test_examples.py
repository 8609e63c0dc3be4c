"""Every example runs as its docstring says, in a process of its own, at tiny sizes, and prints what it is for."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WARNINGS = ("-W", "error", "-W", "ignore:This process:DeprecationWarning")  # as pyproject.toml: ranks are forked
AXES = ("context.py", "data.py", "expert.py", "pipeline.py", "tensor.py")
TESTED = {"collectives.py", "custom_model.py", "placement.py", *AXES}


def _run(script: str, *arguments: str) -> str:
    command = [sys.executable, *WARNINGS, str(ROOT / "examples" / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_example_is_tested_and_short() -> None:
    found = {path.name: len(path.read_text().splitlines()) for path in (ROOT / "examples").glob("*.py")}
    assert set(found) == TESTED
    assert max(found.values()) <= 120 and max(found[name] for name in AXES) <= 80


def test_collectives_prints_formula_ledger_and_wire() -> None:
    out = _run("collectives.py", "--ranks", "3", "--mb", "0.3")
    rows = re.findall(r"^(\w+) +(\S+) +([\d,]+) +([\d,]+) +([\d,]+|no counter)  (\S+)$", out, re.MULTILINE)
    assert [row[0] for row in rows] == [
        "all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all", "send",
    ]  # fmt: skip
    whole = 300_000
    expected = {"4/3": whole * 4 // 3, "2/3": whole * 2 // 3, "1": whole}
    for _, fraction, formula, ledger, wire, _ in rows:
        assert int(formula.replace(",", "")) == int(ledger.replace(",", "")) == expected[fraction]
        if wire != "no counter":  # at least what must travel; others may use loopback too
            assert int(wire.replace(",", "")) >= whole * 2 // 3
    assert "formula == ledger on every rank" in out


def test_data_shows_what_each_stage_holds_and_sends() -> None:
    out = _run("data.py", "--ranks", "4", "--micro-batches", "2")
    stages = out.strip().split("\n\n")
    assert [stage.split(":")[0] for stage in stages] == ["stage 0", "stage 1", "stage 2", "stage 3", "HSDP"]
    assert len(set(re.findall(r"loss (\S+)", out))) == 1
    held = [re.search(r"^ +0 +([\d,]+) +([\d,]+) +([\d,]+)", stage, re.MULTILINE) for stage in stages]
    params, grads, moments = zip(*[[int(n.replace(",", "")) for n in row.groups()] for row in held if row], strict=True)
    whole = params[0]
    assert params == (whole, whole, whole, whole // 4, whole // 2)
    assert grads == (whole, whole, whole // 4, whole // 4, whole // 2)
    assert moments[0] > moments[1] == moments[2] == moments[3]  # padding of a bucket is in no moment
    assert "reduce_scatter" not in stages[0] and "all_gather" not in stages[0]
    for number, stage in enumerate(stages[1:], 1):
        assert ("all_gather dp_shard (backward)" in stage) == (number >= 3)
    assert "all_reduce dp_replicate (backward)" in stages[4]


def test_tensor_shows_what_each_rank_holds_and_sends() -> None:
    one, whole, cut, kept = _run("tensor.py", "--ranks", "4").strip().split("\n\n")
    assert len({line for part in (one, whole, cut, kept) for line in re.findall(r"loss (\S+)", part)}) == 1
    numel = [int(n.replace(",", "")) for n in re.findall(r"holds ([\d,]+) parameters", whole)]
    assert len(numel) == 4 and max(numel) < int(re.findall(r"holds ([\d,]+)", one)[0].replace(",", "")) / 3
    assert "sends" not in one
    assert "all_gather" not in whole and "16 × all_reduce" not in whole
    sent = [re.findall(r"sends +(\d+) × (\w+) tp \(backward\)", part) for part in (cut, kept)]
    assert sent[0] == [("20", "all_gather"), ("10", "reduce_scatter")]
    assert sent[1] == [("10", "all_gather"), ("10", "reduce_scatter")]


def test_context_shows_which_tokens_each_rank_holds_and_what_it_sends() -> None:
    parts = {part.split("\n")[0]: part for part in _run("context.py", "--ranks", "4").strip().split("\n\n")}
    one, plain, zigzag, ulysses, both, gather, window = parts.values()
    assert len({loss for part in parts.values() for loss in re.findall(r"loss (\S+)", part) if part != window}) == 1
    for part in (plain, zigzag, ulysses, both, gather, window):
        held = [re.findall(r"(\d+)(?:-(\d+))?", line) for line in re.findall(r"holds 16 tokens of a row: (.+)", part)]
        tokens = [i for line in held for first, last in line for i in range(int(first), int(last or first) + 1)]
        assert len(held) == 4 and sorted(tokens) == list(range(64))
    work = [[int(n.replace(",", "")) for n in re.findall(r"([\d,]+) pairs", part)] for part in parts.values()]
    assert all(sum(found) == work[0][0] for found in work[1:-1]) and sum(work[-1]) < work[0][0]
    assert max(work[1]) > 2 * work[0][0] / 4 and all(max(found) <= 1.05 * work[0][0] / 4 for found in work[2:-1])
    hops = r"sends +(\d+) × send cp \((\w+)\): ([\d,]+) B"
    assert re.findall(hops, plain) == re.findall(hops, zigzag) == re.findall(hops, window)
    assert [(int(count), phase) for count, phase, _ in re.findall(hops, zigzag)] == [(24, "backward"), (12, "forward")]
    assert [(int(count), phase) for count, phase, _ in re.findall(hops, both)] == [(8, "backward"), (4, "forward")]
    dealt = r"sends +(\d+) × all_to_all cp \((\w+)\)"
    assert re.findall(dealt, ulysses) == re.findall(dealt, both) == [("8", "backward"), ("8", "forward")]
    assert "all_to_all" not in gather and "× send" not in gather and "reduce_scatter cp (backward)" in gather
    assert " cp (" not in one


def test_expert_shows_where_rows_go_and_what_is_sent() -> None:
    parts = {part.split("\n")[0]: part for part in _run("expert.py", "--ranks", "4").strip().split("\n\n")}
    whole, one, cut, two = parts.values()
    assert len({loss for part in parts.values() for loss in re.findall(r"loss (\S+)", part)}) == 1
    assert " ep " not in whole and " etp " not in whole and " etp " not in one and " etp " not in two
    held = [re.findall(r"experts (\d+) to (\d+) of 16, rows (\d+) to (\d+) of 40", part) for part in (one, cut)]
    assert held[0] == [(str(at), str(at + 4), "0", "40") for at in (0, 4, 8, 12)]
    assert held[1] == [(first, stop, *half) for first, stop in (("0", "8"), ("8", "16"))
                       for half in (("0", "20"), ("20", "40"))]  # fmt: skip

    def rows(part: str, what: str) -> list[list[int]]:
        return [[int(n) for n in row.split(", ")] for row in re.findall(rf"rows to each {what}: \[(.+)\]", part)]

    to_ranks, to_nodes = rows(one, "rank"), rows(two, "node")
    assert all(sum(row) == 32 * 4 for row in to_ranks) and sum(map(sum, rows(two, "rank of its node"))) == 4 * 32 * 4
    assert all(max(row) <= 32 <= sum(row) for row in to_nodes)  # a token once a node
    sent = {int(n.replace(",", "")) for n in re.findall(r"sends +2 × all_to_all ep \(backward\): (\S+) B", one)}
    crossing = sum(to_ranks[0][1:]) + sum(row[0] for row in to_ranks[1:])
    assert sent == {4 * 64 * crossing}
    away = [sum(row[at] for at in other) for row, other in zip(to_ranks, ((2, 3), (2, 3), (0, 1), (0, 1)), strict=True)]
    assert all(row[1 - at // 2] < rows_away for at, (row, rows_away) in enumerate(zip(to_nodes, away, strict=True)))


def test_pipeline_shows_each_rank_and_one_loss_under_every_schedule() -> None:
    out = _run("pipeline.py", "--ranks", "2", "--micro-batches", "4")
    one, *schedules = out.strip().split("\n\n")
    assert [part.split("\n")[0] for part in schedules] == ["gpipe", "1f1b", "interleaved", "zbv", "dualpipe"]
    assert len(set(re.findall(r"loss (\S+)", out))) == 1 and "sends" not in one
    whole, *each = (
        [int(n.replace(",", "")) for n in re.findall(r"holds ([\d,]+) parameters", part)] for part in (one, *schedules)
    )
    assert [sum(held) for held in each] == [whole[0]] * 4 + [2 * whole[0]]  # DualPipe holds each stage twice
    lines = {part.split("\n")[0]: re.findall(r"^    (\dF.+)$", part, re.MULTILINE) for part in schedules}
    assert lines["1f1b"] == ["0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3", "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3"]
    assert "&" in lines["dualpipe"][0] and all(len(found) == 2 for found in lines.values())
    messages = [[int(n) for n in re.findall(r"sends +(\d+) × send ", part)] for part in schedules]
    assert list(map(sum, messages)) == [8, 8, 24, 16, 8]  # M boundaries crossed, up and down; V cuts 2V - 1 times
    assert [part.count("× all_reduce (shared)") for part in schedules] == [0, 0, 0, 0, 2]


def test_placement_shows_every_rank_before_and_after() -> None:
    out = _run("placement.py", "--experts", "12", "--ranks", "4", "--slots", "4", "--nodes", "2", "--groups", "4")
    before, after = (float(found) for found in re.findall(r"has ([\d.]+) times the mean", out))
    assert after < before and len(re.findall(r"^  rank +\d+ ", out, re.MULTILINE)) == 12
    held = [list(map(int, row.split())) for row in re.findall(r"holds ([\d ]+)$", out, re.MULTILINE)]
    assert {expert for row in held for expert in row} == set(range(12)) and {len(row) for row in held} == {4}


def test_a_custom_model_trains_on_two_ranks(tmp_path: Path) -> None:
    sets = ["layout.dp_shard=2", "model.layers=2", "train.steps=3", "train.global_batch=4", "data.max_bytes=100_000"]
    sets += [f"data.cache_dir={tmp_path}/cache", f"log.dir={tmp_path}/runs", "log.name=own", "optimizer.lr=0.01"]
    out = _run("custom_model.py", *sets)
    assert "done: step 3" in out
    lines = [json.loads(line) for line in (tmp_path / "runs/own/metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if line["loss"] is not None]
    assert len(losses) == 3 and losses[-1] < losses[0]
    resolved = (tmp_path / "runs/own/job.toml").read_text()
    assert "TokenShift" in resolved
