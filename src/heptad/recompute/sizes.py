"""The sizes of one micro-batch on one rank from which its activations follow. Pure, no torch.

How many rows the routed experts of a mixture have follows from what its router chose, so it is given (`routing`):
counted in the choices of a step, or expected (`axes/expert/flow.py`). Without it a mixture's bytes are known only where
every choice of every token is a row. What is not known is refused, not estimated.

Legend: as in `cost.py`. Read next: `cost.py`, `expert_cost.py`, `peak.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from heptad.config.context import degrees
from heptad.config.recompute import forms_scores
from heptad.config.schema import Job, ModelSection
from heptad.errors import ConfigError, Problem
from heptad.models.spec import complete
from heptad.precision.dtypes import dtypes_of
from heptad.units import BYTES_PER_ELEMENT

WORD_BYTES = 4
"""Of a hash, from which compiled dropout makes its mask again."""


@dataclass(frozen=True, slots=True)
class Dispatched:
    """Where the rows of one mixture of one micro-batch go, as one rank sees it; from `axes/expert/flow.py`.

    sent: M, by this rank (in two levels inside its node). came: R. parts: ETP. nodes, crossed: of two levels; Q.
    """

    sent: int
    came: int
    parts: int = 1
    nodes: int = 1
    crossed: int = 0


@dataclass(frozen=True, slots=True)
class Sizes:
    """One micro-batch on one rank.

    length: tokens of a row that it holds, as one of `cp` context ranks, of which `dealt` neighbours deal heads; filled:
    they fill rows up. documents: a row may hold several, so attention needs a mask. index: the tensor rank (padding of
    the last ones' tokens shows in the embedding, and in experts' rows). compiled: `train.compile`. split: I and W are
    (`peak.alive` sees it in the program). spread: experts lie on several ranks. routing: of mixtures by number, a
    block's its layer's, that of depth k of multi-token prediction layers + k - 1.
    """

    section: ModelSection
    batch: int
    length: int
    tp: int = 1
    sequence: bool = False
    keep: bool = False
    element_bytes: int = 2
    documents: bool = False
    loss_chunk: int | Literal["auto"] = "auto"
    index: int = 0
    cp: int = 1
    dealt: int = 1
    filled: bool = False
    compiled: bool = False
    split: bool = False
    spread: bool = False
    routing: Mapping[int, Dispatched] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "section", complete(self.section))

    @classmethod
    def of(
        cls,
        job: Job,
        documents: bool,
        device_type: str = "cpu",
        index: int = 0,
        routing: Mapping[int, Dispatched] | None = None,
    ) -> Sizes:
        """Those of a resolved job's micro-batches on tensor rank `index`. ConfigError names what is not known."""
        if problems := tuple(_unknown(job)):
            raise ConfigError(*problems)
        layout, element = job.layout, BYTES_PER_ELEMENT[dtypes_of(job.precision, device_type).params]
        return cls(
            job.model,
            job.train.micro_batch,
            -(-job.data.seq_len // layout.cp),
            layout.tp,
            layout.sequence_parallel,
            layout.keep_gathered,
            element,
            documents,
            job.train.loss_chunk,
            index,
            layout.cp,
            degrees(layout)[1],
            job.data.seq_len % layout.cp > 0,
            job.train.compile,
            spread=layout.ep * layout.etp > 1,
            routing={} if routing is None else routing,
        )

    @property
    def tokens(self) -> int:
        """N."""
        return self.batch * self.length

    @property
    def routed_tokens(self) -> int:
        """m."""
        return -(-self.tokens // self.tp)

    @property
    def own_tokens(self) -> int:
        """n."""
        return self.routed_tokens if self.sequence else self.tokens

    @property
    def entered_tokens(self) -> int:
        """g."""
        return self.own_tokens * (self.tp if self.sequence and self.keep else 1)

    @property
    def wide_bytes(self) -> int:
        """w."""
        return max(self.element_bytes, 4)

    @property
    def heads(self) -> int:
        """h."""
        return self.section.heads // self.tp

    @property
    def kv_heads(self) -> int:
        """k."""
        return max((self.section.kv_heads or self.section.heads) // self.tp, 1)

    @property
    def formed(self) -> bool:
        """Whether the scores of whole rows are formed."""
        return forms_scores(self.section) and self.cp == 1

    @property
    def stream_bytes(self) -> int:
        """n·D·e: the stream as one rank holds it, which is a unit's input, and its gradient."""
        return self.own_tokens * self.section.width * self.element_bytes

    @property
    def entered_bytes(self) -> int:
        """What a region keeps of its input: the rank's own tokens, or all (padded) with `keep_gathered`."""
        return self.entered_tokens * self.section.width * self.element_bytes

    def norm_bytes(self, rows: int) -> int:
        """rows·s·w."""
        return rows * (2 if self.section.norm == "layer" else 1) * self.wide_bytes

    @property
    def masked_rows(self) -> int:
        """Rows of a mask beyond the plain causal one: with documents one a sequence, under a window one for all."""
        if self.cp > 1:
            return 0
        return self.batch if self.documents else int(self.section.window is not None)

    def dropout_bytes(self) -> int:
        """One mask of the stream's dropout: n·D, compiled 4·(n + D), or none."""
        if not self.section.dropout:
            return 0
        n, width = self.own_tokens, self.section.width
        return WORD_BYTES * (n + width) if self.compiled else n * width

    def score_dropout_bytes(self) -> int:
        """One mask of formed scores' dropout: N·h·L, compiled 4·(N·L + h), or none."""
        if not (self.section.attention_dropout and self.formed):
            return 0
        pairs = self.tokens * self.length
        return WORD_BYTES * (pairs + self.heads) if self.compiled else pairs * self.heads

    def rows_of(self, mixture: int) -> Dispatched:
        """Where the rows of a mixture go."""
        given = self.routing.get(mixture)
        if given is not None:
            return given
        every = mixture < self.section.layers and self.section.capacity_factor is None
        assert every and not self.spread and not self.filled, f"the rows of mixture {mixture} follow from the routing"
        first = min(self.index * self.routed_tokens, self.tokens)
        own = min(self.routed_tokens, self.tokens - first)  # of a last rank's tokens some fill it up
        rows = own * self.section.experts_per_token
        return Dispatched(rows, rows)


def _unknown(job: Job) -> Iterator[Problem]:
    """Where the formulas of activations do not hold."""
    rule = "the bytes of its activations are not known"
    if job.model.class_ is not None:
        yield Problem("model.class", job.model.class_, f"{rule}: it keeps what its layers save", "a preset")
    if job.model.frozen:
        yield Problem("model.frozen", list(job.model.frozen), f"{rule}: what is frozen keeps less", "frozen = []")
    if job.layout.engine == "fsdp2":
        yield Problem("layout.engine", "fsdp2", f"{rule}: autograd keeps what torch's layers save", 'engine = "heptad"')
    if job.offload.activations != "none":
        fix = 'activations = "none"'
        yield Problem("offload.activations", job.offload.activations, f"{rule}: it depends on when moves end", fix)
