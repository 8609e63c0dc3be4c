"""`heptad timeline`: what a job's rank does in one step; a pipeline schedule in time, drawn, as text or as numbers."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from heptad.cli.job import Json, Sets, ready
from heptad.errors import ConfigError

Seconds = float | None
ONE = "of one stage (with --compare: of 1/P of the model), [1]"


def _option(*names: str, help: str, metavar: str | None = None) -> typer.models.OptionInfo:
    option: typer.models.OptionInfo = typer.Option(*names, help=help, metavar=metavar, show_default=False)
    return option


def timeline(
    job: Annotated[str | None, typer.Argument(metavar="JOB", help="A preset's name or a TOML file.")] = None,
    actions: Annotated[bool, typer.Option("--actions", help="Print the actions, in order: one line a rank.")] = False,
    schedule: Annotated[str | None, _option("--schedule", help="A schedule's name, or file:PATH.")] = None,
    compare: Annotated[
        str | None, _option("--compare", metavar="A,B,C", help="Schedules of the same model on one time axis.")
    ] = None,
    pp: Annotated[int | None, _option("--pp", help="P: pipeline ranks.")] = None,
    vpp: Annotated[int | None, _option("--vpp", help="V: stages a rank [the schedule's own].")] = None,
    microbatches: Annotated[int | None, _option("--microbatches", help="M: micro-batches of a step.")] = None,
    f: Annotated[Seconds, _option("--f", help=f"Forward {ONE}")] = None,
    i: Annotated[Seconds, _option("--i", help=f"Input gradient {ONE}")] = None,
    w: Annotated[Seconds, _option("--w", help=f"Weight gradient {ONE}")] = None,
    b: Annotated[Seconds, _option("--b", help="Whole backward [I + W].")] = None,
    fb: Annotated[Seconds, _option("--fb", help="Forward and backward that overlap, F&B [F + B].")] = None,
    comm: Annotated[Seconds, _option("--comm", help="A message holds its link for so long [0].")] = None,
    latency: Annotated[Seconds, _option("--latency", help="A message arrives so long after it left [0].")] = None,
    pairs: Annotated[
        str | None, _option("--pairs", metavar="block|early", help="When an overlapped pair starts [block]: with both "
                            "inputs, as the papers draw it and experts on other ranks need it; or its forward at once.")
    ] = None,
    rendezvous: Annotated[
        bool, typer.Option("--rendezvous", help="A message starts when its receiver waits for it; one a channel.")
    ] = False,
    output: Annotated[str | None, _option("-o", "--output", metavar="FILE.svg", help="Write the picture.")] = None,
    sets: Sets = None,
    json: Json = False,
) -> None:  # fmt: skip
    """Show a pipeline schedule in time (--schedule, --compare), or what a rank of JOB does in one step (--actions)."""
    times = {"f": f, "i": i, "w": w, "b": b, "fb": fb, "comm": comm, "latency": latency}
    if schedule is None and compare is None:
        others = {"pp": pp, "vpp": vpp, "microbatches": microbatches, "pairs": pairs, "output": output}
        for name, value in {**others, **times, "rendezvous": rendezvous or None}.items():
            if value is not None:
                fix = "add --schedule NAME, or --compare A,B,C"
                raise ConfigError.of(f"--{name}", value, "it belongs to a schedule", fix)
        _job(job, actions, sets, json)
        return
    if job is not None or sets:
        rule = "a schedule is shown without a job: its numbers are options"
        raise ConfigError.of("JOB", job or sets, rule, "leave out JOB and --set, or --schedule and --compare")
    from heptad.cli.schedules import Wanted, show

    seconds = {name: value for name, value in times.items() if value is not None}
    wanted = Wanted(schedule, compare, pp, vpp, microbatches, seconds, pairs, rendezvous)
    show(wanted, actions=actions, as_json=json, output=output)


def _job(job: str | None, actions: bool, sets: Sets, json: bool) -> None:
    """The program of a job's rank."""
    if job is None:
        fix = "e.g. heptad timeline debug --actions, or heptad timeline --schedule 1f1b --pp 4 --microbatches 8"
        raise ConfigError.of("JOB", None, "a job or a schedule is named", fix)
    resolved = ready(job, sets)
    if not actions:
        rule = "what is drawn is a pipeline schedule; of a job, the actions are printed"
        fix = f"heptad timeline {job} --actions, or measured time: heptad train {job} --trace"
        raise ConfigError.of("heptad timeline", job, rule, fix)
    from heptad.axes.program import programs_of
    from heptad.models.build import build
    from heptad.schedule.action import format_program

    model = build(resolved)
    names = [unit.name for unit in model.unit_specs]
    stages, programs = programs_of(resolved, model.unit_specs, model.specs)
    lines = [format_program(program) for program in programs]
    if json:
        from json import dumps

        print(dumps({"units": names, "program": lines[0]} if stages is None else {"units": names, "programs": lines}))
        return
    print("units: " + ", ".join(f"{index} {name}" for index, name in enumerate(names)), file=sys.stderr)
    if stages is None:
        print("every rank runs the same program (there is no pipeline)", file=sys.stderr)
    else:
        cut = ", ".join(f"{stage}: {units[0]} to {units[-1]}" for stage, units in enumerate(stages.units))
        print(f"stages: {cut}; one line a rank of the pipeline", file=sys.stderr)
    print("\n".join(lines))
