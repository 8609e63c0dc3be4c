"""Model FLOPs of training, MFU and tokens per second, with their conventions stated. Never imports torch.

A token costs 6 FLOPs for each parameter that multiplies (2 forward, 4 backward) and its attention scores and values:
6·layers·H·(d_qk + d_v)·L under "full", half of it under "causal" (the half that a causal mask leaves; L² / 2, the
diagonal not counted extra). Layers are the main model's and one for each depth of multi-token prediction, which is
counted as if every position had a token to predict. Packed documents attend within themselves: L² is then the sum of
squared lengths (C-124). Under a sliding window w, L² is the number of pairs less than w apart, L² - (L - w)(L - w + 1):
of them a causal mask leaves half and half of the diagonal, as without a window. Norms, activations and the softmax are
not counted; recompute never is, so MFU compares with the papers' and cannot pass 1 under "causal". A token counts once,
whatever cp, tp and pp do with it (C-123). Read next: `parameters.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from heptad.account.parameters import multiplying
from heptad.config.schema import ModelSection
from heptad.models.spec import complete, pairs

Convention = Literal["causal", "full"]


def attention_flops(section: ModelSection, lengths: Sequence[int], convention: Convention) -> int:
    """Training FLOPs of scores and values in all layers, for documents of `lengths` tokens."""
    section = complete(section)
    assert section.head_dim is not None
    near = sum(pairs(length, section.window) for length in lengths)
    widths = section.head_dim + (section.v_head_dim or section.head_dim)  # queries and values
    full = 6 * (section.layers + section.mtp_depth) * section.heads * widths * near
    return full // 2 if convention == "causal" else full


def model_flops(section: ModelSection, lengths: Sequence[int], convention: Convention) -> int:
    """Training FLOPs of documents of `lengths` tokens each (a whole step's: give all documents of the global batch)."""
    return 6 * multiplying(section) * sum(lengths) + attention_flops(section, lengths, convention)


def flops_per_token(section: ModelSection, seq_len: int, convention: Convention) -> float:
    """Training FLOPs of one token of a document of `seq_len` tokens, on average."""
    return model_flops(section, [seq_len], convention) / seq_len


def mfu(flops: float, seconds: float, num_devices: int, peak_flops_per_s: float) -> float:
    """Model FLOPs utilisation: `flops` of a step over what `num_devices` could do in its time (arXiv 2204.02311)."""
    return flops / (seconds * num_devices * peak_flops_per_s)


def tokens_per_s(global_batch: int, seq_len: int, seconds: float) -> float:
    """Tokens of one step's global batch over its time: each once, whichever ranks share it."""
    return global_batch * seq_len / seconds
