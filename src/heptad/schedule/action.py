"""A step as data: actions on (unit or bucket, micro-batch), with a text form that round-trips. Pure, no torch.

Text: index, kind, micro-batch. `3F0` runs unit 3 forward on micro-batch 0; `2G1` starts gathering bucket 2 for
micro-batch 1 and `2g1` waits for it. Capital: start, or an action that is done when it returns; small: the wait for the
communication that the capital started. `U` updates the parameters. `2B1 & 4F5` is an overlapped pair: two compute
actions of different micro-batches that run in turns, the left one first (`mesh/turns.py`). Where a pipeline is never
flushed inside a step, a stage updates its own after each micro-batch (`0V3`) and keeps the weights that forwards under
way have used (`K`, `X`, `N`, see `versions.py`). A program is one line per rank, actions separated by blanks. What is
computed, and moved to host memory and back, is a *unit*; what is gathered, dropped and reduced is a *bucket* of
parameters.
Read next: `lower.py` (who places what), `check.py` (what is proven), `executor.py` (the loop that runs it).
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass


class Kind(enum.Enum):
    """What an action does. F, B, I, W, C, O to p and S to h act on a unit, G to a on a bucket, K, X, N and V on a
    stage, U on everything."""

    FORWARD = "F"
    BACKWARD = "B"
    """Input and weight gradients, one after the other: I and W in one action."""
    INPUT_GRAD = "I"
    WEIGHT_GRAD = "W"
    RECOMPUTE = "C"
    """The unit's forward again, now keeping its graph."""
    OUT = "O"
    """What the unit keeps for its backward (its graph's tensors, or the input it is recomputed from) starts for the
    host's memory."""
    WAIT_OUT = "o"
    """It is there; the device's copy is freed."""
    FETCH = "P"
    """Memory on the device again, and the way back starts."""
    WAIT_FETCH = "p"
    GATHER = "G"
    WAIT_GATHER = "g"
    DROP = "D"
    """The full parameters are no longer valid (their storage is freed where they are sharded)."""
    REDUCE = "R"
    WAIT_REDUCE = "r"
    """The reduced gradient is in the shard; the full gradient's memory is free again."""
    ALL_REDUCE = "A"
    """Sum of the shard's gradient over the replicas of the shard (HSDP)."""
    WAIT_ALL_REDUCE = "a"
    SEND = "S"
    """The unit's output starts for the rank of the stage above."""
    WAIT_SEND = "s"
    RECEIVE = "E"
    """Memory for the unit's input, which the rank of the stage below will send."""
    WAIT_RECEIVE = "e"
    SEND_GRAD = "T"
    """The gradient of the unit's input starts for the rank of the stage below."""
    WAIT_SEND_GRAD = "t"
    RECEIVE_GRAD = "H"
    """Memory for the gradient of the unit's output."""
    WAIT_RECEIVE_GRAD = "h"
    KEEP = "K"
    """A copy of the stage's present weights for the micro-batch's backward, one for all that need the same."""
    EXCHANGE = "X"
    """The weights kept for the micro-batch are the stage's, the newest wait in their place."""
    NEWEST = "N"
    """The newest are the stage's again, what was kept for the micro-batch is free."""
    UPDATE_STAGE = "V"
    """The stage's weights are updated from the micro-batch's gradient."""
    UPDATE = "U"
    PAIRED = "&"
    """The compute actions beside it are of one overlapped pair."""


COMPUTE = frozenset({Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD, Kind.RECOMPUTE})
WAIT_OF = {
    Kind.GATHER: Kind.WAIT_GATHER,
    Kind.REDUCE: Kind.WAIT_REDUCE,
    Kind.ALL_REDUCE: Kind.WAIT_ALL_REDUCE,
}
"""Collectives: each start and its wait."""
WAIT_OF_TRANSPORT = {
    Kind.SEND: Kind.WAIT_SEND,
    Kind.RECEIVE: Kind.WAIT_RECEIVE,
    Kind.SEND_GRAD: Kind.WAIT_SEND_GRAD,
    Kind.RECEIVE_GRAD: Kind.WAIT_RECEIVE_GRAD,
}
"""Between two stages of a pipeline: the other rank's program has the other half."""
TRANSPORT = frozenset(WAIT_OF_TRANSPORT) | frozenset(WAIT_OF_TRANSPORT.values())
WAIT_OF_MOVE = {Kind.OUT: Kind.WAIT_OUT, Kind.FETCH: Kind.WAIT_FETCH}
"""Moves between one rank's device and its host: no other rank takes part."""
VERSIONS = frozenset({Kind.KEEP, Kind.EXCHANGE, Kind.NEWEST})
"""Which weights a stage has: copies on one rank's device."""
MOVES = frozenset(WAIT_OF_MOVE) | frozenset(WAIT_OF_MOVE.values())
_ALONE = frozenset({Kind.UPDATE, Kind.PAIRED})
"""Kinds that stand for themselves."""


@dataclass(frozen=True, slots=True)
class Action:
    """`index`: a unit for COMPUTE, MOVES and TRANSPORT, a stage for VERSIONS and V, else a bucket; -1 for U and &."""

    kind: Kind
    index: int = -1
    microbatch: int = -1

    def __str__(self) -> str:
        return self.kind.value if self.kind in _ALONE else f"{self.index}{self.kind.value}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Inverse of `str`; ValueError names the text that is no action."""
        kinds = {kind.value: kind for kind in Kind}
        if text in kinds and kinds[text] in _ALONE:
            return cls(kinds[text])
        found = re.fullmatch(r"(\d+)([A-TV-Za-z])(\d+)", text)
        if found is None or found[2] not in kinds:
            raise ValueError(f"{text!r} is no action; expected e.g. 3F0, 2G1 or U")
        return cls(kinds[found[2]], int(found[1]), int(found[3]))


Program = tuple[Action, ...]


def format_program(program: Iterable[Action]) -> str:
    """One line: the actions' text forms, separated by blanks."""
    return " ".join(map(str, program))


def parse_program(line: str) -> Program:
    """Inverse of `format_program`."""
    return tuple(Action.parse(word) for word in line.split())


def steps_of(program: Program) -> Iterator[range]:
    """Positions of each step in turn: of one action, or of an overlapped pair with the & between its actions."""
    at = 0
    while at < len(program):
        end = at + 1
        while end + 1 < len(program) and program[end].kind is Kind.PAIRED:
            end += 2
        yield range(at, end)
        at = end


@dataclass(frozen=True, slots=True)
class UnitUse:
    """Which buckets a unit touches: read by F and C, read by I (and B), written by W (and B).

    `backward` False: nothing below or in this unit is trainable, so it has no B.
    """

    name: str
    forward: tuple[int, ...]
    backward_reads: tuple[int, ...]
    writes: tuple[int, ...]
    backward: bool = True

    def reads(self, kind: Kind) -> tuple[int, ...]:
        """Buckets whose full parameters an action of `kind` needs."""
        if kind in (Kind.FORWARD, Kind.RECOMPUTE):
            return self.forward
        return self.backward_reads if kind in (Kind.BACKWARD, Kind.INPUT_GRAD) else ()

    def written(self, kind: Kind) -> tuple[int, ...]:
        """Buckets whose gradient an action of `kind` adds to."""
        return self.writes if kind in (Kind.BACKWARD, Kind.WEIGHT_GRAD) else ()


Segments = tuple[tuple[int, ...], ...]
"""Neighbouring units, lowest first, that are recomputed together from the input of the first, which alone is kept."""


def with_backward(segments: Segments, units: Sequence[UnitUse]) -> Segments:
    """The segments without units that have no backward: nothing of those is kept, so nothing is made again."""
    kept = (tuple(unit for unit in segment if units[unit].backward) for segment in segments)
    return tuple(segment for segment in kept if segment)


Group = tuple[tuple[int, ...], tuple[int, ...]]
"""Units that run C, then units that run backward: a segment, or one unit that is not recomputed."""


def backward_order(units: Sequence[UnitUse], recompute: Segments, among: range | None = None) -> tuple[Group, ...]:
    """The groups in the order of a backward: in each, C from the lowest unit up, then backward down.

    among: only these units, whose segments lie within them.
    """
    first = {segment[-1]: segment for segment in with_backward(recompute, units)}
    again = {unit for segment in first.values() for unit in segment}
    groups: list[Group] = []
    for unit in reversed(range(len(units)) if among is None else among):
        if unit in first:
            groups.append((first[unit], first[unit][::-1]))
        elif unit not in again and units[unit].backward:
            groups.append(((), (unit,)))
    return tuple(groups)


def gradient_accumulation(units: Sequence[UnitUse], microbatches: int, recompute: Segments = ()) -> Program:
    """Compute actions of a rank without a pipeline: micro-batches forward, then backward; C as in `backward_order`."""
    program: list[Action] = []
    for microbatch in range(microbatches):
        program += [Action(Kind.FORWARD, unit, microbatch) for unit in range(len(units))]
        for again, down in backward_order(units, recompute):
            program += [Action(Kind.RECOMPUTE, unit, microbatch) for unit in again]
            program += [Action(Kind.BACKWARD, unit, microbatch) for unit in down]
    return tuple(program)


def forward_only(units: Sequence[UnitUse], microbatches: int) -> Program:
    """The compute actions of an evaluation."""
    return tuple(Action(Kind.FORWARD, unit, mb) for mb in range(microbatches) for unit in range(len(units)))
