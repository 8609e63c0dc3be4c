"""Which tokens of each row of a batch lie on which rank of the context axis, and in what order.

The context axis makes it (`axes/context/split.py`), a batch carries it, the attention of that axis reads it. One
object, so ids, labels, positions, documents, token numbers and the mask can never be cut in different orders (C-031).
Degree 1 has one too: every token in natural order. Pure, no torch.

Legend: B rows, L tokens of a row, C context ranks, R ring ranks, U = C/R ranks that share a ring rank's tokens.
Read next: `axes/context/__init__.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


class Run(NamedTuple):
    """Tokens [start, stop) of a padded row, all of the one document that begins at `document_start`.

    Two runs of a row are of the same document exactly when their `document_start` is the same.
    """

    start: int
    stop: int
    document_start: int


Runs = tuple[Run, ...]
"""What one ring rank holds of one row, in the order in which its tokens lie."""


@dataclass(frozen=True, eq=False)
class Placement:
    """A row of L tokens is padded to ⌈L/C⌉·C; padding is a document of its own behind the last one.

    runs: of each row, of each ring rank. tokens: how many a ring rank holds of each row, ⌈L/C⌉·U. index [B, R·tokens]
    int64: the token (number within the padded row) at each place, ring rank after ring rank; so also context rank after
    context rank, since the U ranks of a ring rank hold equal pieces of its tokens in order. Equal only to itself, and
    hashed so: what is derived from one may be cached by it.
    """

    runs: tuple[tuple[Runs, ...], ...]
    tokens: int
    index: Ints

    @property
    def ring(self) -> int:
        """Ring ranks R."""
        return len(self.runs[0])

    def part(self, rank: int, ranks: int) -> Ints:
        """The tokens [B, n] of the `rank`-th of `ranks` equal pieces (ring ranks, or all context ranks)."""
        places = self.index.shape[1] // ranks
        return self.index[:, rank * places : (rank + 1) * places]

    @cached_property
    def inverse(self) -> Ints:
        """[B, R·tokens] int64: at which place each token lies. Undoes `index`."""
        places = np.empty_like(self.index)
        np.put_along_axis(places, self.index, np.arange(self.index.shape[1], dtype=np.int64)[None], axis=1)
        return places
