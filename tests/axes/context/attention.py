"""Attention of whole rows on one device, and of a context axis' ranks put together: shared by this folder's tests."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from heptad.axes.context.apply import Core
from heptad.axes.context.kernels import CpuFlash, Kernels
from heptad.axes.context.take import take
from heptad.config.context import degrees
from heptad.config.schema import LayoutSection
from heptad.launch.forked import forked
from heptad.mesh.device import Mesh
from heptad.mesh.layout import Layout
from heptad.models.batch import Batch, visible
from heptad.models.dropout import Dropout
from heptad.models.placement import Ints
from heptad.trace import Transfer

Result = tuple[Tensor, ...]
"""out [B, H, L, d], dq, dk, dv."""


@dataclass(frozen=True)
class Case:
    """Rows of documents of these lengths, each adding up to the same."""

    rows: tuple[tuple[int, ...], ...] = ((23,), (23,))
    heads: int = 12
    kv_heads: int = 12
    head_dim: int = 5
    window: int | None = None
    dropout: Dropout | None = None
    kernels: Kernels = field(default_factory=CpuFlash)
    dtype: torch.dtype = torch.float64
    seed: int = 0

    @property
    def length(self) -> int:
        """Tokens of a row."""
        return sum(self.rows[0])

    def batch(self) -> Batch:
        """Ids and labels 0: attention reads neither."""
        documents = torch.tensor([np.repeat(np.arange(len(row)), row).tolist() for row in self.rows])
        zeros, places = torch.zeros_like(documents), torch.arange(self.length).expand(len(self.rows), -1)
        numbers = 1000 + torch.arange(documents.numel()).view_as(documents)
        return Batch(zeros, zeros, places, documents, numbers, step=7)

    def tensors(self) -> Result:
        """q, k, v and the gradient of the output, [B, heads, L, d], drawn alike in every dtype."""
        generator = torch.Generator().manual_seed(self.seed)
        heads = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        shapes = [(len(self.rows), number, self.length, self.head_dim) for number in heads]
        return tuple(torch.randn(shape, dtype=torch.float64, generator=generator).to(self.dtype) for shape in shapes)


def one_device(case: Case, tensors: Result | None = None) -> Result:
    """Plain masked softmax, in float64, by autograd."""
    q, k, v, dout = (x.double() for x in (case.tensors() if tensors is None else tensors))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    q, k, v = leaves
    k, v = (x.repeat_interleave(case.heads // case.kv_heads, 1) for x in (k, v))
    batch = case.batch()
    scores = q @ k.transpose(-2, -1) / math.sqrt(case.head_dim)
    probabilities = scores.masked_fill(~visible(batch.documents, case.window), -math.inf).softmax(-1)
    if case.dropout is not None:
        probabilities = case.dropout.attention(probabilities, batch.index, batch.index, batch.step)
    out = probabilities @ v
    return out.detach(), *torch.autograd.grad(out, leaves, dout)


def core_of(mesh: Mesh, section: LayoutSection, case: Case) -> Core:
    """This rank's core attention."""
    _, dealt = degrees(section)
    ring, neighbours = mesh.strided("cp", dealt), mesh.neighbours("cp", dealt)
    return Core(ring, neighbours, section.context == "gather", case.window, case.kernels)


def local(x: Tensor, places: Ints, padded: int) -> Tensor:
    """x [B, heads, L, d] -> what lies at these places [B, n] of the padded rows, laid out as projections do."""
    filled = torch.nn.functional.pad(x, (0, 0, 0, padded - x.shape[2]))
    index = torch.from_numpy(places.copy())[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3])
    return filled.gather(2, index).transpose(1, 2).contiguous().transpose(1, 2)


def on_rank(
    rank: int, layout: dict[str, Any], cases: list[tuple[Case, Result]]
) -> list[tuple[Result, Ints, list[Transfer]]]:
    """This rank's part of each case, the inverse of its placement, and what it sent."""
    section = LayoutSection(**layout)
    mesh = Mesh(Layout.of(section), rank, [("cp",)], torch.device("cpu"))
    found = []
    for case, tensors in cases:
        batch = take(case.batch(), section, rank)
        assert batch.context is not None
        mine, padded = batch.context.part(rank, section.cp), batch.context.index.shape[1]
        *leaves, dout = (local(x, mine, padded) for x in tensors)
        q, k, v = (x.requires_grad_() for x in leaves)
        mesh.ledger.reset()
        mesh.ledger.phase = "forward"
        out = core_of(mesh, section, case)(q, k, v, batch, case.dropout)
        mesh.ledger.phase = "backward"
        grads = torch.autograd.grad(out, (q, k, v), dout)
        assert all(x.dtype == case.dtype for x in (out, *grads))
        found.append(((out.detach(), *grads), batch.context.inverse, mesh.ledger.transfers()))
    return found


def joined(parts: list[Result], inverse: Ints, length: int) -> Result:
    """All ranks' parts in natural order, without padding."""
    places = torch.from_numpy(inverse[:, :length].copy())[:, None, :, None]
    whole = [torch.cat(ranks, 2) for ranks in zip(*parts, strict=True)]
    return tuple(x.gather(2, places.expand(-1, x.shape[1], -1, x.shape[3])) for x in whole)


def on_all(layout: dict[str, Any], *cases: Case, tensors: Result | None = None) -> list[tuple[Result, list[Transfer]]]:
    """Each case's whole result, and what rank 0 sent for it."""
    given = [(case, case.tensors() if tensors is None else tensors) for case in cases]
    ranks = forked(layout["cp"], on_rank, layout, given)
    found = []
    for case, *parts in zip(cases, *ranks, strict=True):
        found.append((joined([part[0] for part in parts], parts[0][1], case.length), parts[0][2]))
    return found


def error(found: Result, right: Result) -> float:
    """Largest difference, relative to the largest value of each tensor."""
    pairs = zip(found, right, strict=True)
    return max(float((x.double() - y).abs().max() / y.abs().max()) for x, y in pairs)
