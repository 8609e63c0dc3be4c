"""The one-screen summary of a job: what follows from its sizes, and what differs from the defaults."""

from __future__ import annotations

from collections.abc import Callable

from heptad.config.describe import summary
from heptad.config.load import load
from heptad.models.resolve import derived, resolve
from heptad.report.opening import opening
from heptad.report.stages import pipeline_line


def test_summary_of_a_job(snapshot: Callable[[str, str], None]) -> None:
    sets = ["layout.dp_shard=3", "layout.dp_replicate=2", "model.frozen=['embed.*']", "optimizer.clip_norm=none"]
    job = resolve(load("debug", sets))
    snapshot("summary", summary(job, derived(job)))


def test_a_pipeline_has_a_line_with_its_stages_and_idle_time() -> None:
    job = resolve(load("debug", ["layout.pp=4", "model.layers=30", "model.vocab=8", "train.global_batch=8"]))
    line = pipeline_line(job)
    assert line == "pipeline          1f1b, 4 stages of 8, 8, 7, 7 blocks, idle 28.6% of the time by its costs"
    shown = summary(job, derived(job), line)
    assert "ranks             4 = pp 4\n" in shown and f"\n{line}\n[model]" in shown
    equal = resolve(load("debug", ["layout.pp=4", "model.layers=32", "model.vocab=2", "train.global_batch=5"]))
    assert "8, 8, 8, 8 blocks, idle 37.5% of" in str(pipeline_line(equal))  # (P - 1) / (M + P - 1)
    assert pipeline_line(resolve(load("debug", []))) is None


def test_the_line_of_ranks_names_the_tensor_axis() -> None:
    job = resolve(load("debug", ["layout.dp_shard=2", "layout.tp=4"]))
    assert "ranks             8 = dp_shard 2 × tp 4\n" in summary(job, derived(job))
    job = resolve(load("debug", ["layout.dp_shard=2", "layout.tp=4", "layout.sequence_parallel=true"]))
    assert "8 = dp_shard 2 × tp 4 with sequence parallel\n" in summary(job, derived(job))


def test_a_line_says_what_a_rank_holds_of_the_experts() -> None:
    def shown(*sets: str) -> str:
        job = resolve(load("debug-moe", ["train.global_batch=8", *sets]))
        return next((line for line in summary(job, derived(job)).splitlines() if line.startswith("experts")), "")

    carved = shown("layout.dp_shard=4", "layout.tp=2", "layout.ep=2", "layout.etp=2")
    assert carved == "experts           edp 2 × ep 2 × etp 2: 4 of 8 a rank, 20 of 40 rows of each"
    levels = shown("layout.dp_shard=4", "layout.ep=4", "layout.ep_inner=2")
    assert levels == "experts           ep 4 in nodes of 2: 2 of 8 a rank"
    assert shown("layout.dp_shard=4") == ""
    job = resolve(load("debug-moe", ["model.preset=deepseek-v3"]))
    assert "parameters        682,636,472,320 (683 B, 37.6 B active)" in opening(job).splitlines()


def test_c_053_a_run_says_which_optimizer_and_decay_each_role_gets() -> None:
    said = opening(resolve(load("debug-moe", ["optimizer.name=muon", "layout.dp_shard=2"])))
    groups = [line.removeprefix("optimizer         ") for line in said.splitlines() if line.startswith("optimizer ")]
    assert [group.partition(" (")[0] for group in groups] == [
        "adamw, lr 0.0003, decay 0: norm",
        "adamw, lr 0.0003, decay 0.1: embedding, head",
        "muon, lr 0.02, decay 0.1: matrix",
    ]
