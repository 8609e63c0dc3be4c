"""A rank's piece of a logical tensor: what checkpoints store, verify assembles and optimizers keep state for."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements [start, stop) of the flattened logical tensor `name` of `shape`; `tensor` is 1-D, stop - start long."""

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    tensor: Tensor

    def __post_init__(self) -> None:
        assert self.tensor.ndim == 1 and self.tensor.numel() == self.stop - self.start, self.name
