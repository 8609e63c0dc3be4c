"""How many tokens' logits the head forms at once. Pure: `cost.py` predicts with the same number.

A chunk's logits [c, V/T] are the largest tensor of a step with a large vocabulary; a chunk of 32 MiB is large enough
that its matmuls run at full speed. With one chunk for all tokens nothing is computed twice (`loss.py`).
"""

from __future__ import annotations

from typing import Literal

CHUNK_BYTES = 32 * 2**20
MIN_TOKENS = 128


def chunk_tokens(setting: int | Literal["auto"], num_tokens: int, local_vocab: int, itemsize: int) -> int:
    """Tokens in a chunk, at most `num_tokens`; the last chunk may be smaller.

    setting: `train.loss_chunk`; "auto": logits of at most `CHUNK_BYTES`, but no fewer than `MIN_TOKENS` tokens.
    local_vocab: rows of the head's weight on this rank, padding included. itemsize: bytes of a logit in the loss's
    dtype (fp32, or fp64 in a float64 run).
    """
    assert num_tokens > 0 and local_vocab > 0
    tokens = max(CHUNK_BYTES // (local_vocab * itemsize), MIN_TOKENS) if setting == "auto" else setting
    return min(tokens, num_tokens)
