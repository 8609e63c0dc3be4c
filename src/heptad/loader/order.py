"""Which sample is read when: one global order, a pure function of the seed and of how many samples were consumed.

Samples are numbered by *sequence number*: the count of samples consumed before, over the whole job, whatever the
layout. Step n of a run with global batch G reads sequence numbers [n·G, (n+1)·G); data rank r of N reads the r-th of N
equal parts of them. So a rank count, a micro-batch size or a resume changes who reads a sample, never which sample is
next (C-131, C-133, C-139).

A source of n samples runs through epochs: its k-th read is position k % n of epoch k // n, and each epoch is another
permutation. A step may straddle two epochs, so no sample is dropped or repeated within an epoch. The permutation is
never stored: a Feistel network over the next power of two, walked until it lands below n (Black and Rogaway, 2002,
"cycle walking"), gives any entry by itself. Costs: O(batch) memory and time, for any n.

Several sources are interleaved in a fixed cycle of `CYCLE` reads, spaced evenly by weight. Consumption is counted per
source, so weights can change at a resume and no sample repeats within its source's epoch (C-143).

This module never imports torch. Read next: `progress.py` (steps, resume), `pack.py` (what a sample is).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

CYCLE = 4096
"""Reads after which the interleaving of sources repeats; weights are rounded to multiples of 1/CYCLE, at least one."""

ROUNDS = 8
MIN_BITS = 4  # below 16 values the halves are too narrow to mix; walking costs a few more turns instead


def permuted(positions: Ints, size: int, key: str) -> Ints:
    """Entries of a keyed permutation of range(size) at `positions` [n] (each in [0, size)), int64, O(n) memory."""
    assert size > 0
    bits = max((size - 1).bit_length(), MIN_BITS)
    low_bits = np.uint64(bits // 2)
    high_bits = np.uint64(bits - bits // 2)
    digest = hashlib.blake2b(key.encode(), digest_size=8 * ROUNDS).digest()
    keys = np.frombuffer(digest, dtype="<u8").astype(np.uint64)
    values = positions.astype(np.uint64)
    todo = np.arange(len(values))
    while len(todo):
        values[todo] = _feistel(values[todo], low_bits, high_bits, keys)
        todo = todo[values[todo] >= np.uint64(size)]
    return values.astype(np.int64)


def _feistel(
    values: NDArray[np.uint64], low_bits: np.uint64, high_bits: np.uint64, keys: NDArray[np.uint64]
) -> NDArray[np.uint64]:
    """One pass over [0, 2^(low+high)): the halves are mixed in turn, each by a hash of the other: invertible."""
    one = np.uint64(1)
    low = values & ((one << low_bits) - one)
    high = values >> low_bits
    for number, key in enumerate(keys):
        if number % 2 == 0:
            high = high ^ (_mixed(low, key) & ((one << high_bits) - one))
        else:
            low = low ^ (_mixed(high, key) & ((one << low_bits) - one))
    return (high << low_bits) | low


def _mixed(values: NDArray[np.uint64], key: np.uint64) -> NDArray[np.uint64]:
    """The finaliser of splitmix64 (Steele, Lea and Flood, 2014), keyed; wraps modulo 2^64."""
    values = values ^ key
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def epoch_order(reads: Ints, size: int, key: str, shuffle: bool) -> Ints:
    """Sample ids of a source's reads number `reads` [n]: position k % size of epoch k // size, reshuffled per epoch."""
    assert size > 0
    epochs, positions = reads // size, reads % size
    if not shuffle:
        return positions
    samples = np.empty_like(positions)
    for epoch in np.unique(epochs):
        here = epochs == epoch
        samples[here] = permuted(positions[here], size, f"{key}/epoch {epoch}")
    return samples


def shares(weights: Sequence[float], cycle: int = CYCLE) -> Ints:
    """Reads of each source in a cycle: `weights` scaled to sum to `cycle`, rounded by largest remainder, at least 1."""
    assert 0 < len(weights) <= cycle and all(weight > 0 for weight in weights)
    exact = np.asarray(weights, dtype=np.float64) / np.sum(weights) * (cycle - len(weights))
    counts: Ints = np.floor(exact).astype(np.int64)
    missing = cycle - len(weights) - int(counts.sum())
    counts[np.argsort(counts - exact, kind="stable")[:missing]] += 1
    counts += 1
    return counts


@dataclass(frozen=True, slots=True)
class Slots:
    """Where reads come from: `source` [n] indexes the order's sources, `sample` [n] is an id within that source."""

    source: Ints
    sample: Ints


@dataclass(frozen=True, slots=True)
class Origin:
    """Where the present mixture began: `samples` consumed in all by then, and of each source by name."""

    samples: int = 0
    consumed: tuple[tuple[str, int], ...] = ()

    def of(self, name: str) -> int:
        """Samples of source `name` consumed when the mixture began."""
        return dict(self.consumed).get(name, 0)


@dataclass(frozen=True, slots=True)
class SourceShare:
    """One source as the order sees it: its name (a key of the shuffle), number of samples and weight."""

    name: str
    num_samples: int
    weight: float = 1.0


class GlobalOrder:
    """sequence number -> (source, sample), for any sequence number from `origin.samples` on; O(CYCLE) memory."""

    def __init__(
        self, sources: Sequence[SourceShare], seed: int, shuffle: bool = True, origin: Origin | None = None
    ) -> None:
        self.sources = tuple(sources)
        self.seed = seed
        self.shuffle = shuffle
        self.origin = origin or Origin()
        assert self.sources and all(source.num_samples > 0 for source in self.sources)
        names = [source.name for source in self.sources]
        assert names == sorted(set(names)), f"sources stand in the order of their names, each once: {names}"
        cycle = CYCLE if len(self.sources) > 1 else 1
        self._shares = shares([source.weight for source in self.sources], cycle)
        owners = np.repeat(np.arange(len(self.sources)), self._shares)
        within = np.concatenate([np.arange(count, dtype=np.int64) for count in self._shares])
        due = (2 * within + 1) / (2 * self._shares[owners])  # the k-th of c reads is due in the middle of its c-th part
        order = np.lexsort((owners, due))
        self._owner: Ints = owners[order].astype(np.int64)
        self._within: Ints = within[order]

    def read(self, sequence: Ints) -> Slots:
        """The samples at sequence numbers `sequence` [n]."""
        owner, number = self._reads(sequence)
        sample = np.empty_like(number)
        for index, source in enumerate(self.sources):
            here = owner == index
            if here.any():
                key = f"{self.seed}/{source.name}"
                sample[here] = epoch_order(number[here], source.num_samples, key, self.shuffle)
        return Slots(owner, sample)

    def consumed(self, samples: int) -> dict[str, int]:
        """Reads of each source before sequence number `samples`; sources of an earlier mixture keep their count."""
        assert samples >= self.origin.samples
        turns, rest = divmod(samples - self.origin.samples, len(self._owner))
        part = np.bincount(self._owner[:rest], minlength=len(self.sources))
        counts = dict(self.origin.consumed)
        for index, source in enumerate(self.sources):
            counts[source.name] = self.origin.of(source.name) + turns * int(self._shares[index]) + int(part[index])
        return counts

    def _reads(self, sequence: Ints) -> tuple[Ints, Ints]:
        """Source of each sequence number, and how many reads of that source precede it since the job began."""
        assert not len(sequence) or int(sequence.min()) >= self.origin.samples
        since = sequence - self.origin.samples
        turns, place = since // len(self._owner), since % len(self._owner)
        owner = self._owner[place]
        before = np.asarray([self.origin.of(source.name) for source in self.sources], dtype=np.int64)
        number: Ints = before[owner] + turns * self._shares[owner] + self._within[place]
        return owner, number


def rank_slots(global_batch: int, data_rank: int, data_ranks: int) -> range:
    """Slots of a step that `data_rank` of `data_ranks` reads: equal, disjoint, contiguous, together the whole batch."""
    assert 0 <= data_rank < data_ranks and global_batch % data_ranks == 0
    share = global_batch // data_ranks
    return range(data_rank * share, (data_rank + 1) * share)
