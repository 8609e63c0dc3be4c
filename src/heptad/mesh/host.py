"""The one seam where a value computed on the device becomes a Python number (a decision, a figure to print).

On fake tensors there is no value: `expected` stands in, so the same step runs in a dry run and under fake process
groups.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


def host_value(tensor: Tensor, expected: float) -> float:
    """The number in a one-element tensor; `expected` when the tensor is fake."""
    if isinstance(tensor, FakeTensor) or tensor.is_meta:
        return expected
    return float(tensor.item())


def host_counts(tensor: Tensor, expected: Sequence[int]) -> list[int]:
    """The numbers in a 1-D integer tensor, in one transfer; `expected` when the tensor is fake."""
    if isinstance(tensor, FakeTensor) or tensor.is_meta:
        return list(expected)
    return [int(number) for number in tensor.tolist()]
