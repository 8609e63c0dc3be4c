"""What the tensor axis sends in a step, from the job's facts alone. Pure, no torch.

`traffic` walks the model's regions in order, with what is trainable before each: a backward that no gradient needs
sends nothing. S = B·L·D elements of the stream (padded to a multiple of T where it is cut):

| region | forward | backward |
|---|---|---|
| token table leaves | reduce S | gather S |
| attention and MLP enter (q k v; gate up) | gather S | reduce S, gather S again unless `keep_gathered` |
| attention and MLP leave (out; down) | reduce S | gather S |
| latents enter (q_b of r, kv_b of c, the shared key of p features a token, not D) | likewise | so, not the key again |
| routed experts enter and leave, whole stream | all-gather S, padded | all-gather S, padded |
| head enters, each depth of a further prediction too | gather S | reduce S, gather S again unless `keep_gathered` |
| loss, of each depth too | all-reduce of B·L maxima and of 2·B·L sums, fp32 or wider | |

Whole stream: "reduce" is an all-reduce and a gather sends nothing. Cut stream: a reduce-scatter and an all-gather, and
routed experts, which see a rank's own tokens, send nothing here. A further prediction is a token table, a block and a
head. Gradients that are only a part are summed after the step by the data axis's engine (`axes/data/cost.py`). Source:
arXiv 2205.05198 §4.2. Read next: `mesh/regions.py`, `account/traffic.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
        return self.region_bytes(self.width)

    def region_bytes(self, width: int) -> int:
        """All tokens with `width` features each, in bytes, padded where the stream is cut."""
        return (self.padded if self.sequence else self.tokens) * width * self.element_bytes

    @property
    def padded(self) -> int:
        """Tokens, a multiple of T."""
        return -(-self.tokens // self.tp) * self.tp


class _Count:
    """Regions by phase, added up over units; `runs`: how many micro-batches the unit that is looked at runs on here."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes, self.runs, self.counts = sizes, 0, dict[tuple[str, str, int], int]()

    def _add(self, op: str, phase: str, full_bytes: int) -> None:
        key = op, phase, full_bytes
        self.counts[key] = self.counts.get(key, 0) + self.runs

    def gather(self, phase: str, width: int | None = None) -> None:
        """width: features a token, the stream's when None."""
        if self.sizes.sequence:
            self._add("all_gather", phase, self.sizes.region_bytes(width or self.sizes.width))

    def reduce(self, phase: str, width: int | None = None) -> None:
        op = "reduce_scatter" if self.sizes.sequence else "all_reduce"
        self._add(op, phase, self.sizes.region_bytes(width or self.sizes.width))

    def gather_again(self, width: int | None = None) -> None:
        if not self.sizes.keep:
            self.gather("backward", width)

    def gather_own(self, phase: str) -> None:
        """Of a whole stream the tokens that each rank routed, or their gradients."""
        if not self.sizes.sequence:
            self._add("all_gather", phase, self.sizes.padded * self.sizes.width * self.sizes.element_bytes)

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
    walk = _Walk(_Count(sizes), {spec.name: spec for spec in specs})
    again, alive = {unit for segment in recompute for unit in segment}, False
    for index, unit in enumerate(units):
        walk.count.runs = runs[index]
        if unit.kind == "embed":
            alive = walk.embed()
        elif unit.kind == "block":
            alive = walk.block(unit.name, alive, index in again)
        else:
            walk.head(unit, alive)
    return [
        Transfer(op, "tp", phase, times * sent_bytes(op, full_bytes, sizes.tp), times)
        for (op, phase, full_bytes), times in walk.count.counts.items()
        if times
    ]


class _Walk:
    """Through the units in order; `specs`: every parameter by name. `alive`: what is at hand has a gradient."""

    def __init__(self, count: _Count, specs: Mapping[str, ParamSpec]) -> None:
        self.count, self.specs = count, specs
        self.trained = {name for name, spec in specs.items() if spec.trainable}

    def any(self, *prefixes: str) -> bool:
        """Whether a parameter of these modules is trained."""
        return any(name.startswith(prefix + ".") for prefix in prefixes for name in self.trained)

    def tokens(self, trained: bool) -> None:
        """A token table leaves."""
        self.count.reduce("forward")
        if trained:
            self.count.gather("backward")

    def embed(self) -> bool:
        """Returns whether what leaves has a gradient."""
        self.tokens(self.any("embed.tokens"))
        return self.any("embed")

    def block(self, name: str, alive: bool, again: bool) -> bool:
        """Attention and MLP, forward (twice where it runs again) and backward."""
        phases = ["forward"] + ["backward"] * (again and (alive or self.any(name)))
        attention, mlp = f"{name}.attention", f"{name}.mlp"
        latent, routed = (f"{part}.weight" in self.specs for part in (f"{attention}.kv_a", f"{mlp}.router.gate"))
        if latent:
            alive = self._latent(attention, alive, phases)
        else:
            parts, norms = [f"{attention}.{part}" for part in "qkv"], [f"{attention}.{part}_norm" for part in "qk"]
            alive = self._region(alive, phases, f"{attention}.norm", parts, f"{attention}.out", norms)
        if routed:
            return self._routed(mlp, alive, phases)
        return self._region(alive, phases, f"{mlp}.norm", [f"{mlp}.gate", f"{mlp}.up"], f"{mlp}.down")

    def _region(
        self, alive: bool, phases: list[str], norm: str, columns: list[str], row: str, inside: Sequence[str] = ()
    ) -> bool:
        """`columns` enter behind `norm`, `row` leaves; `inside`: modules between them."""
        for phase in phases:
            self.count.gather(phase)
            self.count.reduce(phase)
        enters = alive or self.any(norm)
        if enters:
            self.count.reduce("backward")
        if self.any(*columns):
            self.count.gather_again()
        return self._leaves(alive, enters or self.any(*columns, *inside, row))

    def _leaves(self, alive: bool, leaves: bool) -> bool:
        if leaves:
            self.count.gather("backward")
        return alive or leaves

    def _latent(self, name: str, alive: bool, phases: list[str]) -> bool:
        """What makes latents works on the stream; what reads them enters."""
        rank = self.specs[f"{name}.kv_b.weight"].shape[1]
        key = self.specs[f"{name}.kv_a.weight"].shape[0] - rank
        second = f"{name}.q_b"
        queries = self.specs.get(f"{second}.weight")
        width = None if queries is None else queries.shape[1]
        for phase in phases:
            for size in (width, rank, key):
                self.count.gather(phase, size)
            self.count.reduce(phase)
        before = alive or self.any(f"{name}.norm")
        latents, made = f"{name}.kv_a", before or self.any(f"{name}.kv_a")
        parts = [f"{name}.q_a", f"{name}.q_norm"]
        for enters, reader, size in (
            (before or (queries is not None and self.any(*parts)), f"{name}.q" if queries is None else second, width),
            (made or self.any(f"{name}.kv_norm"), f"{name}.kv_b", rank),
        ):
            if enters:
                self.count.reduce("backward", size)
            if self.any(reader):
                self.count.gather_again(size)
        if made:
            self.count.reduce("backward", key)
        readers = (*parts, second, f"{name}.q", latents, f"{name}.kv_norm", f"{name}.kv_b", f"{name}.out")
        return self._leaves(alive, before or self.any(*readers))

    def _routed(self, name: str, alive: bool, phases: list[str]) -> bool:
        """Routed experts see a rank's own tokens; shared ones are a region as any MLP."""
        for phase in phases:
            self.count.gather_own(phase)
        if alive or self.any(f"{name}.norm"):
            self.count.gather_own("backward")
        if f"{name}.shared.down.weight" in self.specs:
            columns = [f"{name}.shared.gate", f"{name}.shared.up"]
            self._region(alive, phases, f"{name}.norm", columns, f"{name}.shared.down")
        return alive or self.any(name)

    def head(self, unit: UnitSpec, alive: bool) -> None:
        """The loss, and each further prediction with its own."""
        weight = f"{unit.name}.out.weight"
        weight = weight if weight in self.specs else TOKENS
        self._loss(f"{unit.name}.norm", weight, alive)
        depth = 0
        while f"{unit.name}.predictions.{depth}.join.weight" in self.specs:
            name = f"{unit.name}.predictions.{depth}"
            self.tokens(TOKENS in self.trained)
            joined = (f"{name}.{part}" for part in ("stream_norm", "token_norm", "join"))
            alive = alive or TOKENS in self.trained or self.any(*joined)
            alive = self.block(f"{name}.block", alive, again=False)
            self._loss(f"{name}.norm", weight, alive)
            depth += 1

    def _loss(self, norm: str, weight: str, alive: bool) -> None:
        """The head enters behind `norm`."""
        self.count.gather("forward")
        self.count.loss()
        enters = alive or self.any(norm)
        if enters:
            self.count.reduce("backward")
        if weight in self.trained or (enters and self.count.sizes.chunks > 1):
            self.count.gather_again()


TOKENS = "embed.tokens.weight"
