"""Options of the job file whose part is not built yet: refused where they are set, never read past.

The job file has every axis from the start, so that files stay valid; a line here goes when its part arrives.
"""

from __future__ import annotations

from collections.abc import Iterator

from heptad.config.schema import Job
from heptad.errors import Problem

TABLE: tuple[tuple[str, tuple[object, ...], str], ...] = (
    ("precision.float8", (False,), "float8"),
    ("zeropp.qwz", (False,), "ZeRO++"),
    ("zeropp.hpz", (False,), "ZeRO++"),
    ("zeropp.qgz", (False,), "ZeRO++"),
    ("offload.optimizer", ("none",), "offload"),
    ("offload.params", ("none",), "offload"),
    ("offload.activations", ("none", "cpu"), "offload"),
    ("checkpoint.async_", (False,), "asynchronous checkpoints"),
)
"""(option, values that are built, what the others arrive with)."""


def problems(job: Job) -> Iterator[Problem]:
    """One problem for each option that is set to what is not built yet."""
    for option, built, arrives in TABLE:
        section, name = option.split(".")
        value = getattr(getattr(job, section), name)
        if value not in built:
            field = option.rstrip("_")
            key = field.split(".")[1]
            fix = f"leave {key} out" if built == (None,) else f"{key} = {' or '.join(map(_shown, built))}"
            yield Problem(field, value, f"not built yet: it arrives with {arrives}", fix)


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else f'"{value}"' if isinstance(value, str) else str(value)
