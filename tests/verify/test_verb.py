"""`heptad verify` as a user or a machine meets it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from heptad.cli.job import ready
from heptad.cli.main import app
from heptad.errors import ConfigError
from heptad.verify.faults import names
from heptad.verify.localise import NOBODY, Blame
from heptad.verify.report import as_json_line, as_text
from heptad.verify.run import examine, verify
from heptad.verify.shrink import shrink

SMALL = ["model.layers=2", "train.global_batch=4", "layout.dp_shard=2"]


def said(capsys: pytest.CaptureFixture[str], sets: list[str], **options: Any) -> tuple[int, str, str]:
    code = verify(ready("debug", sets), steps=2, **options)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_right_layout_says_ok_and_shows_the_traffic(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = said(capsys, SMALL)
    assert code == 0 and "ok: 2 steps compute what one device computes" in out
    rows = {line.split()[1] + " " + line.split()[2]: line for line in out.splitlines() if line.startswith("dp_shard")}
    assert {"all_gather forward", "reduce_scatter backward", "all_reduce count", "all_reduce loss"} <= set(rows)
    assert all(line.rstrip().endswith("ok") for line in rows.values())
    assert "live storages" in out and "0 B between steps" not in out
    assert "width 64 -> 13" in err and "width" not in out


def test_json_is_one_object_with_the_promised_keys(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = said(capsys, SMALL, as_json=True)
    found = json.loads(out)
    assert code == 0 and out.count("\n") == 1
    assert list(found)[:6] == ["ok", "steps", "max_relative_error", "worst", "axis", "traffic_matches"]
    assert found["ok"] is True and found["steps"] == 2 and found["axis"] is None and found["traffic_matches"] is True
    assert 0 <= found["max_relative_error"] <= 1e-10 and "." in found["worst"]


def test_a_fault_is_reported_with_axis_and_module(capsys: pytest.CaptureFixture[str]) -> None:
    verdict = examine(shrink(ready("debug", SMALL), 1), 1, ("param:blocks.1.mlp.up.weight",))
    found = json.loads(as_json_line(verdict))
    assert found["ok"] is False and found["axis"] == "dp_shard"
    assert (found["worst"], found["module"]) == ("blocks.1.mlp.up.weight", "blocks.1.mlp.up")
    assert "without dp_shard: right" in capsys.readouterr().err
    text = as_text(verdict)
    assert text.endswith("NOT OK") and "DIFFERS" in text
    assert "guilty axis: dp_shard" in text and "first differing module: blocks.1.mlp.up" in text


def test_a_difference_exits_1(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("heptad.verify.run.guilty", lambda job, heals: Blame(NOBODY))
    assert said(capsys, SMALL, inject=("norm_local",), as_json=True)[0] == 1


def test_a_fault_that_cannot_exist_is_a_bad_job(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="cannot exist in this job: there is one data rank"):
        verify(ready("debug", []), inject=("rank_scale",))
    assert capsys.readouterr().out == ""


def test_a_class_that_cannot_be_imported_is_a_bad_job() -> None:
    with pytest.raises(ConfigError, match="can be imported"):
        verify(ready("debug", ["model.class=no.such:Model", "layout.dp_shard=2"]))


def test_a_class_of_ones_own_is_verified(capsys: pytest.CaptureFixture[str]) -> None:
    sets = [
        "model.class=examples.custom_model:TokenShift",
        "layout.dp_shard=2",
        "train.global_batch=4",
        "data.seq_len=5",
    ]
    assert said(capsys, sets)[0] == 0


def test_the_list_of_faults_is_one_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    app()(["verify", "--inject", "?"], standalone_mode=False)
    assert capsys.readouterr().out.splitlines() == names()
