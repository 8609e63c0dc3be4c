"""Bytes that a unit keeps between I and W, where a backward is split into both (zero-bubble schedules). Pure, no torch.

When I has run, the graph is spent. What W reads is left: of each tapped module (`models/taps.py`) what it saved of its
input, under the names of `cost.py`, and the gradient of its output. Before I a unit keeps what `cost.py` says. Legend
as in `cost.py` and `expert_cost.py`.

| gradient | bytes |
|---|---|
| of a norm of the stream; of `join` | n·D·e |
| of q, k, v; of norms of queries and keys | N·(h + 2k)·d·e; N·(h + k)·d·e |
| of gate and up (plain: up) | 2·N·f·e |
| of out, down, the table of tokens | n·D·e, of a cut stream, gathered, T·n·D·e |
| of latents: q_a, its norm, q_b | 2·n·r·e + N·h·(p + t)·e; whole queries: the last alone |
| kv_a, its norm, kv_b | n·(2c + t)·e + N·h·(p + v)·e |
| of a router, of experts | m·E·w, R·(2·I + D)·e |
| of logits | N·⌈V/T⌉·e; of more than one chunk the weight's gradient in their place, ⌈V/T⌉·D·w |

Read next: `cost.py`, `peak.py`, `models/taps.py`. Source of the split: Qi et al., arXiv 2401.10241, §2.
"""

from __future__ import annotations

from heptad.config.experts import routes
from heptad.recompute.cost import Terms, anchor, block, embed, head, one_chunk, prediction
from heptad.recompute.policy import Mode
from heptad.recompute.sizes import Sizes

ATTENTION = (
    "input", "attention norm statistics", "qkv input", "q k norm inputs", "q k norm statistics", "latents input",
    "query latent", "key value latent",
)  # fmt: skip
"""What W reads of the terms before the core of attention."""
MLP = ("mlp input", "mlp norm statistics", "gate up input", "down input")
EXPERTS = ("mlp input", "mlp norm statistics", "expert rows", "expert gate up", "shared input", "shared down input")


def block_after(sizes: Sizes, mode: Mode = "none", layer: int | None = None) -> Terms:
    """Of one block."""
    before = block(sizes, mode, layer)
    routed = routes(sizes.section, sizes.section.layers - 1 if layer is None else layer)
    return _block(sizes, before, routed, mode) | {"anchor": before["anchor"]}


def _block(sizes: Sizes, before: Terms, routed: bool, mode: Mode = "none") -> Terms:
    found = _some(before, ATTENTION) | _attention(sizes)
    found |= _experts(sizes, before) if routed else _mlp(sizes, before)
    if mode == "selective" and not sizes.formed:  # in place of their product
        found |= _some(before, ("shared gate up",) if routed else ("gate up",))
    return found | {"norm gradients": 2 * sizes.stream_bytes}


def _some(before: Terms, names: tuple[str, ...]) -> Terms:
    return {name: before[name] for name in names if name in before}


def _attention(sizes: Sizes) -> Terms:
    section, element = sizes.section, sizes.element_bytes
    assert section.head_dim is not None
    heads = sizes.tokens * sizes.heads * element  # bytes of a feature of every head
    kv_heads, d = sizes.tokens * sizes.kv_heads * element, section.head_dim
    if section.attention_kind == "gqa":
        return {
            "attention output": heads * d,
            "qkv gradients": (heads + 2 * kv_heads) * d,
            "q k norm gradients": (heads + kv_heads) * d * section.qk_norm,
            "out gradient": _gathered(sizes),
        }
    value, queries, rank = section.v_head_dim or 0, section.q_lora_rank or 0, section.kv_lora_rank or 0
    rope, alone = section.qk_rope_head_dim or 0, sizes.heads == 1 and sizes.dealt == 1 and not sizes.formed
    return {
        "attention output": heads * (max(d, value) if alone else value),  # of one head the kernel's own, padded
        "latent gradients": sizes.own_tokens * (2 * queries + 2 * rank + rope) * element,
        "q, k, v gradients": heads * (d + d - rope + value),
        "out gradient": _gathered(sizes),
    }


def _mlp(sizes: Sizes, before: Terms) -> Terms:
    return _some(before, MLP) | {"gate up gradients": before["gate up"], "down gradient": _gathered(sizes)}


def _experts(sizes: Sizes, before: Terms) -> Terms:
    section, number = sizes.section, sizes.routed_tokens
    shared = before.get("shared gate up", 0)
    return _some(before, EXPERTS) | {
        "router input": number * section.width * sizes.element_bytes,
        "router gradient": number * (section.experts or 0) * sizes.wide_bytes,
        "expert gradients": before["expert rows"] + before["expert gate up"],
        "shared gate up gradients": shared,
        "shared down gradient": _gathered(sizes) * bool(shared),
    }


def _gathered(sizes: Sizes) -> int:
    """The gradient of all tokens, as a region's end reads it."""
    return sizes.stream_bytes * (sizes.tp if sizes.sequence else 1)


def embed_after(sizes: Sizes) -> Terms:
    """Of the embedding. Tables of tokens and of learned positions read one gradient where the stream is whole."""
    positions = embed(sizes).get("own positions", 0)
    twice = sizes.sequence and sizes.section.positions == "learned"
    gradients = _gathered(sizes) + sizes.stream_bytes * twice
    return {"own positions": positions, "gradients": gradients, "anchor": anchor(sizes)}


def head_after(sizes: Sizes) -> Terms:
    """Of the head, multi-token prediction included; the loss itself stays."""
    before = head(sizes)
    found = _some(before, ("input", "loss", "anchor")) | _loss(sizes, before)
    for depth in range(1, sizes.section.mtp_depth + 1):
        terms = prediction(sizes, depth)
        after = _block(sizes, terms, sizes.section.experts is not None) | _loss(sizes, terms)
        kept = (
            "ids", "labels", "stream norm statistics", "token norm input", "token norm statistics", "join input",
            "output",
        )  # fmt: skip
        after |= _some(terms, kept) | {
            "tokens gradient": _gathered(sizes),
            "join gradients": 3 * sizes.stream_bytes,  # its own, and those of the two norms before it
        }
        found |= {f"depth {depth}: {name}": num_bytes for name, num_bytes in after.items()}
    return found


def _loss(sizes: Sizes, before: Terms) -> Terms:
    """Of what comes out of a norm."""
    rows, one = -(-sizes.section.vocab // sizes.tp), one_chunk(sizes)
    weight = rows * sizes.section.width * sizes.wide_bytes
    return {
        "norm statistics": before["norm statistics"],
        "norm gradient": sizes.stream_bytes,
        "head input": before["head input"] * one,
        "logits gradient": sizes.tokens * rows * sizes.element_bytes if one else weight,
    }
