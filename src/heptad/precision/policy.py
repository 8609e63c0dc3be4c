"""The job's number formats as torch dtypes: one value that the model, the data axis and the optimizer read.

Read next: `dtypes.py` (the rules), `axes/data/`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from heptad.config.schema import PrecisionSection
from heptad.precision.dtypes import dtypes_of


@dataclass(frozen=True, slots=True)
class Policy:
    """params: computes and is gathered; reduce: gradients are summed and kept; master: what the optimizer updates."""

    params: torch.dtype
    reduce: torch.dtype
    master: torch.dtype

    @classmethod
    def of(cls, section: PrecisionSection, device_type: str) -> Policy:
        """The policy of `section` on "cuda" or "cpu"."""
        names = dtypes_of(section, device_type)
        return cls(_dtype(names.params), _dtype(names.reduce), _dtype(names.master))


def _dtype(name: str) -> torch.dtype:
    return {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}[name]
