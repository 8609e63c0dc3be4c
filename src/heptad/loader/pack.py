"""What one sample is: a window of L + 1 tokens read as L inputs and L targets, with documents kept apart.

Packed (`data.pack = true`): documents stand one after another in corpus order, which is fixed; samples are windows of
L + 1 tokens with stride L, so inputs tile the stream and each token is a target at most once (C-129). The order of
samples is reshuffled per epoch (`order.py`), their content is not. Tail: the last window is padded, no token is lost.
Not packed: each document is cut by itself into windows of L + 1 with stride L, each padded to L.

In both, labels are shifted on the whole window before anything splits it (C-026), and
* the last token of a document has no target: no target crosses into the next one; the end token is itself a target;
* a token whose bit is 0 (a prompt) is context and no target;
* padding is masked by its place, never by its id (C-130), and counts as a document of its own;
* positions restart at 0 where a document or the sample begins, so a position is always < L;
* documents are numbered from 0 within the sample.
Costs: O(L) a sample; 8 bytes a document of memory when not packed, nothing when packed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from heptad.loader.order import Ints
from heptad.loader.store import Tokens

IGNORED = -100  # models.batch.IGNORED, which this module cannot import without torch; a test holds them equal
PADDING_ID = 0


@dataclass(frozen=True, slots=True)
class Rows:
    """Samples as numpy arrays, all [B, L] int64; the fields of `models.batch.Batch` without `index`.

    real: 1, or 0 where a row is filled up.
    """

    ids: Ints
    labels: Ints
    positions: Ints
    documents: Ints
    real: Ints


class Samples:
    """The samples of one store: `num_samples`, and `rows(numbers)` for any of them."""

    def __init__(self, tokens: Tokens, seq_len: int, pack: bool) -> None:
        assert seq_len > 0
        self.tokens = tokens
        self.seq_len = seq_len
        self.pack = pack
        if pack:
            self._last_piece = np.zeros(0, dtype=np.int64)
            self.num_samples = max(0, -(-(tokens.num_tokens - 1) // seq_len))
        else:
            lengths = np.diff(np.asarray(tokens.ends), prepend=0)
            self._last_piece = np.cumsum(np.maximum(1, -(-(lengths - 1) // seq_len)))
            self.num_samples = int(self._last_piece[-1]) if len(lengths) else 0

    def span(self, number: int) -> tuple[int, int]:
        """Tokens [start, stop) of sample `number`, at most L + 1 of them."""
        assert 0 <= number < self.num_samples
        if self.pack:
            start, end = number * self.seq_len, self.tokens.num_tokens
        else:
            document = int(np.searchsorted(self._last_piece, number, side="right"))
            pieces_before = int(self._last_piece[document - 1]) if document else 0
            document_start = int(self.tokens.ends[document - 1]) if document else 0
            start, end = document_start + (number - pieces_before) * self.seq_len, int(self.tokens.ends[document])
        return start, min(start + self.seq_len + 1, end)

    def rows(self, numbers: Ints) -> Rows:
        """Samples `numbers` [B]; -1 stands for a row of padding without any target."""
        rows = [padding(self.seq_len) if number < 0 else self.row(int(number)) for number in numbers]
        return stacked(rows)

    def row(self, number: int) -> Rows:
        """One sample, fields [1, L]."""
        length, (start, stop) = self.seq_len, self.span(number)
        window = self.tokens.ids(start, stop)
        place = np.arange(len(window))
        ends = self.tokens.ends
        first, last = np.searchsorted(ends, [start, stop - 1], side="right")
        document = np.searchsorted(np.asarray(ends[first:last]) - start, place, side="right")
        supervised = self.tokens.may_be_target(start, stop)
        row = padding(length)
        inputs = min(length, len(window))
        row.ids[0, :inputs] = window[:inputs]
        row.real[0, :inputs] = 1
        row.documents[0, :inputs] = document[:inputs]
        row.documents[0, inputs:] = document[inputs - 1] + 1
        targets = len(window) - 1
        kept = (document[1:] == document[:-1]) & supervised[1:]
        row.labels[0, :targets] = np.where(kept, window[1:], IGNORED)
        row.positions[0] = restarted(row.documents[0])
        return row


def padding(seq_len: int) -> Rows:
    """A row [1, L] that reads one document of padding and has no target."""
    shape = (1, seq_len)
    positions = np.arange(seq_len, dtype=np.int64).reshape(shape)
    documents = np.zeros(shape, dtype=np.int64)
    ids, labels = np.full(shape, PADDING_ID, dtype=np.int64), np.full(shape, IGNORED, dtype=np.int64)
    return Rows(ids, labels, positions, documents, np.zeros(shape, dtype=np.int64))


def stacked(rows: list[Rows]) -> Rows:
    """Rows [1, L] each, stacked to [B, L]."""
    return Rows(*(np.concatenate([getattr(row, name) for row in rows]) for name in Rows.__slots__))


def restarted(documents: Ints) -> Ints:
    """Positions [L] that count from 0 at every change of `documents` [L]."""
    place = np.arange(len(documents), dtype=np.int64)
    changes = np.flatnonzero(np.diff(documents, prepend=-1))
    return place - np.repeat(changes, np.diff(changes, append=len(documents)))
