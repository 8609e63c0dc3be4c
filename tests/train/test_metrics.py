"""Metrics: one agreed set of names, counted once, written by rank 0 only."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from heptad.launch.forked import forked
from heptad.train.metrics import METRICS, Meter, Metrics, read_metrics


def test_every_line_has_every_name(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path / "metrics.jsonl", 0, writes=True)
    metrics.log({"step": 0, "val_loss": 4.5})
    metrics.log({"step": 1, "loss": math.nan, "skipped": True, "grad_norm_pre_clip": math.inf})
    metrics.close()
    first, second = read_metrics(tmp_path / "metrics.jsonl")
    assert tuple(first) == tuple(second) == METRICS
    assert (first["val_loss"], first["loss"]) == (4.5, None)
    assert (second["loss"], second["skipped"], second["grad_norm_pre_clip"]) == (None, True, None)


def log_as(rank: int, path: str) -> str:
    metrics = Metrics(Path(path), 0, writes=rank == 0)
    metrics.log({"step": 1, "loss": 2.0, "lr": 0.1} if rank == 0 else {"step": 1, "loss": 2.0})
    try:
        metrics.log({"step": 2, "mine": 1.0})
    except ValueError as error:
        return str(error)
    return ""


def test_c_089_ranks_may_log_different_names(tmp_path: Path) -> None:
    """No hang: nothing is reduced over names; a name that is not agreed is refused on every rank alike."""
    said = forked(2, log_as, str(tmp_path / "metrics.jsonl"), timeout_s=30)
    assert said[0] == said[1] and "mine" in said[0]
    (line,) = read_metrics(tmp_path / "metrics.jsonl")
    assert (line["loss"], line["lr"]) == (2.0, 0.1)


def test_a_resumed_run_keeps_its_past_and_drops_what_is_run_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = Metrics(path, 0, writes=True)
    for step in range(1, 6):
        first.log({"step": step, "loss": float(step)})
    with path.open("a") as file:
        file.write('{"step": 6, "lo')  # killed while writing
    second = Metrics(path, 3, writes=True)
    second.log({"step": 4, "loss": 40.0})
    assert [(line["step"], line["loss"]) for line in read_metrics(path)] == [(1, 1), (2, 2), (3, 3), (4, 40)]
    Metrics(path, 0, writes=True).log({"step": 1, "loss": 9.0})
    assert [line["loss"] for line in read_metrics(path)] == [9.0]
    assert len(read_metrics(tmp_path / "metrics-old-1.jsonl")) == 4


def test_tensorboard_scalars(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event

    metrics = Metrics(tmp_path / "metrics.jsonl", 2, writes=True, tensorboard=tmp_path / "tb")
    metrics.log({"step": 3, "loss": 2.5, "skipped": False})
    metrics.close()
    (path,) = (tmp_path / "tb").iterdir()
    events = [Event.FromString(raw) for raw in RawEventFileLoader(str(path)).Load()]
    scalars = {(event.step, value.tag): value.simple_value for event in events for value in event.summary.value}
    assert scalars == {(3, "loss"): 2.5, (3, "skipped"): 0.0}
    assert any(event.step == 3 and event.session_log.status for event in events)  # later steps of the past are purged


def test_c_123_tokens_are_counted_once_and_supervised_ones_apart() -> None:
    meter = Meter(1000, 700)
    meter.add(128, 90, 0.5)
    meter.add(128, 70, 0.5)
    reading = meter.reading()
    assert (reading["tokens"], reading["targets"]) == (1256, 860)
    assert (reading["tokens_per_s"], reading["step_s"], reading["mfu"]) == (256.0, 0.5, None)


def test_rates_and_mfu() -> None:
    meter = Meter(0, 0, flops_per_token=10.0, peak_flops_per_s=4000.0)
    assert meter.overall() is None and meter.seconds_left(5) is None
    meter.add(100, 100, 4.0)
    assert meter.overall() == 25.0 and meter.reading()["mfu"] == pytest.approx(25 * 10 / 4000)
    meter.add(100, 100, 1.0)
    meter.add(100, 100, 1.0)
    assert meter.overall() == 100.0 and meter.seconds_left(7) == 7.0
    assert meter.reading()["tokens_per_s"] == 100.0


def test_lines_are_plain_json(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path / "m.jsonl", 0, writes=True)
    metrics.log({"step": 1, "loss": -math.inf})
    text = (tmp_path / "m.jsonl").read_text()
    assert "Infinity" not in text and json.loads(text)["step"] == 1
