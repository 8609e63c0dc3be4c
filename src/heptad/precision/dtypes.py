"""Which number formats a job means, by name: "auto" resolved for a kind of device. Never imports torch.

| | computes, is gathered | gradients are summed and kept | master copy, moments |
|---|---|---|---|
| auto on CUDA | bf16 | fp32 | fp32 |
| auto on CPU | fp32 | fp32 | fp32 |
| params = fp64 | fp64 | fp64 | fp64 |

`reduce = "auto"` is the master's format. Bytes per parameter follow (`axes/data/cost.py`, `optim/cost.py`).
Read next: `policy.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from heptad.config.schema import PrecisionSection


@dataclass(frozen=True, slots=True)
class Dtypes:
    """Names of formats, keys of `units.BYTES_PER_ELEMENT`: see the module's table."""

    params: str
    reduce: str
    master: str


def dtypes_of(section: PrecisionSection, device_type: str) -> Dtypes:
    """The formats of `section` on "cuda" or "cpu"."""
    params: str = section.params
    if params == "auto":
        params = "bf16" if device_type == "cuda" else "fp32"
    master = "fp64" if params == "fp64" else "fp32"
    return Dtypes(params, master if section.reduce == "auto" else section.reduce, master)
