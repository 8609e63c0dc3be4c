"""Older versions of a stage's weights, kept for the backwards of an asynchronous pipeline: K, X and N end here.

A version is a copy of every trainable bucket's full buffer, in the computing dtype. X exchanges the kept weights with
those in the buffers, in place, so every view that autograd or a tap holds reads the version that its forward used; N
exchanges them again. Cost: a copy a version (at most min(M, P-r) versions live on rank r of P, the buffers' own
counted) and, for each backward that needs one, six passes over the parameters. Not by pointing the parameters at other
memory: what is saved inside a graph is a view of the buffer, and must change with it. Read next: `bucket.py`,
`schedule/versions.py` (when).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

CHUNK = 1 << 18
"""Elements exchanged at once: all that an exchange needs of memory."""


class Versions:
    """Copies of `buffers`, by the micro-batch that needs them; micro-batches that need the same ones share a copy."""

    def __init__(self, buffers: Sequence[Tensor]) -> None:
        self._buffers = [buffer.data for buffer in buffers]
        self._kept: dict[int, list[Tensor]] = {}
        self._present: list[Tensor] | None = None  # a copy of what is in the buffers, until they change

    def keep(self, microbatch: int) -> None:
        """K."""
        if self._present is None:
            self._present = [buffer.clone() for buffer in self._buffers]
        self._kept[microbatch] = self._present

    def exchange(self, microbatch: int) -> None:
        """X: the kept weights into the buffers, the newest ones into their place."""
        for kept, buffer in zip(self._kept[microbatch], self._buffers, strict=True):
            for one, other in zip(kept.split(CHUNK), buffer.split(CHUNK), strict=True):
                aside = one.clone()
                one.copy_(other)
                other.copy_(aside)

    def newest(self, microbatch: int) -> None:
        """N: back again; free once no other micro-batch needs them."""
        self.exchange(microbatch)
        del self._kept[microbatch]

    def changed(self) -> None:
        """The buffers hold other values now."""
        self._present = None

    @property
    def number(self) -> int:
        """Versions alive, that in the buffers counted."""
        others = {id(kept) for kept in self._kept.values() if kept is not self._present}
        return 1 + len(others)
