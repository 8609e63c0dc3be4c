"""`heptad verify JOB`: prove on this machine that the job's layout computes what one device computes."""

from __future__ import annotations

from typing import Annotated

import typer

from heptad.cli.job import Json, Sets, ready
from heptad.errors import ConfigError
from heptad.launch.environ import check_compiler


def verify(
    job: Annotated[str | None, typer.Argument(metavar="JOB", help="A preset's name or a TOML file.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps to compare.")] = 3,
    full: Annotated[bool, typer.Option("--full", help="Keep the job's sizes instead of shrinking them.")] = False,
    inject: Annotated[
        list[str] | None,
        typer.Option(metavar="FAULT", help="Plant a fault, which must be caught ('?' lists them). Repeatable."),
    ] = None,
    sets: Sets = None,
    json: Json = False,
) -> None:
    """Compare loss, every gradient, gradient norm and parameters with one device, step by step. Exit 1: they differ."""
    faults = tuple(inject or ())
    if "?" in faults:
        from heptad.verify.faults import names

        print("\n".join(names()))
        return
    if job is None:
        raise ConfigError.of("JOB", None, "a job is named, except to list faults", "e.g. heptad verify debug")
    resolved = ready(job, sets)
    check_compiler(resolved)
    from heptad.verify.run import verify as run

    raise typer.Exit(run(resolved, steps=steps, full=full, inject=faults, as_json=json))
