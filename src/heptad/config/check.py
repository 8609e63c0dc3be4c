"""Every rule that needs more than one field of a job, in one pass, so that a job is repaired in one go.

A file for each kind of rule: arithmetic of sizes and degrees (`sizes.py`, of the context axis `context.py`, of stages
`pipeline.py`, of one without a flush `pipedream.py`), the optimizer (`optimizer.py`), which blocks are recomputed
(`recompute.py`), experts, latent attention and multi-token prediction (`experts.py`), options whose axis is not built
yet (`unbuilt.py`), options that would have no effect in this job (`effect.py`). A job is checked as it was loaded (a
model preset is expanded here), before anything is derived and before any process starts. Whether a pipeline's schedule
can do these numbers is its generator's to say: `axes/pipeline/legal.py` adds that, and is what every verb calls.
"""

from __future__ import annotations

from heptad.config import context, effect, experts, optimizer, pipedream, pipeline, recompute, sizes, unbuilt
from heptad.config.presets import cluster_table, expand
from heptad.config.schema import Job
from heptad.errors import ConfigError, Problem


def problems(job: Job) -> list[Problem]:
    """Every violated rule of `job`; empty: the job can run."""
    found: list[Problem] = []
    model, devices_per_node = job.model, job.cluster.devices_per_node
    try:
        model = expand(job.model)
    except ConfigError as error:
        found += error.problems
    try:
        listed = cluster_table(job.cluster).get("devices_per_node")
        devices_per_node = devices_per_node or (listed if isinstance(listed, int) else None)
    except ConfigError as error:
        found += error.problems
    found += sizes.problems(job, model, devices_per_node)
    found += context.problems(job, model)
    found += pipeline.problems(job, model)
    found += pipedream.problems(job, model)
    found += optimizer.problems(job.optimizer, job.train.steps)
    found += recompute.problems(job, model)
    found += experts.problems(job, model)
    found += unbuilt.problems(job)
    found += effect.problems(job, model)
    return found


def check(job: Job) -> None:
    """Raise ConfigError with every problem of `job`, if there is one."""
    found = problems(job)
    if found:
        raise ConfigError(*found)
