"""`heptad train JOB`: run the job on local ranks, or as one rank of torchrun."""

from __future__ import annotations

from typing import Annotated

import typer

from heptad.cli.job import JobRef, Json, Sets, ready


def train(
    job: JobRef,
    sets: Sets = None,
    json: Json = False,
    ledger: Annotated[bool, typer.Option("--ledger", help="Print what a step sent: axis, op, phase, bytes.")] = False,
    trace: Annotated[
        bool, typer.Option("--trace", help="Write a timeline of measured steps (SVG, Chrome trace).")
    ] = False,
) -> None:
    """Train a job. Starts its local ranks itself; under torchrun it is one rank."""
    resolved = ready(job, sets)
    from heptad.loader.corpus import corpora

    corpora(resolved.data)  # a path without text is a bad job too, and is named before a rank starts
    from heptad.launch.local import train as run

    raise typer.Exit(run(resolved, as_json=json, ledger=ledger, trace=trace))
