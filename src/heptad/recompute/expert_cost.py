"""Bytes of activations of latent attention and of a mixture of experts, on one rank. Pure.

As in `cost.py`, whose legend holds: named terms, once a storage, as they live from a forward to its backward. Beside
it: E experts, K a token, R rows of routed experts (N·K where nothing is dropped and no row is filled up), I inner width
of an expert, S of all shared ones together; r and c latents of queries and of keys and values, p and t features of a
head without and with position, v of a value; s statistics of a norm; m tokens that a rank routes, ⌈N/T⌉; g tokens that
a region keeps of what it read, n or with `keep_gathered` T·n.

| term | bytes | who needs it |
|---|---|---|
| latents input | n·D·e; queries without a latent, `keep_gathered`: T·n·D·e more | weight gradients of what reads it |
| query latent | (n + g)·r·e + n·s·w, where queries have one | its norm (input, statistics), weight gradient of `q_b` |
| key value latent | n·(c + t)·e + g·c·e + n·s·w | its norm, with the shared key; weight gradient of `kv_b` |
| q, k, v | N·h·(3·(p + t))·e; math: values as they are, with the keys they were split from | core attention |
| attention output | N·h·(p + t + v)·e, of one head without v; math N·h·v·e | fused kernel, padded; weights of `out` |
| router input | m·D·e; jitter: twice | weight gradient of the router; the noise |
| shared input | of a whole stream cut for routing N·D·e; `keep_gathered`: T·n·D·e; jitter: n·D·e | as of an MLP |
| scores | m·E·w | softmax or sigmoid |
| choices | m·K·8, twice | gather of scores; order of rows |
| gate weights | m·K·w; normalised: twice, and m·w | product with the experts' outputs; the quotient |
| router losses | balance: B·E·w, deepseek m·w more; z: m·E·w + m·w; either: B·m·w + 8·B | as they say |
| expert rows, expert outputs | R·D·e each | weight gradients of gate and up; those of the gate weights |
| expert gate up | 2·R·I·e (plain: R·I·e) | the activation, formed again |
| order of rows | R·8, where experts lie on several ranks | the way back of rows that came |
| shared gate up, shared down input | 2·N·⌈S/T⌉·e (plain: half), N·⌈S/T⌉·e | as of an MLP |

Where experts lie on several ranks (`Dispatched`), R is the rows that come to this rank's experts, or where they are cut
too, to those of all ranks with parts of them, and I is ⌈I/ETP⌉; outputs are those of the M rows that this rank sent. In
two levels it sends them for the rows Q that crossed to it, whose weights and order are kept here, not at their source:
choices are N·K·8, N·nodes·8 and Q·K·8, gate weights Q·K·w and, normalised, N·(K + 1)·w.

A context rank holds N = B·⌈L/C⌉ tokens; those that fill a row up send no row. Its core keeps keys and values in one
buffer, 3·(p + t) whatever the kernel, and where heads are dealt the output in their order besides (`cost.py`).

Read next: `sizes.py`, `models/mla.py`, `models/router.py`, `models/moe.py`.
"""

from __future__ import annotations

from heptad.config.experts import balances
from heptad.recompute.sizes import Sizes

CHOICE_BYTES = 8


def latent_terms(sizes: Sizes) -> dict[str, int]:
    """Between the attention's norm and the probabilities, and its output."""
    section, formed = sizes.section, sizes.formed
    nope, rope = section.qk_nope_head_dim or 0, section.qk_rope_head_dim or 0
    value, rank = section.v_head_dim or 0, section.kv_lora_rank or 0
    number, stream, entered = sizes.tokens, sizes.own_tokens, sizes.entered_tokens
    element, heads = sizes.element_bytes, sizes.heads
    statistics = sizes.norm_bytes(stream)
    queries = section.q_lora_rank or 0
    whole, own = nope + rope, nope + value  # of a head: a query; a key without position and a value, in one storage
    gathered = 0 if queries or entered == stream else entered
    padded = whole > value and not formed
    stays = padded and sizes.dealt == 1  # what the kernel keeps is this rank's; of several heads values are copied out
    output = whole * stays + value * (heads > 1 or not stays)
    return {
        "latents input": (stream + gathered) * section.width * element,
        "query latent": ((stream + entered) * queries * element + statistics) if queries else 0,
        "key value latent": (stream * (rank + rope) + entered * rank) * element + statistics,
        "q, k, v": number * heads * (2 * whole + (whole if padded or sizes.cp > 1 else own)) * element,
        "attention output": number * heads * output * element,
    }


def expert_terms(sizes: Sizes, mixture: int) -> dict[str, int]:
    """Behind the MLP's norm; mixture: its number (`Sizes.routing`)."""
    section = sizes.section
    assert section.experts is not None and section.expert_width is not None
    number, element, wide = sizes.routed_tokens, sizes.element_bytes, sizes.wide_bytes
    choices, inner = section.experts_per_token, section.expert_width
    parts = 2 if section.mlp == "gated" else 1
    shared = -(-section.shared_experts * inner // sizes.tp)
    balance = balances(section)
    losses = (number * wide + CHOICE_BYTES) * sizes.batch * bool(balance or section.z_loss)
    if balance:
        losses += sizes.batch * section.experts * wide + number * wide * (section.router == "deepseek")
    if section.z_loss:
        losses += number * section.experts * wide + number * wide
    rows = sizes.rows_of(mixture)
    crosses = rows.nodes > 1
    weighed = rows.crossed if crosses else number  # rows whose weights are kept here
    inner, order = -(-inner // rows.parts), (number * choices + crosses * number * rows.nodes + weighed * choices)
    return {
        "router input": number * section.width * element * (2 if section.jitter else 1),
        "shared input": _shared_input(sizes) * section.width * element,
        "scores": number * section.experts * wide,
        "choices": order * CHOICE_BYTES,
        "gate weights": (weighed * choices + number * (choices + 1) * section.normalise_top_k) * wide,
        "router losses": losses,
        "expert rows": rows.came * section.width * element,
        "expert gate up": parts * rows.came * inner * element,
        "expert outputs": rows.sent * section.width * element,
        "order of rows": CHOICE_BYTES * rows.came * sizes.spread,
        "shared gate up": parts * sizes.tokens * shared * element,
        "shared down input": sizes.tokens * shared * element,
    }


def _shared_input(sizes: Sizes) -> int:
    """Tokens of the stream that shared experts keep beside what the router keeps."""
    if not sizes.section.shared_experts:
        return 0
    if sizes.entered_tokens > sizes.routed_tokens:  # of a whole stream all, or what was gathered
        return sizes.entered_tokens
    return sizes.own_tokens if sizes.section.jitter else 0
