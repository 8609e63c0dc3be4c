"""Every parameter of a model as data: name, shape, a logical name for each dim, role, unit, initial value.

Ownership, reduction, gradient norm, optimizer group, memory and checkpoint of a parameter follow from its `ParamSpec`.
This module never imports torch. Read next: `decoder.py` (the torch model these specs must equal), `resolve.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Role = Literal["matrix", "embedding", "head", "norm", "bias"]


@dataclass(frozen=True, slots=True)
class Init:
    """`normal`: value = normal(0, std) keyed by (seed, name, flat index); `constant`: value = std for every element."""

    kind: Literal["normal", "constant"]
    value: float


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """One parameter of the whole model, before any axis cuts it.

    dims: logical name of each dim, e.g. ("heads", "width"); axes map names to mesh axes. role decides optimizer and
    decay. trainable False: no gradient, no optimizer state, no reduction.
    """

    name: str
    shape: tuple[int, ...]
    dims: tuple[str, ...]
    role: Role
    init: Init
    trainable: bool = True

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class UnitSpec:
    """One unit of the step's program: `params` it owns and `borrowed` ones of other units it reads (a tied head).

    Reads-in-backward are those that the input gradient needs: a linear's weight yes, an embedding's table no.
    """

    name: str
    kind: Literal["embed", "block", "head", "custom"]
    segments: tuple[str, ...]
    params: tuple[str, ...]
    borrowed: tuple[str, ...] = ()
    backward_reads: tuple[str, ...] = ()
