"""Bytes of activations alive after each compute action of a micro-batch, with and without recompute. Pure, no torch.

`alive` walks the compute actions of a program as the executor runs them, with the bytes of `cost.py`: F of a unit adds
what its graph keeps (of a recomputed segment only the first one's input), C makes the graphs of a segment, B frees a
unit's and leaves the gradient of its input. Its maximum is the peak between actions.

Of a model of L equal blocks that keep A bytes each and have an input of a bytes, segments of j blocks hold
L/j · a + j · A at once: least where j = √(L·a/A), and near √L where a block keeps about its input (Chen et al.,
arXiv 1604.06174, §4.1); a transformer's block keeps 10 to 20 inputs, so shorter segments hold less. The time is the
same for any j: each recomputed block runs forward once more. Read next: `cost.py`, `policy.py`, docs/memory.md.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from heptad.recompute import cost
from heptad.recompute.cost import Sizes
from heptad.schedule.action import COMPUTE, Action, Kind, Segments


def alive(
    sizes: Sizes, program: Iterable[Action], segments: Segments = (), selective: Collection[int] = ()
) -> list[tuple[Action, int]]:
    """(action, bytes alive after it) of each compute action of a decoder on one rank.

    segments: units recomputed as `policy.segments` gives them; selective: units in mode "selective". `sizes` are those
    of every micro-batch. The last unit's output is counted until the end, the shared tables from the first block on.
    """
    walk = _Walk(sizes, segments, frozenset(selective))
    return [(action, walk.after(action)) for action in program if action.kind in COMPUTE]


def forward_bytes(sizes: Sizes, segments: Segments = (), selective: Collection[int] = ()) -> int:
    """What one micro-batch keeps between its forward and its backward, all units together."""
    program = [Action(Kind.FORWARD, unit, 0) for unit in range(sizes.section.layers + 2)]
    return alive(sizes, program, segments, selective)[-1][1]


def extra_forwards(segments: Segments) -> int:
    """Block forwards that recompute adds to each micro-batch: each recomputed block once, whatever the segments."""
    return sum(map(len, segments))


class _Walk:
    """What is alive, by (unit, micro-batch): of a graph; a boundary (a unit's output); the gradient of an input."""

    def __init__(self, sizes: Sizes, segments: Segments, selective: frozenset[int]) -> None:
        self.sizes, self.last = sizes, sizes.section.layers + 1
        self.segment = {unit: segment for segment in segments for unit in segment}
        self.kept = [self._unit(unit, unit in selective) for unit in range(self.last + 1)]
        self.graphs: dict[tuple[int, int], int] = {}
        self.boundaries: set[tuple[int, int]] = set()
        self.grads: set[tuple[int, int]] = set()
        self.shared = self.outputs = 0

    def _unit(self, unit: int, selective: bool) -> int:
        if unit == 0:
            return sum(cost.embed(self.sizes).values())
        if unit == self.last:
            return sum(cost.head(self.sizes).values()) - self.sizes.wide_bytes  # the loss outlives its graph
        return sum(cost.block(self.sizes, "selective" if selective else "none", unit - 1).values())

    def after(self, action: Action) -> int:
        """Run one compute action; bytes alive then."""
        unit, key = action.index, (action.index, action.microbatch)
        below = unit - 1, action.microbatch
        match action.kind:
            case Kind.FORWARD:
                self._forward(key, below)
            case Kind.RECOMPUTE:
                self.boundaries.discard(below)
                self.graphs[key] = self.kept[unit]
                if unit != self.segment[unit][-1]:
                    self.boundaries.add(key)
            case Kind.BACKWARD | Kind.WEIGHT_GRAD:
                del self.graphs[key]
                self.grads.discard(key)
                if unit > 0:
                    self.grads.add(below)
        streams = len(self.boundaries) + len(self.grads)
        return sum(self.graphs.values()) + streams * self.sizes.stream_bytes + self.shared + self.outputs

    def _forward(self, key: tuple[int, int], below: tuple[int, int]) -> None:
        unit = key[0]
        again = unit in self.segment
        if not (again and unit == self.segment[unit][0]):
            self.boundaries.discard(below)
        if not again:
            self.graphs[key] = self.kept[unit]
        if unit == self.last:
            self.outputs += self.sizes.wide_bytes
        else:
            self.boundaries.add(key)
        if unit == 1:
            self.shared = sum(cost.shared(self.sizes).values())
