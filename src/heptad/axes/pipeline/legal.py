"""Every rule of a job, the pipeline schedule's included, before any process starts. Pure, no torch.

A schedule's rules on P, V and M are its generator's (`generate.problems`); here they are said in the job's words:
micro-batches follow from `train.global_batch`. Read next: `config/check.py`, `config/pipeline.py`, `generate.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

from heptad.axes.pipeline.generate import FILE, GENERATORS, generate
from heptad.axes.pipeline.generate import problems as schedule_problems
from heptad.config import check as config
from heptad.config.pipeline import num_stages, stage_problems
from heptad.config.presets import expand
from heptad.config.schema import Job
from heptad.errors import ConfigError, Problem


def check_job(job: Job) -> None:
    """Raise ConfigError with every problem of a job as it was loaded, if there is one."""
    found = config.problems(job)
    try:
        found += problems(job)
    except ConfigError as error:
        found += [problem for problem in error.problems if problem not in found]
    if found:
        raise ConfigError(*found)


def problems(job: Job) -> Iterator[Problem]:
    """What keeps the job's schedule from running on its ranks, stages and micro-batches."""
    layout, unit = job.layout, _sequences(job)
    if layout.pp == 1:
        return
    microbatches, rest = divmod(job.train.global_batch, unit)
    if layout.schedule.startswith(FILE):
        if not rest:
            schedule = generate(layout.schedule, layout.pp, layout.vpp, microbatches)
            if num_stages(layout) is None:
                yield from stage_problems(layout, expand(job.model), schedule.num_stages)
        return
    for problem in schedule_problems(layout.schedule, layout.pp, layout.vpp, max(1, microbatches)):
        if problem.field != "microbatches":
            yield problem
        elif not rest:  # else global_batch is wrong already
            yield _batch(job, problem, microbatches)


def _sequences(job: Job) -> int:
    """Sequences of one micro-batch on all data ranks."""
    return job.layout.dp_replicate * job.layout.dp_shard * job.train.micro_batch


def _batch(job: Job, problem: Problem, microbatches: int) -> Problem:
    """Too few, or an odd number of micro-batches, with the global batches around that would do."""
    layout, unit = job.layout, _sequences(job)
    near = [legal_microbatches(job, microbatches, step) for step in (-1, 1)]
    fix = "global_batch = " + " or ".join(str(number * unit) for number in near if number is not None)
    small = [
        size
        for size in range(1, job.train.micro_batch)
        if job.train.micro_batch % size == 0 and _can(job, microbatches * job.train.micro_batch // size)
    ]
    fix += f", or micro_batch = {small[-1]}" if small else ""
    fix += ', or schedule = "1f1b", which takes any' if layout.vpp in (None, 1) else ""
    batch = job.train.global_batch
    return Problem("train.global_batch", batch, f"{problem.rule}; {batch} / {unit} = {microbatches} are there", fix)


def legal_microbatches(job: Job, start: int, step: int = 1) -> int | None:
    """The nearest number of micro-batches that the job's schedule can do, from `start` on up or (step = -1) down."""
    generator = GENERATORS.get(job.layout.schedule)
    highest = start + (0 if generator is None else generator.least * (job.layout.pp + 1)) + 2
    stop = highest + 1 if step > 0 else 0
    return next((number for number in range(start, stop, step) if _can(job, number)), None)


def _can(job: Job, microbatches: int) -> bool:
    layout = job.layout
    found = schedule_problems(layout.schedule, layout.pp, layout.vpp, microbatches)
    return all(problem.field != "microbatches" for problem in found)
