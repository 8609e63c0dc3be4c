"""A job's pipeline in one line: schedule, blocks of each stage, and the share of time its ranks idle. No torch.

Idle time is simulated with costs by formula: I and W of a stage as long as its F, the head's matmul counted, messages
free. Read next: `axes/pipeline/balance.py`, `simulate/pipeline.py`; `heptad timeline --schedule` draws it.
"""

from __future__ import annotations

from heptad.axes.pipeline.balance import unit_costs
from heptad.axes.program import stages_of
from heptad.config.schema import Job
from heptad.models.spec import unit_specs
from heptad.schedule.expand import Stages
from heptad.simulate.pipeline import simulate
from heptad.simulate.times import Times

MOST_ACTIONS = 200_000
"""Stages × micro-batches up to which the schedule is simulated: about a second."""


def pipeline_line(job: Job) -> str | None:
    """For the summary of a resolved job; None without a pipeline."""
    stages = stages_of(job, unit_specs(job.model))
    if stages is None:
        return None
    layers, schedule = job.model.layers, stages.schedule
    sizes = ", ".join(str(sum(1 <= unit <= layers for unit in units)) for units in stages.units)
    line = f"pipeline          {job.layout.schedule}, {schedule.num_stages} stages of {sizes} blocks"
    if schedule.num_stages * schedule.num_microbatches > MOST_ACTIONS:
        return line
    return f"{line}, idle {idle_fraction(job, stages):.1%} of the time by its costs"


def idle_fraction(job: Job, stages: Stages) -> float:
    """Of all ranks' time in a step, the share in which they compute nothing."""
    costs = unit_costs(job.model, job.data.seq_len)
    each = [sum(costs[unit] for unit in units) for units in stages.units]
    return simulate(stages.schedule, Times.stages(each, each, each)).idle_fraction
