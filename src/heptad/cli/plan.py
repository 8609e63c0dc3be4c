"""`heptad plan JOB`: find the layout for a model and a cluster. Announced here; the search comes with the planner."""

from __future__ import annotations

from heptad.cli.job import JobRef, Json, Sets, ready
from heptad.errors import ConfigError


def plan(job: JobRef, sets: Sets = None, json: Json = False) -> None:
    """Find the layout for a model and a cluster (not built yet: says what to use instead and exits 2)."""
    ready(job, sets)
    rule = "not built yet: the search for a layout arrives with the planner"
    fix = f"choose [layout] yourself and prove it: heptad verify {job} --set layout.dp_shard=4"
    raise ConfigError.of("heptad plan", job, rule, fix)
