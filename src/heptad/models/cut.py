"""What of each parameter one rank of the tensor axis holds: always rows of dim 0, by the logical name of that dim.

| dim 0 | cut |
|---|---|
| heads | equal runs of whole heads |
| kv_heads | likewise; with fewer kv heads than ranks, T / kv_heads neighbours hold the same one |
| mlp, vocab | ⌈n/T⌉ rows; the last ranks' missing rows are zeros that no axis ever sees |
| any other | whole on every rank |

A weight whose input features are cut is stored input first (`ParamSpec.input_first`), so dim 0 is the cut one there too
and a rank's share is one flat range of the whole tensor, for which everything behind the gradients (data axis,
optimizer, checkpoint, verify) works already. Gradients that are a part only are summed over ranks after the backward:
of what reads the cut stream (norms, positions) and of what reads this rank's heads (norms of queries and keys, kv heads
that several ranks hold). Pure, no torch. Read next: `axes/data/engine.py`, `axes/tensor/__init__.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from heptad.config.schema import ModelSection
from heptad.models.spec import ParamSpec

Summed = Literal["none", "tensor", "copies"]
"""Over which ranks a gradient is summed: none, all of the tensor axis, those that hold a copy of the same kv head."""


@dataclass(frozen=True, slots=True)
class Cut:
    """How one tensor rank holds `spec`: `local` is its shape in memory, padding included.

    [start, stop): the flat range of the whole tensor that its first elements are. copies: ranks that hold the same
    range; owner: the first of these, which alone counts in norms.
    """

    spec: ParamSpec
    local: ParamSpec
    start: int
    stop: int
    copies: int
    owner: bool
    summed: Summed


def cut(spec: ParamSpec, section: ModelSection, tp: int, index: int, sequence: bool) -> Cut:
    """What rank `index` of `tp` holds of `spec`; `sequence`: the residual stream is cut over its tokens."""
    dim, size = spec.dims[0], spec.shape[0]
    if tp == 1:
        return Cut(spec, spec, 0, spec.numel, 1, True, "none")
    if dim == "heads" or (dim == "kv_heads" and _kv_heads(section) >= tp):
        return _rows(spec, size // tp, index)
    if dim == "kv_heads":
        assert section.head_dim is not None
        copies = tp // _kv_heads(section)
        held = _rows(spec, section.head_dim, index // copies)
        return replace(held, copies=copies, owner=index % copies == 0, summed="copies")
    if dim in ("mlp", "vocab"):
        return _rows(spec, -(-size // tp), index)
    partial = dim == "head_dim" or (sequence and spec.stream)
    return Cut(spec, spec, 0, spec.numel, tp, index == 0, "tensor" if partial else "none")


def cuts(specs: Sequence[ParamSpec], section: ModelSection, tp: int, sequence: bool) -> tuple[dict[str, Cut], ...]:
    """For each tensor rank: parameter's name -> what it holds."""
    return tuple({spec.name: cut(spec, section, tp, index, sequence) for spec in specs} for index in range(tp))


def _kv_heads(section: ModelSection) -> int:
    return section.kv_heads or section.heads


def _rows(spec: ParamSpec, rows: int, part: int) -> Cut:
    size, width = spec.shape[0], spec.numel // spec.shape[0]
    first, last = min(part * rows, size), min((part + 1) * rows, size)
    return Cut(spec, replace(spec, shape=(rows, *spec.shape[1:])), first * width, last * width, 1, True, "none")
