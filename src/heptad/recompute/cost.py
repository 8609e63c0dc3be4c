"""Bytes of activations that live from a forward to its backward, and what recompute makes of them. Pure, no torch.

Every function gives named terms in bytes for `Sizes`; tests measure the live storages of real runs and assert equality,
term sums to the byte. Counted: what one unit's graph and its kept tensors hold after the forward, once a storage; not
parameters, not the batch. A unit counts its input and not its output, which is the next one's input. What an action
needs only while it runs comes on top.

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
| probabilities mask | N·h·L, math with dropout only; compiled 4·(N·L + h) | attention dropout |
| attention output | N·h·d·e | weight gradient of `out`; the fused kernel reads the same storage |
| dealt output | N·h·d·e, where context ranks deal heads only | core attention, in the order in which it made it |
| attention dropout mask | n·D, with dropout only; compiled 4·(n + D) | words of rows and columns in its place |
| mlp input, its norm statistics, gate up input | as input, … , qkv input | as in attention |
| gate up | 2·N·f·e (plain: N·f·e) | the activation's backward |
| down input | N·f·e | weight gradient of `down` |
| mlp dropout mask | as of attention | |
| anchor | 4; e where I and W are split | ties the unit's taps into its graph |

A context rank holds ⌈L/C⌉ tokens of a row: that is L here. Its core keeps q, k, v, output and log-sum-exp whatever its
kernel, and no mask; of the k in "q, k, v" ranks that deal heads count what is sent to them (`axes/context/cost.py`).

Of latent attention and of a mixture of experts other terms stand in their places: `expert_cost.py`.

Selective recompute drops probabilities and their mask (math), or `down input` (flash, context ranks). Read next:
`policy.py`, `models/attention.py`, `models/parallel.py`, docs/memory.md. Sources: arXiv 2205.05198 §4;
1604.06174 §4.1.
"""

from __future__ import annotations

from collections.abc import Mapping

from heptad.config.context import sent_kv_heads
from heptad.config.experts import routes
from heptad.models.chunk import chunk_tokens
from heptad.recompute.expert_cost import expert_terms, latent_terms
from heptad.recompute.policy import Mode
from heptad.recompute.sizes import Sizes

Terms = dict[str, int]
"""Name -> bytes; names of the tables above and below. A term of zero bytes is left out."""

ANCHOR_BYTES = 4
INDEX_BYTES = 8


def block(sizes: Sizes, mode: Mode = "none", layer: int | None = None) -> Terms:
    """What one block keeps after its forward (mode "full": after its C), by the terms of the table above.

    layer: which block (None: the last), where the first ones have no experts.
    """
    layer = sizes.section.layers - 1 if layer is None else layer
    attention, mlp = _attends(sizes), _experts(sizes, layer) if routes(sizes.section, layer) else _mlp(sizes)
    if mode == "selective":
        dropped = ("probabilities", "probabilities mask") if sizes.formed else ("down input", "shared down input")
        for name in dropped:
            attention.pop(name, None), mlp.pop(name, None)
    return _some(attention | mlp | {"anchor": anchor(sizes, routes(sizes.section, layer))})


def _attends(sizes: Sizes) -> Terms:
    return _attention(sizes) | (_latent(sizes) if sizes.section.attention_kind == "mla" else {})


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
        "probabilities mask": sizes.score_dropout_bytes(),
        "attention output": heads * head,
        "dealt output": heads * head * (sizes.dealt > 1),
        "attention dropout mask": sizes.dropout_bytes(),
    }


def _latent(sizes: Sizes) -> Terms:
    """What stands in place of projections, queries, keys, values and the output."""
    return {"qkv input": 0, "repeated kv": 0} | latent_terms(sizes)


def _experts(sizes: Sizes, mixture: int) -> Terms:
    norm = {"mlp input": sizes.stream_bytes, "mlp norm statistics": sizes.norm_bytes(sizes.own_tokens)}
    return norm | expert_terms(sizes, mixture) | {"mlp dropout mask": sizes.dropout_bytes()}


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
    return _some({"own positions": own, "dropout mask": sizes.dropout_bytes(), "anchor": anchor(sizes)})


def head(sizes: Sizes) -> Terms:
    """The head, its loss, and multi-token prediction, which belongs to it.

    "exponentials": N·⌈V/T⌉·w, where all tokens' logits are one chunk; else they are formed again. "log sums": N·w.
    "loss": the one number that outlives the graph.
    """
    found = {"input": sizes.stream_bytes} | _loss(sizes) | {"loss": sizes.wide_bytes}
    found["anchor"] = anchor(
        sizes, not one_chunk(sizes) or (sizes.section.mtp_depth > 0 and bool(sizes.section.experts))
    )
    for depth in range(1, sizes.section.mtp_depth + 1):
        found |= {f"depth {depth}: {name}": num_bytes for name, num_bytes in prediction(sizes, depth).items()}
    return _some(found)


def prediction(sizes: Sizes, depth: int) -> Terms:
    """One depth of multi-token prediction: a block, what joins it to the depth before, a loss. It reads the hidden
    state of the depth before where that one's norm keeps it.

    "token norm input": n·D·e, "join input": twice that. "ids", "labels": N·8 each, shifted; of a part of a row they
    were made with the batch.
    """
    section, statistics = sizes.section, sizes.norm_bytes(sizes.own_tokens)
    indices = sizes.tokens * INDEX_BYTES * (sizes.cp == 1)
    mlp = _mlp(sizes) if section.experts is None else _experts(sizes, section.layers + depth - 1)
    return _some({
        "ids": indices,
        "labels": indices,
        "stream norm statistics": statistics,
        "token norm input": sizes.stream_bytes,
        "token norm statistics": statistics,
        "join input": 2 * sizes.stream_bytes,
        **_attends(sizes),
        **mlp,
        "output": sizes.stream_bytes,
        **_loss(sizes),
    })  # fmt: skip


def _loss(sizes: Sizes) -> Terms:
    """Of what comes out of a norm, that norm's statistics included."""
    tokens, wide, rows = sizes.tokens, sizes.wide_bytes, -(-sizes.section.vocab // sizes.tp)
    return {
        "norm statistics": sizes.norm_bytes(sizes.own_tokens),
        "head input": sizes.entered_bytes,
        "exponentials": tokens * rows * wide * one_chunk(sizes),
        "log sums": tokens * wide,
    }


def anchor(sizes: Sizes, wide: bool = False) -> int:
    """What ties taps into a unit's graph. Where I and W are split, an element for all probes of a dtype; wide: some are
    of outputs in at least fp32.
    """
    if not sizes.split:
        return ANCHOR_BYTES
    return sizes.element_bytes + sizes.wide_bytes * (wide and sizes.wide_bytes != sizes.element_bytes)


def one_chunk(sizes: Sizes) -> bool:
    """Whether the logits of all tokens are formed at once."""
    rows = -(-sizes.section.vocab // sizes.tp)
    return chunk_tokens(sizes.loss_chunk, sizes.tokens, rows, sizes.wide_bytes) == sizes.tokens


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
