"""`heptad timeline JOB --actions`: the program a rank runs in one step, as the executor will run it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from heptad.cli.job import JobRef, Json, Sets, ready
from heptad.errors import ConfigError

if TYPE_CHECKING:
    from heptad.config.schema import Job
    from heptad.schedule.action import Program, UnitUse


def timeline(
    job: JobRef,
    actions: Annotated[bool, typer.Option("--actions", help="Print the actions of one step, in order.")] = False,
    sets: Sets = None,
    json: Json = False,
) -> None:
    """Show what a rank does in one step: forward, backward, gather, drop, reduce, update."""
    resolved = ready(job, sets)
    if not actions:
        rule = "not built yet: a picture of simulated time arrives with the simulator"
        fix = f"heptad timeline {job} --actions, or measured time: heptad train {job} --trace"
        raise ConfigError.of("heptad timeline", job, rule, fix)
    from heptad.schedule.action import format_program

    uses, program = _planned(resolved)
    text = format_program(program)
    if json:
        from json import dumps

        print(dumps({"units": [use.name for use in uses], "program": text}))
        return
    print("units: " + ", ".join(f"{index} {use.name}" for index, use in enumerate(uses)), file=sys.stderr)
    print("every rank runs the same program (there is no pipeline)", file=sys.stderr)
    print(text)


def _planned(job: Job) -> tuple[tuple[UnitUse, ...], Program]:
    """What each unit reads and writes, and the checked program of one step, without a process group."""
    from heptad.account.traffic import buckets_of
    from heptad.axes.apply import microbatches_of, recomputed, step_program
    from heptad.axes.data.buckets import unit_uses
    from heptad.models.build import build

    model = build(job)
    uses = unit_uses(model.unit_specs, buckets_of(job, model.unit_specs, model.specs)[0])
    return uses, step_program(job, uses, microbatches_of(job), recomputed(job, model.unit_specs))
