"""What each data rank reads at each step: a pure function of the step, over the token stores.

Step n reads the samples at sequence numbers progress.sequence(n) + [0, global_batch); data rank r of N takes the r-th
of N equal parts, as K = global_batch / (N · micro_batch) micro-batches. Peers of one data rank (tensor, pipeline,
context) build the same Loader and read the same batches. Reading a step costs O(tokens of this rank) and touches only
mapped files, so a step may be read twice, out of order, or never.

Validation is a fixed set, the same for every layout and step: min(all, val_batches · global_batch) samples of the union
of the sources' validation documents, in one keyed order. Ranks get equally many batches; what is missing at the end is
rows without targets (C-084), which add 0 to loss and count. It keeps no state (C-142).
Training has no tail: epochs run on. Tensors are made here and nowhere else in this folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from heptad.config.schema import Job
from heptad.errors import ConfigError
from heptad.loader.order import GlobalOrder, Ints, SourceShare, permuted, rank_slots
from heptad.loader.pack import Rows, Samples, stacked
from heptad.loader.prepare import PreparedData, prepare
from heptad.loader.progress import fresh, resumed, saved
from heptad.loader.store import outside
from heptad.loader.tokenise import TextTokenizer
from heptad.models.batch import Batch


class Loader:
    """The batches of one data rank.

    `tokens` replaces the job's corpus (synthetic data, tests); `state` is what `state(n)` gave in the run to resume.
    Raises ConfigError for data that does not fit the job or the state.
    """

    def __init__(
        self,
        job: Job,
        data_rank: int,
        data_ranks: int,
        tokens: PreparedData | None = None,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        batch, micro = job.train.global_batch, job.train.micro_batch
        if batch % (data_ranks * micro):
            rule = f"divisible by data ranks {data_ranks} × micro_batch {micro}"
            fix = f"use a multiple of {data_ranks * micro}, or another number of data ranks"
            raise ConfigError.of("train.global_batch", batch, rule, fix)
        self.job = job
        self.data_rank, self.data_ranks = data_rank, data_ranks
        self.data = tokens if tokens is not None else prepare(job)
        _check(self.data, job)
        shape = (job.data.seq_len, job.data.pack)
        self._train = [Samples(source.train, *shape) for source in self.data.sources]
        self._validation = [Samples(source.validation, *shape) for source in self.data.sources]
        shares = _shares(self.data, self._train)
        self._digests = {source.name: source.train.digest for source in self.data.sources}
        if state is None:
            self.progress = fresh(batch, job.train.steps)
        else:
            self.progress = resumed(
                state, shares, self._digests, batch, job.train.steps, job.data.seed, job.data.shuffle
            )
        self.order = GlobalOrder(shares, job.data.seed, job.data.shuffle, self.progress.origin)

    @property
    def vocab(self) -> int:
        """Rows of the model's embedding; every id lies below."""
        return self.job.model.vocab

    @property
    def tokenizer(self) -> TextTokenizer | None:
        """Encodes and decodes text; None for made-up tokens."""
        return self.data.tokenizer

    @property
    def num_samples(self) -> int:
        """Training samples of all sources: one epoch of each."""
        return sum(samples.num_samples for samples in self._train)

    @property
    def num_validation_samples(self) -> int:
        """Samples `validation` covers over all ranks."""
        every = sum(samples.num_samples for samples in self._validation)
        return min(every, self.job.train.val_batches * self.job.train.global_batch)

    @property
    def digest(self) -> str:
        """Hash of the tokens behind this loader: must be equal on all ranks."""
        return self.data.digest

    def step(self, n: int) -> list[Batch]:
        """The K micro-batches [micro_batch, L] of 0-based step `n` for this data rank."""
        slots = rank_slots(self.progress.global_batch, self.data_rank, self.data_ranks)
        sequence = self.progress.sequence(n) + np.arange(slots.start, slots.stop, dtype=np.int64)
        read = self.order.read(sequence)
        return self._batches(self._train, read.source, read.sample, sequence, step=n)

    def validation(self) -> list[Batch]:
        """The fixed validation batches [micro_batch, L] of this data rank: equally many on every rank, maybe none."""
        micro, ranks = self.job.train.micro_batch, self.data_ranks
        total = self.num_validation_samples
        if total == 0:
            return []
        rounds = -(-total // (ranks * micro))
        slots = (
            np.arange(rounds * ranks * micro, dtype=np.int64).reshape(rounds, ranks, micro)[:, self.data_rank].ravel()
        )
        sizes = [samples.num_samples for samples in self._validation]
        starts = np.cumsum([0, *sizes])
        sample = np.full_like(slots, -1)
        real = slots < total
        sample[real] = permuted(slots[real], sum(sizes), "validation")
        source = np.where(real, np.searchsorted(starts, sample, side="right") - 1, 0)
        return self._batches(self._validation, source, np.where(real, sample - starts[source], -1), slots, step=0)

    def state(self, steps_done: int) -> dict[str, Any]:
        """What to save after `steps_done` steps: small, JSON, equal on all ranks, of no layout."""
        return saved(self.progress, self.order, steps_done, self.job.train.steps, self._digests)

    def _batches(self, stores: list[Samples], source: Ints, sample: Ints, sequence: Ints, step: int) -> list[Batch]:
        micro = self.job.train.micro_batch
        rows = [stores[s].rows(np.asarray([i])) for s, i in zip(source, sample, strict=True)]
        starts = range(0, len(rows), micro)
        return [_batch(stacked(rows[i : i + micro]), sequence[i : i + micro], step) for i in starts]


def _batch(rows: Rows, sequence: Ints, step: int) -> Batch:
    """Tensors [B, L] int64; index = sequence number · L + place."""
    length = rows.ids.shape[1]
    index = sequence[:, None] * length + np.arange(length, dtype=np.int64)
    return Batch(
        ids=torch.from_numpy(rows.ids),
        labels=torch.from_numpy(rows.labels),
        positions=torch.from_numpy(rows.positions),
        documents=torch.from_numpy(rows.documents),
        index=torch.from_numpy(index),
        step=step,
        real=None if rows.real.all() else torch.from_numpy(rows.real).bool(),
    )


def _shares(data: PreparedData, train: list[Samples]) -> list[SourceShare]:
    pairs = zip(data.sources, train, strict=True)
    return [SourceShare(source.name, samples.num_samples, source.weight) for source, samples in pairs]


def _check(data: PreparedData, job: Job) -> None:
    """Every source has something to learn, and ids the model has rows for."""
    if (data.seq_len, data.pack) != (job.data.seq_len, job.data.pack):
        rule = f"the data was prepared for seq_len {data.seq_len}, pack {data.pack}"
        raise ConfigError.of("data.seq_len", job.data.seq_len, rule, "prepare it for this job")
    for source in data.sources:
        high = max(source.train.max_id, source.validation.max_id)
        if high >= job.model.vocab:
            raise outside([high], job.model.vocab)
        if Samples(source.train, job.data.seq_len, job.data.pack).num_samples == 0:
            rule = f"a training sample needs two tokens; source {source.name!r} has {source.train.num_tokens}"
            raise ConfigError.of("data", source.name, rule, "give more text, or lower data.val_fraction")
