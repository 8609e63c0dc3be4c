"""What the tensor axis hides: its step against the same step with every region waited for where it starts.

In the backward of `columns` the gather of the input runs under the matmul of the input's gradient, and the reduction of
that gradient under the matmuls of the weights' (`heptad/models/columns.py`). Two nodes in a box, one rank each, so
that the bytes take time on a card and not a core's. Read next: `tensor.py`, `link.py`.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.lines import Effort, Row, launches, row_of
from benchmarks.measure import ratio
from benchmarks.netbox import Netbox
from benchmarks.peers import Contender, Ours
from benchmarks.tensor import CUT, SMALL, two_ranks

from heptad.mesh.regions import Pending, Stream

RATE = "1gbit"


@contextmanager
def at_once() -> Iterator[None]:
    """Gathers and reductions of the stream are waited for where they start."""
    originals = {name: getattr(Stream, name) for name in ("gather", "reduce")}

    def waited(inner: Any) -> Any:
        def call(*args: Any) -> Pending:
            return Pending(None, inner(*args).wait())

        return call

    for name, inner in originals.items():
        setattr(Stream, name, waited(inner))
    try:
        yield
    finally:
        for name, inner in originals.items():
            setattr(Stream, name, inner)


class Waiting:
    """Heptad's step with nothing hidden."""

    name = "at once"

    def __init__(self, ours: Ours) -> None:
        self.ours = ours

    def step(self, number: int) -> float:
        with at_once():
            return self.ours.step(number)


def _contenders(rank: int, size: Any) -> list[Contender]:
    return [two_ranks(size, rank, "heptad", **CUT), Waiting(two_ranks(size, rank, "unhidden", **CUT))]


def hidden(effort: Effort) -> list[Row]:
    """Overlapped ÷ waited for at once, cut stream, T = 2 over a link."""
    with Netbox(2, RATE) as box:
        few = Effort(min(2, effort.launches), max(3, effort.rounds), 1)
        runs = launches(2, SMALL, _contenders, few, box)
    medians = {name: statistics.median(t for times in runs for t in times[name]) for name in runs[0]}
    note = ", ".join(f"{name} {1e3 * seconds:.0f} ms" for name, seconds in medians.items())
    what = "tensor T=2, cut stream: overlapped ÷ each region waited for at once, 2 nodes × 1, 1 Gbit/s"
    return [row_of(what, ratio(runs, "heptad", ["at once"]), None, note=note)]
