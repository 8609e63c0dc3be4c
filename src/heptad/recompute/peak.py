"""Bytes of activations alive after each compute action of a rank's program, with and without recompute. Pure, no torch.

`alive` walks a program as the executor runs it, with the bytes of `cost.py`: F of a unit adds what its graph keeps (of
a recomputed segment only the first one's input), C makes the graphs of a segment, B frees a unit's and leaves the
gradient of its input. Between the stages of a pipeline an output is alive until its send has been waited for, an input
or a gradient from the start of its receive. Weights that an asynchronous schedule keeps for backwards to come are there
too (`schedule/versions.py`). The maximum is the peak between actions.

Tables that blocks share (rotary, the mask as a bias) are made by the first block of a micro-batch, and again when it
comes back after another one's; each is alive as long as a graph refers to it, the newest until the next is made.

Of a model of L equal blocks that keep A bytes each and have an input of a bytes, segments of j blocks hold
L/j · a + j · A at once: least where j = √(L·a/A), and near √L where a block keeps about its input (Chen et al.,
arXiv 1604.06174, §4.1); a transformer's block keeps 10 to 20 inputs, so shorter segments hold less. The time is the
same for any j: each recomputed block runs forward once more. Read next: `cost.py`, `policy.py`, docs/memory.md.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from heptad.errors import ConfigError
from heptad.recompute import cost
from heptad.recompute.policy import Mode
from heptad.recompute.sizes import Sizes
from heptad.recompute.split_cost import block_after, embed_after, head_after
from heptad.schedule.action import COMPUTE, WAIT_OF_TRANSPORT, Action, Kind, Segments

Key = tuple[int, int]
"""Unit and micro-batch."""
_References = tuple[int | None, int | None]
"""Numbers of a rotary table and a mask."""


def alive(
    sizes: Sizes | Sequence[Sizes],
    program: Iterable[Action],
    segments: Segments = (),
    selective: Collection[int] = (),
    version_bytes: int | None = None,
) -> list[tuple[Action, int]]:
    """(action, bytes alive after it) of each compute action of a decoder on one rank.

    segments: units recomputed as `policy.segments` gives them; selective: units in mode "selective". `sizes`: of every
    micro-batch, or those of each. The last unit's output is counted until the end. version_bytes: of the stage's
    trained weights, where an asynchronous schedule keeps older versions of them. Raises ConfigError for pairs in turns.
    """
    program, found = tuple(program), []
    if any(action.kind is Kind.PAIRED for action in program):
        rule = "bytes of activations are not known inside a pair of two micro-batches that run in turns"
        raise ConfigError.of("layout.schedule", "pairs", rule, "a schedule without pairs, or ep = 1")
    split = any(action.kind is Kind.INPUT_GRAD for action in program)
    if split:
        sizes = replace(sizes, split=True) if isinstance(sizes, Sizes) else [replace(one, split=True) for one in sizes]
    walk = _Walk(sizes, segments, frozenset(selective), version_bytes)
    for action in program:
        walk.run(action)
        if action.kind in COMPUTE:
            found.append((action, walk.now()))
    return found


def forward_bytes(sizes: Sizes, segments: Segments = (), selective: Collection[int] = ()) -> int:
    """What one micro-batch keeps between its forward and its backward, all units together."""
    program = [Action(Kind.FORWARD, unit, 0) for unit in range(sizes.section.layers + 2)]
    return alive(sizes, program, segments, selective)[-1][1]


def extra_forwards(segments: Segments) -> int:
    """Block forwards that recompute adds to each micro-batch: each recomputed block once, whatever the segments."""
    return sum(map(len, segments))


class _Tables:
    """One kind of table that blocks share: every one that was made, as what it is of and its bytes; the last is held
    for the next block.
    """

    def __init__(self) -> None:
        self.made: list[tuple[int | None, int]] = []

    def of(self, what: int | None, num_bytes: int) -> int:
        """The number of the one that a block reads: the last, or a new one."""
        if not self.made or self.made[-1][0] != what:
            self.made.append((what, num_bytes))
        return len(self.made) - 1

    def alive(self, referred: set[int]) -> int:
        """Bytes of the last and of those that graphs refer to."""
        return sum(self.made[number][1] for number in referred | set(range(len(self.made))[-1:]))


class _Walk:
    """What is alive: of a graph (and which tables it refers to); boundaries (a unit's output); gradients of outputs;
    messages under way.
    """

    def __init__(
        self,
        sizes: Sizes | Sequence[Sizes],
        segments: Segments,
        selective: frozenset[int],
        version_bytes: int | None,
    ) -> None:
        self.sizes, self.selective, self.version_bytes = sizes, selective, version_bytes
        self.segment = {unit: segment for segment in segments for unit in segment}
        self.graphs: dict[Key, tuple[int, _References]] = {}
        self.boundaries: set[Key] = set()
        self.grads: set[Key] = set()
        self.under_way: set[tuple[Kind, Key]] = set()
        self.rotary, self.masks = _Tables(), _Tables()
        self.outputs = self.updates = 0
        self.versions: dict[int, int] = {}  # micro-batch -> updates before the weights that are kept for it

    def of(self, microbatch: int) -> Sizes:
        """Its sizes."""
        return self.sizes if isinstance(self.sizes, Sizes) else self.sizes[microbatch]

    def kept(self, key: Key, spent: bool = False) -> int:
        """What a unit keeps: its graph, or once I has spent that, what W reads."""
        unit, sizes = key[0], self.of(key[1])
        mode: Mode = "selective" if unit in self.selective else "none"
        if unit == 0:
            terms = embed_after(sizes) if spent else cost.embed(sizes)
        elif unit == sizes.section.layers + 1:
            terms = head_after(sizes) if spent else cost.head(sizes)
            del terms["loss"]  # it outlives the graph
        else:
            terms = block_after(sizes, mode, unit - 1) if spent else cost.block(sizes, mode, unit - 1)
        return sum(terms.values())

    def run(self, action: Action) -> None:
        """One action; those of buckets keep parameters and gradients, not activations."""
        unit, key = action.index, (action.index, action.microbatch)
        below = unit - 1, action.microbatch
        match action.kind:
            case Kind.FORWARD:
                self._forward(key, below)
            case Kind.RECOMPUTE:
                self.boundaries.discard(below)
                self.graphs[key] = self.kept(key), self._tables(key)
                if unit != self.segment[unit][-1]:
                    self.boundaries.add(key)
            case Kind.BACKWARD | Kind.INPUT_GRAD:
                self.grads.discard(key)
                if unit > 0:
                    self.grads.add(below)
                if action.kind is Kind.BACKWARD:
                    del self.graphs[key]
                else:
                    self.graphs[key] = self.kept(key, spent=True), (None, None)
            case Kind.WEIGHT_GRAD:
                del self.graphs[key]
            case Kind.SEND:
                self.boundaries.remove(key)
            case Kind.SEND_GRAD:
                self.grads.remove(below)
            case Kind.WAIT_RECEIVE:
                self.boundaries.add(below)
            case Kind.WAIT_RECEIVE_GRAD:
                self.grads.add(key)
            case Kind.KEEP:
                self.versions[action.microbatch] = self.updates
            case Kind.NEWEST:
                del self.versions[action.microbatch]
            case Kind.UPDATE_STAGE:
                self.updates += 1
        if action.kind in WAIT_OF_TRANSPORT:
            self.under_way.add((WAIT_OF_TRANSPORT[action.kind], key))
        self.under_way.discard((action.kind, key))

    def _forward(self, key: Key, below: Key) -> None:
        unit, sizes = key[0], self.of(key[1])
        again = unit in self.segment
        if not (again and unit == self.segment[unit][0]):
            self.boundaries.discard(below)
        table = self._tables(key)
        if not again:
            self.graphs[key] = self.kept(key), table
        if unit == sizes.section.layers + 1:
            self.outputs += sizes.wide_bytes
        else:
            self.boundaries.add(key)

    def _tables(self, key: Key) -> _References:
        """The shared tables that a unit reads: those its graph refers to."""
        sizes, microbatch = self.of(key[1]), key[1]
        layers = sizes.section.layers
        if key[0] == 0 or (key[0] > layers and not sizes.section.mtp_depth):
            return None, None
        terms = cost.shared(sizes)
        rotary, bias, mask = (terms.get(name, 0) for name in ("rotary table", "attention bias", "attention mask"))
        seen = self.masks.of(microbatch if sizes.documents else None, bias or mask) if bias or mask else None
        return self.rotary.of(microbatch, rotary) if rotary else None, seen if bias else None

    def now(self) -> int:
        """Bytes alive."""
        total, graphs = self.outputs, self.graphs.values()
        if self.versions:
            assert self.version_bytes is not None, "the schedule keeps weights, and their bytes are not given"
            total += len(set(self.versions.values())) * self.version_bytes
        for microbatch in (key[1] for key in (*self.boundaries, *self.grads, *(key for _, key in self.under_way))):
            total += self.of(microbatch).stream_bytes
        for place, tables in enumerate((self.rotary, self.masks)):
            total += tables.alive({number for _, held in graphs if (number := held[place]) is not None})
        return total + sum(num_bytes for num_bytes, _ in graphs)
