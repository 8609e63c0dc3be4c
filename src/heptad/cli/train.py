"""`heptad train JOB`: run the job on local ranks, or as one rank of torchrun."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from heptad.cli.job import JobRef, Json, Sets, ready
from heptad.errors import ConfigError

if TYPE_CHECKING:
    from heptad.config.schema import Job


def train(
    job: JobRef,
    sets: Sets = None,
    json: Json = False,
    ledger: Annotated[bool, typer.Option("--ledger", help="Print what a step sent: axis, op, phase, bytes.")] = False,
    trace: Annotated[
        bool,
        typer.Option(
            "--trace", help="Write the timeline of a measured step (SVG, Chrome trace); a pipeline always does."
        ),
    ] = False,
) -> None:
    """Train a job. Starts its local ranks itself; under torchrun it is one rank."""
    resolved = ready(job, sets)
    from heptad.loader.corpus import corpora

    corpora(resolved.data)  # a path without text is a bad job too, and is named before a rank starts
    if resolved.model.class_ is not None:
        _try_class(resolved)
    from heptad.launch.local import train as run

    raise typer.Exit(run(resolved, as_json=json, ledger=ledger, trace=trace))


def _try_class(job: Job) -> None:
    """A class that cannot be used is a bad job, named before a rank starts; what it raises itself, a rank reports."""
    from heptad.models.build import build

    try:
        build(job)
    except ConfigError:
        raise
    except Exception:
        return
