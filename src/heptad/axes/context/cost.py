"""What the context axis sends in a step, from the job's facts alone. Pure, no torch.

Only the core of attention sends, so each block does, those that predict further tokens too, once a micro-batch and once
more where it is recomputed. With n tokens of a row on a rank, n·U on a ring rank; H and K query and kv heads of the
tensor rank; e bytes of an element, w = max(e, 4) of what is accumulated:

| core | forward | backward |
|---|---|---|
| ring of R | R-1 sends of 2·B·n·U·K'·d·e | the same, and R-1 sends of 2·B·n·U·K'·d·w |
| heads dealt over U | all-to-all of B·n·(H + 2·K″)·d·e, another of B·n·H·d·e | the same two |
| gather | all-gather of 2·B·n·C·K·d·e | the same, and a reduce-scatter of 2·B·n·C·K·d·w |

K″ is K where U divides it; else kv heads are sent as often as ranks need them, as few as make U equal parts:
K″ = H / gcd(H/K, H/U). Latent attention has K = H heads of nope + rope features, values padded.
A ring of ranks that deal heads has K' = K″/U kv heads. A hop's buffer travels on, seen or not,
so documents and windows change nothing here. A backward is all or nothing: it runs when a query, key or value has a
gradient. Sources: ring attention, arXiv 2310.01889; Ulysses, arXiv 2309.14509; all-gather, arXiv 2407.21783
§3.3.2. Read next: `ring.py`, `ulysses.py`, `gather.py`, `account/traffic.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from heptad.config.context import degrees, sent_kv_heads
from heptad.config.schema import Job
from heptad.models.spec import ParamSpec, UnitSpec
from heptad.precision.dtypes import Dtypes
from heptad.schedule.action import Segments
from heptad.trace import Transfer
from heptad.units import BYTES_PER_ELEMENT, sent_bytes


@dataclass(frozen=True, slots=True)
class Sizes:
    """One micro-batch on one rank: R and U, whether keys and values are gathered; B·n tokens; heads of the tensor rank,
    d; bytes of an element and of what is accumulated.
    """

    ring: int
    dealt: int
    gathers: bool
    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    element_bytes: int

    @classmethod
    def of(cls, job: Job, dtypes: Dtypes) -> Sizes:
        """Those of a resolved job."""
        layout, model = job.layout, job.model
        assert model.kv_heads is not None and model.head_dim is not None
        return cls(
            *degrees(layout),
            layout.context == "gather",
            job.train.micro_batch * -(-job.data.seq_len // layout.cp),
            model.heads // layout.tp,
            max(model.kv_heads // layout.tp, 1),
            model.head_dim,
            BYTES_PER_ELEMENT[dtypes.params],
        )

    @property
    def wide_bytes(self) -> int:
        """w."""
        return max(self.element_bytes, 4)

    @property
    def sent_kv_heads(self) -> int:
        """K″."""
        return sent_kv_heads(self.heads, self.kv_heads, self.dealt)

    @property
    def ring_kv(self) -> int:
        """Elements of keys and values of one ring rank, as the ring has them: 2·B·n·U·K'·d."""
        return 2 * self.tokens * self.sent_kv_heads * self.head_dim

    def forward(self) -> list[Transfer]:
        """What one block sends in one forward; the phase is the caller's."""
        found = self._dealt(self.heads + 2 * self.sent_kv_heads)
        if self.gathers:
            found.append(self._whole("all_gather", self.element_bytes))
        else:
            found += self._hops(self.element_bytes)
        return found + self._dealt(self.heads)

    def backward(self) -> list[Transfer]:
        """What one block sends in one backward."""
        found = self.forward()
        if self.gathers:
            found.append(self._whole("reduce_scatter", self.wide_bytes))
        else:
            found += self._hops(self.wide_bytes)
        return found

    def _dealt(self, heads: int) -> list[Transfer]:
        """An all-to-all of `heads` heads of this rank's tokens."""
        if self.dealt == 1:
            return []
        full_bytes = self.tokens * heads * self.head_dim * self.element_bytes
        return [Transfer("all_to_all", "cp", "", sent_bytes("all_to_all", full_bytes, self.dealt))]

    def _hops(self, element_bytes: int) -> list[Transfer]:
        """The keys and values of one ring rank to the next, R-1 times."""
        hops = self.ring - 1
        return [Transfer("send", "cp", "", hops * self.ring_kv * element_bytes, hops)] if hops else []

    def _whole(self, op: str, element_bytes: int) -> Transfer:
        """All ranks' keys and values, or gradients of them."""
        return Transfer(op, "cp", "", sent_bytes(op, self.ring * self.ring_kv * element_bytes, self.ring))


def traffic(
    units: Sequence[UnitSpec], specs: Sequence[ParamSpec], sizes: Sizes, runs: Sequence[int], recompute: Segments = ()
) -> list[Transfer]:
    """One training step of one rank of the decoder; `recompute`: units whose forward runs again in the backward.

    units, specs: of the whole model. runs: of each unit, how many micro-batches it runs on here (0: on other stages).
    """
    if sizes.ring * sizes.dealt == 1:
        return []
    trained = {spec.name for spec in specs if spec.trainable}
    again = {unit for segment in recompute for unit in segment}
    found, alive = list[Transfer](), False
    for index, unit in enumerate(units):
        before, alive = alive, alive or _any(trained, unit.name)
        if unit.kind == "block":
            found += _block(sizes, trained, unit.name, before, index in again and alive, runs[index])
        elif unit.kind == "head":
            alive = before
            for name in predictions(specs):
                parts = (f"{name}.{part}" for part in ("stream_norm", "token_norm", "join"))
                alive = alive or TOKENS in trained or any(_any(trained, part) for part in parts)
                found += _block(sizes, trained, f"{name}.block", alive, False, runs[index])
                alive = alive or _any(trained, f"{name}.block")
    return found


def predictions(specs: Sequence[ParamSpec]) -> list[str]:
    """The depths of multi-token prediction, each with a block of its own."""
    end = ".join.weight"
    return [spec.name.removesuffix(end) for spec in specs if spec.name.endswith(end)]


def _block(sizes: Sizes, trained: set[str], name: str, before: bool, again: bool, runs: int) -> list[Transfer]:
    """before: its input has a gradient; again: its forward runs again in the backward."""
    found = _times(sizes.forward(), "forward", runs)
    if again:
        found += _times(sizes.forward(), "backward", runs)
    if before or any(_any(trained, f"{name}.attention.{part}") for part in ENTERS):
        found += _times(sizes.backward(), "backward", runs)
    return found


ENTERS = ("norm", "q", "k", "v", "q_norm", "k_norm", "q_a", "q_b", "kv_a", "kv_norm", "kv_b")
"""Modules of attention before its core."""

TOKENS = "embed.tokens.weight"


def _any(trained: set[str], prefix: str) -> bool:
    return any(name.startswith(f"{prefix}.") for name in trained)


def _times(once: Sequence[Transfer], phase: str, runs: int) -> list[Transfer]:
    return [Transfer(item.op, item.axis, phase, runs * item.num_bytes, runs * item.count) for item in once if runs]
