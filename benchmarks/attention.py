"""Core attention of one row, forward and backward, as contenders: whole on one rank, cut over all of them, in parts.

Every contender of a comparison cuts the same random q, k, v and output gradient, and `alike` asserts that outputs and
gradients put back in natural order agree. Projections, rotary positions and the rest of a block are not there: nothing
else of a model changes with the context axis. fp32, causal.
Read next: `context.py` (the lines), `ringlink.py` (over a link), `torchcp.py` (torch's ring).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from benchmarks.peers import CPU
from torch import Tensor

from heptad.axes.context import ring
from heptad.axes.context.apply import Core
from heptad.axes.context.kernels import CpuFlash, Kernels, Seen
from heptad.axes.context.take import take, whole
from heptad.config.context import degrees
from heptad.config.schema import LayoutSection
from heptad.mesh.collectives import Group, Work, shift
from heptad.mesh.device import Mesh
from heptad.mesh.layout import Layout
from heptad.models.attention import flash_attention
from heptad.models.batch import Batch
from heptad.models.placement import Ints


@dataclass(frozen=True, slots=True)
class Case:
    """A row of `length` tokens, H query and K kv heads of d; documents: their lengths (none: the row is one)."""

    length: int
    heads: int = 1
    kv_heads: int = 1
    head_dim: int = 32
    documents: tuple[int, ...] = ()

    def numbered(self) -> Ints:
        """The number of each token's document, [1, L]."""
        lengths = self.documents or (self.length,)
        return np.repeat(np.arange(len(lengths)), lengths)[None]

    def batch(self) -> Batch:
        """Ids and labels 0: attention reads neither. No mask of the whole row is made, so documents need a cut."""
        documents, places = torch.from_numpy(self.numbered()), torch.arange(self.length)[None]
        zeros = torch.zeros_like(documents)
        return Batch(zeros, zeros, places, documents, places, step=1, mixed=False)

    def tensors(self) -> list[Tensor]:
        """q, k, v and the output's gradient, [1, heads, L, d]."""
        source = torch.Generator().manual_seed(0)
        heads = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        return [torch.randn(1, number, self.length, self.head_dim, generator=source) for number in heads]


class Side:
    """Attention of a row over all ranks (one rank: as a model without the axis has it). `layout`: as a job says it."""

    def __init__(self, rank: int, case: Case, name: str, kernels: Kernels | None = None, **layout: str | int) -> None:
        world = dist.get_world_size()
        self.name, self.case = name, case
        self.section = LayoutSection.model_validate({"cp": world, **layout})
        self.mesh = Mesh(Layout.of(self.section), rank, [("cp",)], CPU)
        self.batch, self.core = take(case.batch(), self.section, rank), None
        tensors = case.tensors()
        assert world > 1 or not case.documents, "one rank has no mask for documents"
        if world > 1:
            assert self.batch.context is not None and case.length % world == 0, "nothing is padded here"
            _, dealt = degrees(self.section)
            groups = self.mesh.strided("cp", dealt), self.mesh.neighbours("cp", dealt)
            self.core = Core(*groups, self.section.context == "gather", None, kernels or CpuFlash())
            places = torch.from_numpy(self.batch.context.part(rank, world))[0]
            tensors = [x[:, :, places] for x in tensors]
        *leaves, self.dout = tensors
        self.leaves = [x.requires_grad_() for x in leaves]

    def forward(self) -> Tensor:
        """The output of this rank's tokens, [1, H, n, d]."""
        q, k, v = self.leaves
        attend = flash_attention if self.core is None else self.core
        return attend(q, k, v, self.batch, None)

    def results(self) -> list[Tensor]:
        """Output and gradients of q, k, v of this rank's tokens."""
        out = self.forward()
        return [out.detach(), *torch.autograd.grad(out, self.leaves, self.dout)]

    def step(self, number: int) -> float:
        self.results()
        return 0.0

    def together(self) -> list[Tensor]:
        """The same of all tokens in natural order, on every rank: [1, L, heads, d]."""
        found = [x.transpose(1, 2) for x in self.results()]
        if self.batch.context is None:
            return found
        return [whole(x, self.batch.context, self.case.length, self.mesh.group("cp"), "check") for x in found]


def alike(sides: list[Side], tolerance: float = 1e-4) -> None:
    """Assert that all sides compute the same, relative to the largest value of each tensor."""
    first = sides[0].together()
    for side in sides[1:]:
        for which, mine, theirs in zip(("out", "dq", "dk", "dv"), side.together(), first, strict=True):
            error = float((mine - theirs).abs().max() / theirs.abs().max())
            assert error <= tolerance, (side.name, which, error)


@dataclass
class Counting:
    """The CPU's kernels, and how many (query, key) pairs they were asked for, per head: what is masked is no pair."""

    tile: int | None = None
    forward_pairs: int = 0
    backward_pairs: int = 0
    inner: CpuFlash = field(default_factory=CpuFlash)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, seen: Seen) -> tuple[Tensor, Tensor]:
        """See `Kernels`."""
        self.forward_pairs += _pairs(q, k, seen)
        return self.inner.forward(q, k, v, seen)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, seen: Seen
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Kernels`."""
        self.backward_pairs += _pairs(q, k, seen)
        return self.inner.backward(dout, q, k, v, out, lse, seen)

    def flops(self, case: Case) -> int:
        """Two matmuls a pair forward, five backward: the fused kernel forms the scores again."""
        return 2 * case.heads * case.head_dim * (2 * self.forward_pairs + 5 * self.backward_pairs)


def _pairs(q: Tensor, k: Tensor, seen: Seen) -> int:
    rows, queries, keys = q.shape[0], q.shape[2], k.shape[2]
    if seen.causal:
        return rows * queries * (queries + 1) // 2
    return rows * (queries * keys if seen.bias is None else int((seen.bias == 0).sum()))


@contextmanager
def unsent() -> Iterator[None]:
    """A ring's hop copies what it would send, so that all of its compute is done on values of the same kind."""

    def copied(out: Tensor, inp: Tensor, group: Group, phase: str) -> Work:
        out.copy_(inp)
        return Work()

    ring.shift = copied
    try:
        yield
    finally:
        ring.shift = shift


class Compute(Side):
    """A ring's blocks without its messages."""

    def step(self, number: int) -> float:
        with unsent():
            return super().step(number)


class Transfer(Side):
    """A ring's messages without its blocks, one after another: keys and values twice round, their gradients once."""

    def step(self, number: int) -> float:
        assert self.core is not None
        group, (_, k, v) = self.core.ring, self.leaves
        with torch.no_grad():
            going = torch.stack((k, v))
        for _ in range(3 * (group.size - 1)):
            work = shift(torch.empty_like(going), going, group, "transfer")
            work.wait()
            work.wait_sent()
        return 0.0
