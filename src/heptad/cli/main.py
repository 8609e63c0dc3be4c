"""The command line: one file a verb; nothing heavy is imported before a verb runs, so `heptad --help` is fast.

Every verb exits 0 when what it checks holds, 1 when it does not, 2 for a job that cannot work (a ConfigError, printed
on stderr without a traceback). stdout carries results, stderr progress. Read next: `job.py` (how a job is read).
"""

from __future__ import annotations

import contextlib
import os
import sys
import time

import typer

from heptad.cli import data, plan, timeline, train, verify
from heptad.errors import ConfigError

BAD_JOB = 2


def app() -> typer.Typer:
    """The verbs, in the order a newcomer meets them."""
    verbs = typer.Typer(
        name="heptad",
        help="One TOML file: train it, prove that its layout computes what one device computes, see what runs when.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    for verb in (train.train, verify.verify, timeline.timeline, data.data, plan.plan):
        verbs.command()(verb)
    return verbs


def main() -> None:
    """Entry point of `heptad` and of `python -m heptad`; in both a job may name a class in the current folder."""
    sys.path.append(os.getcwd())
    try:
        app()()
    except ConfigError as error:
        from heptad.launch.environ import SPEAKS_AFTER_S, rank_info

        with contextlib.suppress(ConfigError):  # of an environment that says half of it: then this process is alone
            if rank_info().rank:  # under torchrun every rank finds the same problems
                time.sleep(SPEAKS_AFTER_S)
        print(error, file=sys.stderr)
        sys.exit(BAD_JOB)
