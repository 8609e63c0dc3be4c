"""The one-screen summary of a job: what follows from its sizes, and what differs from the defaults."""

from __future__ import annotations

from collections.abc import Callable

from heptad.config.describe import summary
from heptad.config.load import load
from heptad.models.resolve import derived, resolve


def test_summary_of_a_job(snapshot: Callable[[str, str], None]) -> None:
    sets = ["layout.dp_shard=3", "layout.dp_replicate=2", "model.frozen=['embed.*']", "optimizer.clip_norm=none"]
    job = resolve(load("debug", sets))
    snapshot("summary", summary(job, derived(job)))


def test_the_line_of_ranks_names_the_tensor_axis() -> None:
    job = resolve(load("debug", ["layout.dp_shard=2", "layout.tp=4"]))
    assert "ranks             8 = dp_shard 2 × tp 4\n" in summary(job, derived(job))
    job = resolve(load("debug", ["layout.dp_shard=2", "layout.tp=4", "layout.sequence_parallel=true"]))
    assert "8 = dp_shard 2 × tp 4 with sequence parallel\n" in summary(job, derived(job))
