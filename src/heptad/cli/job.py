"""How every verb reads its job: load, prove all rules in one pass, fill what is derived."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from heptad.config.schema import Job

JobRef = Annotated[str, typer.Argument(metavar="JOB", help="A preset's name (default, debug) or a TOML file.")]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override an option, e.g. --set layout.zero=2. Repeatable."),
]
Json = Annotated[bool, typer.Option("--json", help="End with one JSON object on stdout.")]


def ready(job_ref: str, sets: Sequence[str] | None) -> Job:
    """The resolved job. Raises ConfigError with every problem found; starts no process, imports no torch."""
    from heptad.axes.pipeline.legal import check_job
    from heptad.axes.program import check_program
    from heptad.config.load import load
    from heptad.models.resolve import resolve

    job = load(job_ref, sets or ())
    check_job(job)
    resolved = resolve(job)
    check_program(resolved)
    return resolved
