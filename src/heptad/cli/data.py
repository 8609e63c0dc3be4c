"""`heptad data JOB`: tokenise the job's corpus into its cache and say what is in it."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from heptad.cli.job import JobRef, Json, Sets, ready
from heptad.units import human_bytes


def data(
    job: JobRef,
    sets: Sets = None,
    json: Json = False,
    checksums: Annotated[
        bool, typer.Option("--checksums", help="Read every cached file against its checksum.")
    ] = False,
) -> None:
    """Tokenise a job's corpus (once; later runs map the cached files) and describe it."""
    resolved = ready(job, sets)
    from heptad.loader.prepare import prepare

    prepared = prepare(resolved, lambda sentence: print(sentence, file=sys.stderr))
    if checksums:
        prepared.verify()
    summary = prepared.summary()
    if json:
        from json import dumps

        print(dumps(summary))
    else:
        print("\n".join(_lines(summary)))


def _lines(summary: dict[str, Any]) -> list[str]:
    lines = [
        f"{source['name']}: {source['documents']:,} documents, {source['tokens']:,} tokens, "
        f"{human_bytes(source['bytes'])}; "
        f"samples of {summary['seq_len']} tokens: {source['train_samples']:,} train, "
        f"{source['validation_samples']:,} validation"
        for source in summary["sources"]
    ]
    lines.append(f"tokenizer: {summary['tokenizer']} ({summary['vocab']:,} ids)")
    if summary["skipped_empty"] or summary["replaced"]:
        lines.append(
            f"{summary['skipped_empty']:,} empty documents skipped, {summary['replaced']:,} invalid bytes replaced"
        )
    return [*lines, f"cache: {summary['cache']}"]
