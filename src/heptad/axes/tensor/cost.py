"""What the tensor axis sends in a step, from the job's facts alone. Pure, no torch.

`traffic` walks the model's regions in order, with what is trainable before each: a backward that no gradient needs
sends nothing. S = B·L·D elements of the stream (padded to a multiple of T where it is cut):

| region | forward | backward |
|---|---|---|
| token table leaves | reduce S | gather S |
| attention and MLP enter (q k v; gate up) | gather S | reduce S, gather S again unless `keep_gathered` |
| attention and MLP leave (out; down) | reduce S | gather S |
| head enters | gather S | reduce S, gather S again unless `keep_gathered` |
| loss | all-reduce of B·L maxima and of 2·B·L sums, fp32 or wider | |

Whole stream: "reduce" is an all-reduce and a gather sends nothing. Cut stream: a reduce-scatter and an all-gather.
Gradients that are only a part are summed after the step by the data axis's engine (`axes/data/cost.py`). Sources:
FIELD.md, arXiv 2205.05198 §4.2. Read next: `mesh/regions.py`, `account/traffic.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from heptad.models.spec import ParamSpec, UnitSpec
from heptad.schedule.action import Segments
from heptad.trace import Transfer
from heptad.units import sent_bytes


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a micro-batch sends: T ranks, B·L tokens, width D, bytes of an element of the stream and of the loss."""

    tp: int
    tokens: int
    width: int
    element_bytes: int
    loss_bytes: int
    sequence: bool
    keep: bool
    chunks: int = 1

    @property
    def stream_bytes(self) -> int:
        """S in bytes, padded where the stream is cut."""
        tokens = -(-self.tokens // self.tp) * self.tp if self.sequence else self.tokens
        return tokens * self.width * self.element_bytes


class _Count:
    """Regions by phase, added up over units; `runs`: how many micro-batches the unit that is looked at runs on here."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes, self.runs, self.counts = sizes, 0, dict[tuple[str, str, int], int]()

    def _add(self, op: str, phase: str, full_bytes: int) -> None:
        key = op, phase, full_bytes
        self.counts[key] = self.counts.get(key, 0) + self.runs

    def gather(self, phase: str) -> None:
        if self.sizes.sequence:
            self._add("all_gather", phase, self.sizes.stream_bytes)

    def reduce(self, phase: str) -> None:
        op = "reduce_scatter" if self.sizes.sequence else "all_reduce"
        self._add(op, phase, self.sizes.stream_bytes)

    def gather_again(self) -> None:
        if not self.sizes.keep:
            self.gather("backward")

    def loss(self) -> None:
        for numbers in (1, 2):
            self._add("all_reduce", "forward", numbers * self.sizes.tokens * self.sizes.loss_bytes)


def traffic(
    units: Sequence[UnitSpec], specs: Sequence[ParamSpec], sizes: Sizes, runs: Sequence[int], recompute: Segments = ()
) -> list[Transfer]:
    """One training step of one rank of the decoder; `recompute`: units whose forward runs again in the backward.

    units, specs: of the whole model. runs: of each unit, how many micro-batches it runs on here (0: on other stages).
    """
    if sizes.tp == 1:
        return []
    trained = {spec.name for spec in specs if spec.trainable}
    again = {unit for segment in recompute for unit in segment}
    count, alive = _Count(sizes), False
    for index, unit in enumerate(units):
        count.runs = runs[index]
        if unit.kind == "embed":
            alive = _embed(count, trained)
        elif unit.kind == "block":
            alive = _block(count, trained, unit.name, alive, index in again)
        else:
            _head(count, trained, unit, alive)
    return [
        Transfer(op, "tp", phase, times * sent_bytes(op, full_bytes, sizes.tp), times)
        for (op, phase, full_bytes), times in count.counts.items()
        if times
    ]


def _any(trained: set[str], *prefixes: str) -> bool:
    return any(name.startswith(prefix + ".") for prefix in prefixes for name in trained)


def _embed(count: _Count, trained: set[str]) -> bool:
    """Returns whether what leaves has a gradient."""
    count.reduce("forward")
    if _any(trained, "embed.tokens"):
        count.gather("backward")
    return _any(trained, "embed")


def _block(count: _Count, trained: set[str], name: str, alive: bool, again: bool) -> bool:
    """Two regions, forward (twice where it runs again) and backward; `alive`: the input has a gradient."""
    backward = alive or _any(trained, name)
    for phase in ["forward"] + ["backward"] * (again and backward):
        for _ in range(2):
            count.gather(phase)
            count.reduce(phase)
    attention, mlp = f"{name}.attention", f"{name}.mlp"
    inside = (f"{attention}.q_norm", f"{attention}.k_norm")
    for norm, columns, inner, row in (
        (f"{attention}.norm", [f"{attention}.{part}" for part in "qkv"], inside, f"{attention}.out"),
        (f"{mlp}.norm", [f"{mlp}.gate", f"{mlp}.up"], (), f"{mlp}.down"),
    ):
        enters = alive or _any(trained, norm)
        if enters:
            count.reduce("backward")
        if _any(trained, *columns):
            count.gather_again()
        leaves = enters or _any(trained, *columns, *inner, row)
        if leaves:
            count.gather("backward")
        alive = alive or leaves
    return alive


def _head(count: _Count, trained: set[str], unit: UnitSpec, alive: bool) -> None:
    count.gather("forward")
    count.loss()
    weight = unit.borrowed[0] if unit.borrowed else f"{unit.name}.out.weight"
    enters = alive or _any(trained, f"{unit.name}.norm")
    if enters:
        count.reduce("backward")
    if weight in trained or (enters and count.sizes.chunks > 1):
        count.gather_again()
