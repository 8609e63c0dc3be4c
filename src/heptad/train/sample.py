"""Text from the model while it trains: one whole forward a token, which any layout can run.

Every rank takes part in the forwards; a rank's choice depends on its own logits and a key only, so equal prompts give
equal text (tensor ranks gather the same logits, so they choose alike), and the collectives' order never depends on what
was chosen: all ranks run the same number of forwards of the same shape. Noise is keyed by (seed, place), so a sample is
reproducible. Cost: num_tokens forwards of the window.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from heptad.config.schema import Job
from heptad.loader.tokenise import TextTokenizer
from heptad.models.batch import IGNORED, Batch

PROMPT_TOKENS, TEMPERATURE = 16, 0.8

Logits = Callable[[Batch], Tensor]
"""Batch [1, L] -> logits [1, L, V]; collective."""


def generate(
    logits: Logits, prompt: Sequence[int], num_tokens: int, window: int, temperature: float, seed: int
) -> list[int]:
    """`num_tokens` ids that go on from `prompt` (at least one id), seeing the last `window` ids.

    temperature 0 takes the likeliest token; above it, token v with probability softmax(logits / temperature).
    """
    assert prompt and window >= 1 and temperature >= 0, (len(prompt), window, temperature)
    ids = list(prompt)
    length = min(window, len(prompt) + num_tokens)
    for place in range(num_tokens):
        seen = ids[-length:]
        scores = logits(batch_of(seen, length))[0, len(seen) - 1].float()
        ids.append(choose(scores, temperature, seed, place))
    return ids[len(prompt) :]


def continued(logits: Logits, batch: Batch, job: Job, tokenizer: TextTokenizer | None) -> str:
    """The first tokens of a batch and `train.sample_tokens` more; numbers where there is no tokenizer. Collective."""
    prompt = batch.ids[0, :PROMPT_TOKENS].tolist()
    ids = prompt + generate(logits, prompt, job.train.sample_tokens, job.data.seq_len, TEMPERATURE, job.train.seed)
    return " ".join(map(str, ids)) if tokenizer is None else tokenizer.decode(ids)


def batch_of(ids: Sequence[int], length: int) -> Batch:
    """One document [1, length] without targets; what follows `ids` is filled up and, being later, not seen."""
    filled = torch.zeros(1, length, dtype=torch.int64)
    filled[0, : len(ids)] = torch.tensor(list(ids))
    places = torch.arange(length).unsqueeze(0)
    labels = torch.full_like(filled, IGNORED)
    return Batch(filled, labels, places, torch.zeros_like(filled), places, step=0, mixed=False)


def choose(scores: Tensor, temperature: float, seed: int, place: int) -> int:
    """Index into `scores` [V]: the largest, after adding keyed Gumbel noise when temperature > 0."""
    scores = scores.detach().cpu()
    if temperature > 0:
        keyed = np.random.Generator(np.random.Philox(key=(seed << 64) + place))  # torch's CPU seed keeps 32 bits
        uniform = torch.from_numpy(keyed.random(scores.shape[0])).clamp_(min=1e-300)
        scores = scores.double() / temperature - (-uniform.log()).log()
    return int(scores.argmax())
