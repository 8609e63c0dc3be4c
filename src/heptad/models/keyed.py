"""Numbers that are keyed, not drawn: a hash of (seed, name, index) in place of a generator's state.

The same element gets the same number on any rank, in any layout and whenever it is computed again. SplitMix64's mixing
(Steele, Lea, Flood, OOPSLA 2014) in wrapping int64 arithmetic. Read next: `init.py`, `dropout.py`.
"""

from __future__ import annotations

import hashlib

from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MULTIPLIERS = (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))
_SHIFTS = (30, 27)


def key_of(seed: int, name: str) -> int:
    """A signed 64-bit key of (seed, name), the same in every process."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def wrapped(value: int) -> int:
    """`value` modulo 2⁶⁴ as a signed 64-bit number."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


def shifted(x: Tensor, bits: int) -> Tensor:
    """Logical (unsigned) shift of int64 `x` to the right, as a new tensor."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def mix_(x: Tensor) -> Tensor:
    """SplitMix64's finaliser on int64 `x`, in place."""
    for bits, multiplier in zip(_SHIFTS, _MULTIPLIERS, strict=True):
        x.bitwise_xor_(shifted(x, bits)).mul_(multiplier)
    return x.bitwise_xor_(shifted(x, 31))
