"""Bytes of activations that live from a forward to its backward, and what recompute makes of them. Pure, no torch.

Every function gives named terms in bytes; tests measure the live storages of real runs and assert equality, term sums
to the byte. Counted: what one unit's graph and its kept tensors hold after the forward, once a storage; not parameters,
not the batch. A unit counts its input and not its output, which is the next one's input. All parameters trainable, no
compiled stretches, B in one piece (a split I and W adds a few numbers a unit). What an action needs only while it runs
comes on top.

Legend: B sequences, L tokens, D width, H and K query and kv heads, d head_dim, F MLP width, V vocabulary, T tensor
ranks; N = B·L; n = tokens of this rank's stream, ⌈N/T⌉ where it is cut, else N; h = H/T, k = max(K/T, 1), f = ⌈F/T⌉;
e bytes of an element; w = max(e, 4), bytes of a statistic; s = 2 statistics a LayerNorm row, 1 an RMSNorm row.

| term of a block | bytes | who needs it |
|---|---|---|
| input | n·D·e | the first norm; with full recompute all that a segment keeps |
| attention norm statistics | n·s·w | that norm: mean and 1/std, or 1/rms |
| qkv input | n·D·e, `keep_gathered`: T·n·D·e | weight gradients of q, k and v, once for all three |
| q k norm inputs | N·(h + k)·d·e, with `qk_norm` only | norms of queries and keys |
| q k norm statistics | N·(h + k)·s·w, with `qk_norm` only | likewise |
| q, k, v | N·(h + 2k)·d·e | core attention, after rotation (which keeps nothing of its own) |
| repeated kv | N·2·(h - k)·d·e, flash with a mask only | torch's masked kernels know no groups |
| log-sum-exp | N·h·w, flash only | the fused kernel's backward |
| probabilities | N·h·L·w, math only | softmax and values; in at least fp32 |
| probabilities mask | N·h·L, math with dropout only | attention dropout, one byte each |
| attention output | N·h·d·e | weight gradient of `out`; the fused kernel reads the same storage |
| dealt output | N·h·d·e, where context ranks deal heads only | core attention, in the order in which it made it |
| attention dropout mask | n·D, with dropout only | one byte each |
| mlp input, its norm statistics, gate up input | as input, … , qkv input | as in attention |
| gate up | 2·N·f·e (plain: N·f·e) | the activation's backward |
| down input | N·f·e | weight gradient of `down` |
| mlp dropout mask | n·D, with dropout only | one byte each |
| anchor | 4 | ties the unit's taps into its graph |

A context rank holds ⌈L/C⌉ tokens of a row: that is L here. Its core keeps q, k, v, output and log-sum-exp whatever its
kernel, and no mask; of the k in "q, k, v" ranks that deal heads count what is sent to them (`axes/context/cost.py`).

Of latent attention and of a mixture of experts other terms stand in their places: `expert_cost.py`. Multi-token
prediction is not counted.

Selective recompute drops probabilities and their mask (math), or `down input` (flash, context ranks). Read next:
`policy.py`, `models/attention.py`, `models/parallel.py`, docs/memory.md. Sources: FIELD.md; arXiv 2205.05198 §4;
1604.06174 §4.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from heptad.config.context import degrees, sent_kv_heads
from heptad.config.experts import routes
from heptad.config.recompute import forms_scores
from heptad.config.schema import Job, ModelSection
from heptad.models.chunk import chunk_tokens
from heptad.models.spec import complete
from heptad.precision.dtypes import dtypes_of
from heptad.recompute.expert_cost import Dispatched, Tokens, expert_terms, latent_terms
from heptad.recompute.policy import Mode
from heptad.units import BYTES_PER_ELEMENT

Terms = dict[str, int]
"""Name -> bytes; names of the tables above and below. A term of zero bytes is left out."""

ANCHOR_BYTES = 4
INDEX_BYTES = 8


@dataclass(frozen=True, slots=True)
class Sizes:
    """One micro-batch on one rank. `length`: tokens of a row that it holds, as one of `cp` context ranks, of which
    `dealt` neighbours deal heads. `rows`: of routed experts in a block, None: all choices of all tokens. `dispatched`:
    in place of it where experts lie on several ranks. `documents`: a row may hold several, so attention needs a mask.
    `index`: the tensor rank (padding of the last ones' tokens shows in the embedding only).
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
    rows: int | None = None
    dispatched: Dispatched | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "section", complete(self.section))
        assert not self.section.mtp_depth, "multi-token prediction is not counted"

    @classmethod
    def of(
        cls,
        job: Job,
        documents: bool,
        device_type: str = "cpu",
        index: int = 0,
        dispatched: Dispatched | None = None,
    ) -> Sizes:
        """Those of a resolved job's micro-batches; `dispatched` where experts lie on several ranks."""
        assert (dispatched is not None) == (job.layout.ep * job.layout.etp > 1)
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
            dispatched=dispatched,
        )

    @property
    def tokens(self) -> int:
        """N."""
        return self.batch * self.length

    @property
    def routed(self) -> Tokens:
        """What experts see of it."""
        first = min(self.index * -(-self.tokens // self.tp), self.tokens)
        own = min(-(-self.tokens // self.tp), self.tokens - first)  # of a last rank's tokens some fill it up
        rows = own * self.section.experts_per_token if self.rows is None else self.rows
        cut = self.tp, self.sequence, self.keep
        return Tokens(self.batch, self.length, rows, self.element_bytes, self.wide_bytes, self.dispatched, *cut)

    @property
    def own_tokens(self) -> int:
        """n."""
        return -(-self.tokens // self.tp) if self.sequence else self.tokens

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
        return self.stream_bytes * (self.tp if self.sequence and self.keep else 1)

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
        """One mask of the stream's dropout: n·D, or none."""
        return self.own_tokens * self.section.width if self.section.dropout else 0


def block(sizes: Sizes, mode: Mode = "none", layer: int | None = None) -> Terms:
    """What one block keeps after its forward (mode "full": after its C), by the terms of the table above.

    layer: which block (None: the last), where the first ones have no experts.
    """
    attention = _attention(sizes) | (_latent(sizes) if sizes.section.attention_kind == "mla" else {})
    layer = sizes.section.layers - 1 if layer is None else layer
    mlp = _experts(sizes) if routes(sizes.section, layer) else _mlp(sizes)
    if mode == "selective":
        dropped = ("probabilities", "probabilities mask") if sizes.formed else ("down input", "shared down input")
        for name in dropped:
            attention.pop(name, None), mlp.pop(name, None)
    return _some(attention | mlp | {"anchor": ANCHOR_BYTES})


def _attention(sizes: Sizes) -> Terms:
    section, element, tokens = sizes.section, sizes.element_bytes, sizes.tokens
    assert section.head_dim is not None
    heads, kv_heads, head = sizes.heads, sizes.kv_heads, tokens * section.head_dim * element  # bytes of one head
    scores = sizes.tokens * heads * sizes.length if sizes.formed else 0
    repeats = sizes.masked_rows > 0 and not sizes.formed
    return {
        "input": sizes.stream_bytes,
        "attention norm statistics": sizes.norm_bytes(sizes.own_tokens),
        "qkv input": sizes.entered_bytes,
        "q k norm inputs": (heads + kv_heads) * head * section.qk_norm,
        "q k norm statistics": sizes.norm_bytes(tokens * (heads + kv_heads)) * section.qk_norm,
        "q, k, v": (heads + 2 * sent_kv_heads(heads, kv_heads, sizes.dealt)) * head,
        "repeated kv": 2 * (heads - kv_heads) * head * repeats,
        "log-sum-exp": tokens * heads * sizes.wide_bytes * (not sizes.formed),
        "probabilities": scores * sizes.wide_bytes,
        "probabilities mask": scores * (section.attention_dropout > 0),
        "attention output": heads * head,
        "dealt output": heads * head * (sizes.dealt > 1),
        "attention dropout mask": sizes.dropout_bytes(),
    }


def _latent(sizes: Sizes) -> Terms:
    """What stands in place of projections, queries, keys, values and the output."""
    return {"qkv input": 0, "repeated kv": 0} | latent_terms(sizes.section, sizes.routed, sizes.formed)


def _experts(sizes: Sizes) -> Terms:
    norm = {"mlp input": sizes.stream_bytes, "mlp norm statistics": sizes.norm_bytes(sizes.own_tokens)}
    return norm | expert_terms(sizes.section, sizes.routed) | {"mlp dropout mask": sizes.dropout_bytes()}


def _mlp(sizes: Sizes) -> Terms:
    section = sizes.section
    inner = sizes.tokens * -(-section.mlp_width // sizes.tp) * sizes.element_bytes
    return {
        "mlp input": sizes.stream_bytes,
        "mlp norm statistics": sizes.norm_bytes(sizes.own_tokens),
        "gate up input": sizes.entered_bytes,
        "gate up": inner * (2 if section.mlp == "gated" else 1),
        "down input": inner,
        "mlp dropout mask": sizes.dropout_bytes(),
    }


def embed(sizes: Sizes) -> Terms:
    """The embedding: its ids are the batch's; its output is the first block's input.

    "own positions": n·8 on ranks whose part of the positions' ids is filled up, with learned ones and a cut stream.
    """
    filled = sizes.sequence and (sizes.index + 1) * sizes.own_tokens > sizes.tokens
    own = sizes.own_tokens * INDEX_BYTES * (filled and sizes.section.positions == "learned")
    return _some({"own positions": own, "dropout mask": sizes.dropout_bytes(), "anchor": ANCHOR_BYTES})


def head(sizes: Sizes) -> Terms:
    """The head and its loss.

    "exponentials": N·⌈V/T⌉·w, where all tokens' logits are one chunk; else they are formed again. "log sums": N·w.
    """
    section, tokens, wide = sizes.section, sizes.tokens, sizes.wide_bytes
    rows = -(-section.vocab // sizes.tp)
    one = chunk_tokens(sizes.loss_chunk, tokens, rows, wide) == tokens
    return _some({
        "input": sizes.stream_bytes,
        "norm statistics": sizes.norm_bytes(sizes.own_tokens),
        "head input": sizes.entered_bytes,
        "exponentials": tokens * rows * wide * one,
        "log sums": tokens * wide,
        "loss": wide,
        "anchor": ANCHOR_BYTES,
    })  # fmt: skip


def shared(sizes: Sizes) -> Terms:
    """What all blocks of a micro-batch share; the first of them makes it, and it goes with the next micro-batch's.

    "rotary table": 2·N·d·w, cosines and sines. "attention bias": B·L·L·e, flash with documents; under a window alone
    L·L·e. "attention mask": formed scores under a window, a byte in place of e (of documents alone it is the batch's).
    """
    section = sizes.section
    assert section.head_dim is not None
    turned = section.head_dim if section.attention_kind == "gqa" else section.qk_rope_head_dim or 0
    table = 2 * sizes.tokens * turned * sizes.wide_bytes * (section.positions == "rotary")
    mask, formed = sizes.masked_rows * sizes.length**2, sizes.formed
    bias = mask * sizes.element_bytes * (not formed)
    seen = mask * (formed and section.window is not None)
    return _some({"rotary table": table, "attention bias": bias, "attention mask": seen})


def _some(terms: Mapping[str, int]) -> Terms:
    return {name: num_bytes for name, num_bytes in terms.items() if num_bytes}
