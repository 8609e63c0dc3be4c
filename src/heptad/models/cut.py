"""What of each parameter one rank holds: of dense ones a tensor rank, of experts an expert rank; by the dims' names.

| dense, dim 0 | cut over tp |
|---|---|
| heads | equal runs of whole heads |
| kv_heads | likewise; with fewer kv heads than ranks, T / kv_heads neighbours hold the same one |
| mlp, vocab | ⌈n/T⌉ rows; the last ranks' missing rows are zeros that no axis ever sees |
| any other | whole on every rank |

| experts [E, F, D] | cut over ep × etp |
|---|---|
| experts | ⌈E/ep⌉ of them; the last ranks' missing ones are zeros to which no token goes |
| expert_mlp | ⌈F/etp⌉ rows of each; missing rows are zeros, which compute zeros |

The two *families* are cut by different axes and so live in different buckets of the data axis. A weight whose input
features are cut is stored input first (`ParamSpec.input_first`), so dim 0 is the cut one there too and a dense rank's
share is one flat range of the whole tensor; with etp > 1 an expert rank's are several, a *run* for each expert.
Everything behind the gradients (data axis, optimizer, checkpoint, verify) works on flat ranges. Gradients that are a
part only are summed over ranks after the backward: of what reads the cut stream (norms, positions) and of what reads
this rank's heads (norms of queries and keys, kv heads that several ranks hold); of routers always, since each tensor
rank routes tokens of its own. Pure, no torch. Read next: `axes/data/engine.py`, `axes/tensor/__init__.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from heptad.config.schema import LayoutSection, ModelSection
from heptad.models.spec import ParamSpec

Summed = Literal["none", "tensor", "copies"]
"""Over which ranks a gradient is summed: none, all of the tensor axis, those that hold a copy of the same kv head."""

Family = Literal["dense", "expert"]
FAMILIES: tuple[Family, ...] = ("dense", "expert")
STACK = ("experts", "expert_mlp", "width")
"""Dims of the routed experts' matrices."""


def family_of(spec: ParamSpec) -> Family:
    """Which axes cut it."""
    return "expert" if spec.dims == STACK else "dense"


@dataclass(frozen=True, slots=True)
class Run:
    """Elements [start, start + numel) of a local tensor are [whole, whole + numel) of the whole one."""

    start: int
    whole: int
    numel: int

    def within(self, start: int, stop: int) -> Run:
        """The part of it that lies in the local range [start, stop), perhaps empty."""
        first = min(max(start - self.start, 0), self.numel)
        last = min(max(stop - self.start, first), self.numel)
        return Run(self.start + first, self.whole + first, last - first)


@dataclass(frozen=True, slots=True)
class Cut:
    """How one rank holds `spec`: `local` is its shape in memory, padding included.

    runs: which elements of the whole tensor lie where; on every rank as many, in order, of padding alone empty ones.
    copies: ranks that hold the same range; owner: the first of these, which alone counts in norms.
    """

    spec: ParamSpec
    local: ParamSpec
    runs: tuple[Run, ...]
    copies: int = 1
    owner: bool = True
    summed: Summed = "none"

    @property
    def start(self) -> int:
        """Of a cut of one run: the first element of the whole tensor that is here."""
        (run,) = self.runs
        return run.whole

    @property
    def stop(self) -> int:
        """Of a cut of one run: behind the last."""
        (run,) = self.runs
        return run.whole + run.numel


def cut(spec: ParamSpec, section: ModelSection, tp: int, index: int, sequence: bool) -> Cut:
    """What rank `index` of `tp` holds of a dense `spec`; `sequence`: the residual stream is cut over its tokens."""
    assert family_of(spec) == "dense", spec.name
    dim, size = spec.dims[0], spec.shape[0]
    if tp == 1:
        return _whole(spec)
    if dim == "heads" or (dim == "kv_heads" and _kv_heads(section) >= tp):
        return _rows(spec, size // tp, index)
    if dim == "kv_heads":
        assert section.head_dim is not None
        copies = tp // _kv_heads(section)
        held = _rows(spec, section.head_dim, index // copies)
        return replace(held, copies=copies, owner=index % copies == 0, summed="copies")
    if dim in ("mlp", "vocab"):
        return _rows(spec, -(-size // tp), index)
    partial = dim in ("head_dim", "experts") or (sequence and spec.stream)
    return replace(_whole(spec), copies=tp, owner=index == 0, summed="tensor" if partial else "none")


def expert_cut(spec: ParamSpec, ep: int, etp: int, index: int) -> Cut:
    """What the rank at `index` = ep's place · etp + etp's place holds of a stack of experts."""
    experts, inner, width = spec.shape
    here, rows = -(-experts // ep), -(-inner // etp)
    at_ep, at_etp = divmod(index, etp)
    if etp == 1:
        return _rows(spec, here, at_ep)
    first = min(at_etp * rows, inner)
    real = (min(first + rows, inner) - first) * width
    runs = []
    for expert in range(here):
        number = at_ep * here + expert
        whole = (number * inner + first) * width if number < experts else spec.numel
        runs.append(Run(expert * rows * width, whole, real if number < experts else 0))
    return Cut(spec, replace(spec, shape=(here, rows, width)), tuple(runs))


def cuts(specs: Sequence[ParamSpec], section: ModelSection, tp: int, sequence: bool) -> tuple[dict[str, Cut], ...]:
    """For each tensor rank: name of a dense parameter -> what it holds."""
    dense = [spec for spec in specs if family_of(spec) == "dense"]
    return tuple({spec.name: cut(spec, section, tp, index, sequence) for spec in dense} for index in range(tp))


Cuts = dict[Family, tuple[dict[str, Cut], ...]]


def family_cuts(specs: Sequence[ParamSpec], section: ModelSection, layout: LayoutSection) -> Cuts:
    """Each family's parameters, by name, on each of the ranks between which they are cut before the data axis does:
    tensor ranks; expert ranks, ep outermost."""
    experts = [spec for spec in specs if family_of(spec) == "expert"]
    every = range(layout.ep * layout.etp)
    return {
        "dense": cuts(specs, section, layout.tp, layout.sequence_parallel),
        "expert": tuple({spec.name: expert_cut(spec, layout.ep, layout.etp, at) for spec in experts} for at in every),
    }


def local_specs(held: Cuts, specs: Sequence[ParamSpec]) -> list[ParamSpec]:
    """`specs` in the shapes that every rank has in memory."""
    return [held[family_of(spec)][0][spec.name].local for spec in specs]


def _kv_heads(section: ModelSection) -> int:
    return section.kv_heads or section.heads


def _whole(spec: ParamSpec) -> Cut:
    return Cut(spec, spec, (Run(0, 0, spec.numel),))


def _rows(spec: ParamSpec, rows: int, part: int) -> Cut:
    size, width = spec.shape[0], spec.numel // spec.shape[0]
    first, last = min(part * rows, size), min((part + 1) * rows, size)
    local = replace(spec, shape=(rows, *spec.shape[1:]))
    return Cut(spec, local, (Run(0, first * width, (last - first) * width),))
