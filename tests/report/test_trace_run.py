"""A run with a pipeline leaves its measured timeline without being asked, all ranks on one clock."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tests.tiny import tiny_job

from heptad.config.schema import Job
from heptad.launch.forked import forked
from heptad.loader.synthetic import synthetic
from heptad.train.loop import run
from heptad.train.outcome import Outcome


def _train(rank: int, job: Job) -> Outcome:
    return run(job, rank, torch.device("cpu"), data=synthetic(job))


def test_a_pipeline_leaves_its_timeline(tmp_path: Path) -> None:
    plain = tiny_job(global_batch=6, pp=2, schedule="1f1b", zero=1).model_dump(by_alias=True)
    plain["train"] |= {"steps": 3, "val_every": 0, "sample_tokens": 0}
    plain["log"] |= {"dir": str(tmp_path), "name": "run", "tensorboard": False}
    first, second = forked(2, _train, Job.model_validate(plain))
    folder = tmp_path / "run"
    names = ("loss.svg", "trace/pipeline.svg", "trace/timeline.svg")
    assert first.pictures == tuple(str(folder / name) for name in names) and second.pictures == ()
    assert all(picture in first.text() for picture in first.pictures)
    drawn = (folder / "trace" / "pipeline.svg").read_text(encoding="utf-8")
    assert "Step 3: the pipeline of ranks 0, 1" in drawn and "Measured: 1f1b, 2 ranks" in drawn and "Simulated" in drawn
    records = json.loads((folder / "trace" / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    spans = {(record["pid"], record["name"]): record for record in records if record["ph"] == "X"}
    assert min(record["ts"] for record in spans.values()) == 0
    stage = max(int(name.split("S")[0]) for rank, name in spans if rank == 0 and "S" in name)
    for microbatch in range(3):
        sent, got = spans[0, f"{stage}S{microbatch}"], spans[1, f"{stage + 1}e{microbatch}"]
        assert got["ts"] + got["dur"] >= sent["ts"]  # nothing arrives before it was sent
