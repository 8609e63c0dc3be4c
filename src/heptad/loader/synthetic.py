"""Made-up tokens for a job, keyed and in memory: what `verify` and tests train on without touching a disk.

Documents are of random length, from one token to longer than a sample; prompts are masked raggedly; of every 11 samples
of a packed stream one has no target at all and one has a single one. A wrong denominator cannot hide in that.
"""

from __future__ import annotations

import numpy as np

from heptad.config.schema import Job
from heptad.loader.corpus import DEFAULT_SOURCE
from heptad.loader.prepare import PreparedData, Source
from heptad.loader.store import Tokens


def synthetic(job: Job, num_samples: int | None = None) -> PreparedData:
    """About `num_samples` training samples of job.data.seq_len for job.model.vocab (default: enough for 8 steps).

    Depends on (job.data.seed, seq_len, vocab, sizes) only; validation holds one global batch. tokenizer is None.
    """
    length, vocab, batch = job.data.seq_len, job.model.vocab, job.train.global_batch
    wanted = num_samples if num_samples is not None else 8 * batch
    train = random_tokens(job.data.seed, wanted, length, vocab, few_targets=batch > 1)
    validation = random_tokens(job.data.seed + 1, batch, length, vocab, few_targets=False)
    return PreparedData((Source(DEFAULT_SOURCE, 1.0, train, validation),), length, job.data.pack)


def random_tokens(seed: int, num_samples: int, seq_len: int, vocab: int, few_targets: bool) -> Tokens:
    """`num_samples` packed samples of random ids below `vocab`, with documents and masks as the module says."""
    random = np.random.Generator(np.random.Philox(key=seed))
    total = num_samples * seq_len + 1
    tokens = random.integers(0, vocab, total)
    lengths = random.geometric(min(0.5, 2.5 / seq_len), total)
    ends = np.cumsum(lengths)
    ends = np.append(ends[ends < total], total)
    lengths = np.diff(ends, prepend=0)
    prompt = np.floor(lengths * np.clip(random.uniform(-0.5, 0.9, len(ends)), 0, 1)).astype(np.int64)
    place = np.arange(total) - np.repeat(ends - lengths, lengths)
    targets = place >= np.repeat(prompt, lengths)
    if few_targets:
        sample, within = np.divmod(np.arange(total) - 1, seq_len)
        targets &= sample % 11 != 3
        targets &= (sample % 11 != 7) | (within == seq_len // 2)
    return Tokens.from_arrays(tokens.astype(np.int64), ends.astype(np.int64), targets)
