"""Idle time of each schedule as the papers give it, and where that is exact: uniform stages, free messages. Pure.

F, I, W, B, F&B: seconds of one chunk's forward, input gradient, weight gradient, whole backward, and of an overlapped
pair. Idle time is a rank's, within one step, and the same on every rank. "Exact" was found by simulating every schedule
over P <= 6, M <= 16 and F, I, W in 0..3 (`tests/simulate/test_formulas.py` repeats it): outside the range given the
formula is off. Read next: `simulate/pipeline.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

PAIRED = "F = I >= W, F&B = F+B, pairs as one block"


@dataclass(frozen=True, slots=True)
class Chunk:
    """Seconds of one chunk's actions; `pair` is F&B."""

    f: float
    i: float
    w: float
    b: float
    pair: float

    @property
    def whole_backward(self) -> bool:
        """B = I + W and F&B = F + B: nothing is gained or lost by splitting or pairing."""
        return abs(self.b - self.i - self.w) < 1e-12 and abs(self.pair - self.f - self.b) < 1e-12


@dataclass(frozen=True, slots=True)
class Formula:
    """`text` as it is printed, with `where` it is exact; `idle_s(P, V, M, chunk)`, `exact(P, V, M, chunk)`."""

    text: str
    where: str
    idle_s: Callable[[int, int, int, Chunk], float]
    exact: Callable[[int, int, int, Chunk], bool]


def _zero_bubble(num_ranks: int, _: int, num_microbatches: int, at: Chunk) -> bool:
    return num_microbatches >= num_ranks and at.w <= min(at.f, at.i) and at.whole_backward


def _zbv(num_ranks: int, _: int, num_microbatches: int, at: Chunk) -> bool:
    return at.f == at.i == at.w and num_microbatches >= 2 * num_ranks - 1 and at.whole_backward


def _dualpipe(_: int, __: int, ___: int, at: Chunk) -> bool:
    return at.f == at.i >= at.w and at.whole_backward


def _one_f_one_b(num_ranks: int, _: int, __: int, at: Chunk) -> float:
    return (num_ranks - 1) * (at.f + at.b)


def _always(_: int, __: int, ___: int, ____: Chunk) -> bool:
    return True


def _one_chunk_or_full(num_ranks: int, chunks: int, num_microbatches: int, _: Chunk) -> bool:
    return chunks == 1 or num_microbatches >= num_ranks


FORMULAS = {
    "naive": Formula("(P-1)MV(F+B)", "any numbers", lambda p, v, m, at: (p - 1) * m * v * (at.f + at.b), _always),
    "gpipe": Formula("(P-1)(F+B)", "M >= P, or V = 1", _one_f_one_b, _one_chunk_or_full),
    "1f1b": Formula("(P-1)(F+B)", "any numbers", _one_f_one_b, _always),
    "interleaved": Formula("(P-1)(F+B)", "M >= P, or V = 1", _one_f_one_b, _one_chunk_or_full),
    "pipedream": Formula("(P-1)(F+B)", "a run of M, filled and drained once", _one_f_one_b, _always),
    "zbh1": Formula(
        "(P-1)(F+B-2W)", "M >= P, W <= min(F, I)", lambda p, v, m, at: (p - 1) * (at.f + at.b - 2 * at.w), _zero_bubble
    ),
    "zbv": Formula("(P-1)F", "F = I = W, M >= 2P-1", lambda p, v, m, at: (p - 1) * at.f, _zbv),
    "dualpipe": Formula(
        "(P/2-1)(F&B+B-3W)", PAIRED, lambda p, v, m, at: (p / 2 - 1) * (at.pair + at.b - 3 * at.w), _dualpipe
    ),
    "dualpipev": Formula(
        "(P-1)(F&B+B-3W)", PAIRED, lambda p, v, m, at: (p - 1) * (at.pair + at.b - 3 * at.w), _dualpipe
    ),
}


def idle_fraction(name: str, num_ranks: int, chunks: int, num_microbatches: int, at: Chunk) -> float:
    """Idle time ÷ (idle time + work), work being V·M·(F + B) a rank: GPipe and 1F1B (P-1)/(M+P-1), interleaved
    (P-1)/(VM+P-1), naive (P-1)/P. Not idle time ÷ work, the "(P-1)/M" of some papers."""
    idle = FORMULAS[name].idle_s(num_ranks, chunks, num_microbatches, at)
    return idle / (idle + chunks * num_microbatches * (at.f + at.b))
