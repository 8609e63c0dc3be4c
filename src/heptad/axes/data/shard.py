"""A rank's share of one parameter: what optimizer, gradient norm, verify and checkpoints see of the data axis."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from heptad.mesh.collectives import Group
from heptad.mesh.piece import Piece
from heptad.models.spec import ParamSpec


@dataclass(eq=False, slots=True)
class Shard:
    """The flat range [start, stop) of parameter `spec`; empty ranges are legal.

    master: 1-D, fp32 or fp64, updated in place by the optimizer (for a frozen parameter: what is stored).
    grad: 1-D, reduce dtype, the sum over the whole global batch, valid at the update; None for a frozen parameter.
    group: the ranks that together hold the parameter; None when each rank holds all of it.
    ranges: [start, stop) on every rank of `group` (`buckets.ranges_of`): what a whole-matrix update gathers.
    """

    spec: ParamSpec
    start: int
    stop: int
    master: Tensor
    grad: Tensor | None
    group: Group | None
    ranges: tuple[tuple[int, int], ...] = ()

    def gradient(self) -> Tensor:
        """The gradient of a trainable parameter."""
        assert self.grad is not None, f"{self.spec.name} is frozen"
        return self.grad

    def piece(self, tensor: Tensor, prefix: str = "") -> Piece:
        """`tensor` (of this shard's range) as a piece named after the parameter."""
        return Piece(prefix + self.spec.name, self.spec.shape, self.start, self.stop, tensor)
