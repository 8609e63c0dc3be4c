"""What the pipeline simulator is told: seconds of each stage's actions, and of what crosses a stage boundary. No torch.

A *stage* is one chunk of the model: with V chunks a rank there are V·P of them. Any unit of time will do as long as it
is the same everywhere. Read next: `pipeline.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of F, I, W and B of every stage, and the seconds a pair hides by running its two sides together.

    A pair takes F + B - `hidden_s` (F + I - `hidden_s` where its backward is an I): what one micro-batch sends under
    the other's computation costs nothing.
    """

    forward_s: tuple[float, ...]
    input_grad_s: tuple[float, ...]
    weight_grad_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    hidden_s: float = 0.0

    def __post_init__(self) -> None:
        rows = (self.forward_s, self.input_grad_s, self.weight_grad_s, self.backward_s)
        assert len({len(row) for row in rows}) == 1, "one time for each stage"
        assert min(map(min, rows)) >= 0 and self.hidden_s >= 0, "times are not negative"
        longest = min(min(self.forward_s), min(self.backward_s), min(self.input_grad_s))
        assert self.hidden_s <= longest or not self.hidden_s, "a pair takes at least as long as its longer side"

    @property
    def num_stages(self) -> int:
        """V·P."""
        return len(self.forward_s)

    def of(self, letter: str, stage: int) -> float:
        """Seconds of one F, B, I or W of `stage`; a side of a pair as if alone."""
        rows = {"F": self.forward_s, "B": self.backward_s, "I": self.input_grad_s, "W": self.weight_grad_s}
        return rows[letter][stage]

    @classmethod
    def stages(
        cls, forward_s: Sequence[float], input_grad_s: Sequence[float], weight_grad_s: Sequence[float],
        backward_s: Sequence[float] | None = None, hidden_s: float = 0.0,
    ) -> Times:  # fmt: skip
        """One time for each stage; a whole backward takes I + W unless said otherwise."""
        whole = backward_s or [i + w for i, w in zip(input_grad_s, weight_grad_s, strict=True)]
        return cls(tuple(forward_s), tuple(input_grad_s), tuple(weight_grad_s), tuple(whole), hidden_s)

    @classmethod
    def uniform(
        cls, num_stages: int, f: float = 1.0, i: float = 1.0, w: float = 1.0,
        b: float | None = None, pair: float | None = None,
    ) -> Times:  # fmt: skip
        """The same for every stage. `b`: a whole backward, I + W unless given. `pair`: F&B, F + B unless given."""
        whole = i + w if b is None else b
        hidden = 0.0 if pair is None else f + whole - pair
        forward, input_grad, weight_grad, backward = ((value,) * num_stages for value in (f, i, w, whole))
        return cls(forward, input_grad, weight_grad, backward, hidden)


@dataclass(frozen=True, slots=True)
class Links:
    """`transfer_s[s]`: seconds that a message between stages s and s + 1 holds the link, in either direction.

    Messages from one rank to another leave one after the other; each arrives `latency_s` after it has left. Between two
    stages of one rank nothing is sent.
    """

    transfer_s: tuple[float, ...]
    latency_s: float = 0.0

    @property
    def free(self) -> bool:
        """Messages take no time at all."""
        return not self.latency_s and not any(self.transfer_s)

    @classmethod
    def uniform(cls, num_stages: int, transfer_s: float = 0.0, latency_s: float = 0.0) -> Links:
        """The same for every boundary."""
        return cls((transfer_s,) * (num_stages - 1), latency_s)
