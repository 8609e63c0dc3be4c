"""The ring: what it sends, that hops travel while blocks are computed, what is skipped, and what it holds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from tests.axes.context.attention import Case, core_of, error, local, on_all, one_device
from torch import Tensor

from heptad.axes.context import ring
from heptad.axes.context.kernels import CpuFlash, FormedScores, Kernels
from heptad.axes.context.take import take
from heptad.config.schema import LayoutSection
from heptad.launch.forked import forked
from heptad.mesh.collectives import Group, Work
from heptad.mesh.device import Mesh
from heptad.mesh.layout import Layout
from heptad.mesh.meter import MemoryMeter
from heptad.models.batch import Batch
from heptad.trace import Transfer


@pytest.mark.parametrize("kv_heads", [12, 4, 1])
@pytest.mark.parametrize(("dtype", "size", "wide"), [(torch.float64, 8, 8), (torch.bfloat16, 2, 4)])
@pytest.mark.parametrize("degree", [2, 3, 4])
def test_sends_what_the_formula_says(degree: int, dtype: torch.dtype, size: int, wide: int, kv_heads: int) -> None:
    """(C-1) · 2·B·(L/C)·H_kv·d forward; backward the same and once more, gradients in at least fp32."""
    case = Case(kv_heads=kv_heads, dtype=dtype)
    ((_, sent),) = on_all(dict(cp=degree), case)
    elements = (degree - 1) * 2 * len(case.rows) * -(-case.length // degree) * kv_heads * case.head_dim
    assert sent == [
        Transfer("send", "cp", "backward", elements * (size + wide), 2 * (degree - 1)),
        Transfer("send", "cp", "forward", elements * size, degree - 1),
    ]


@pytest.mark.parametrize("degree", [2, 3, 4])
def test_gathered_keys_send_what_the_ring_sends(degree: int) -> None:
    case = Case(kv_heads=4)
    ((_, sent),) = on_all(dict(cp=degree, context="gather"), case)
    num_bytes = 8 * (degree - 1) * 2 * len(case.rows) * -(-case.length // degree) * 4 * case.head_dim
    assert sent == [
        Transfer("all_gather", "cp", "backward", num_bytes, 1),
        Transfer("all_gather", "cp", "forward", num_bytes, 1),
        Transfer("reduce_scatter", "cp", "backward", num_bytes, 1),
    ]


@dataclass
class Noted:
    """Blocks and hops in the order in which they run; a hop's number counts the messages started."""

    events: list[str] = field(default_factory=list)
    hops: int = 0

    def shift(self, out: Tensor, inp: Tensor, group: Group, phase: str) -> Work:
        """In place of `collectives.shift`."""
        hop, work = self.hops, SHIFT(out, inp, group, phase)
        self.hops += 1
        self.events.append(f"start {hop}")

        class Watched(Work):
            def wait(this) -> None:
                self.events.append(f"wait {hop}")
                work.wait()

            def wait_sent(this) -> None:
                work.wait_sent()

        return Watched()


SHIFT = ring.shift


@dataclass
class NotedKernels:
    """CPU flash that notes each block."""

    noted: Noted
    tile: int | None = None

    def forward(self, *block: Any) -> tuple[Tensor, Tensor]:
        """See `Kernels`."""
        self.noted.events.append("block")
        return CpuFlash().forward(*block)

    def backward(self, *block: Any) -> tuple[Tensor, Tensor, Tensor]:
        """See `Kernels`."""
        self.noted.events.append("block")
        return CpuFlash().backward(*block)


def prepared(rank: int, layout: dict[str, Any], case: Case) -> tuple[LayoutSection, Mesh, Batch, tuple[Tensor, ...]]:
    """This rank's groups, batch, and its own tokens of q, k, v and dout."""
    section = LayoutSection(**layout)
    mesh = Mesh(Layout.of(section), rank, [("cp",)], torch.device("cpu"))
    batch = take(case.batch(), section, rank)
    assert batch.context is not None
    padded = batch.context.index.shape[1]
    own = tuple(local(x, batch.context.part(rank, section.cp), padded) for x in case.tensors())
    return section, mesh, batch, own


def attention(rank: int, layout: dict[str, Any], case: Case, kernels: Kernels) -> tuple[Tensor, Any]:
    """A core's output on this rank, and a function that runs its backward."""
    section, mesh, batch, (q, k, v, dout) = prepared(rank, layout, case)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    core = core_of(mesh, section, Case(case.rows, kernels=kernels))
    return core(q, k, v, batch, None), lambda out: torch.autograd.grad(out, leaves, dout)


def events(rank: int, layout: dict[str, Any], case: Case) -> tuple[list[str], list[str]]:
    noted = Noted()
    ring.shift = noted.shift  # in this forked process alone
    out, backward = attention(rank, layout, case, NotedKernels(noted))
    forward, noted.events, noted.hops = noted.events, [], 0
    backward(out)
    return forward, noted.events


def test_the_next_hop_travels_while_a_block_is_computed() -> None:
    """Every wait has a block between it and its start; a rank's own block is left in part for the last gradients."""
    case = Case(((24,),), heads=2, kv_heads=2)
    for forward, backward in forked(3, events, dict(cp=3), case):
        assert forward == ["start 0", "block", "wait 0", "start 1", "block", "wait 1", "block"]
        own = backward.index("wait 0") - 1  # blocks of the first half of a rank's own work
        assert backward[: own + 2] == ["start 0", *["block"] * own, "wait 0"]
        starts = {event: at for at, event in enumerate(backward) if event.startswith("start")}
        assert len(starts) == 4  # keys twice, gradients twice
        for at, event in enumerate(backward):
            if event.startswith("wait"):
                assert "block" in backward[starts[event.replace("wait", "start")] : at], event
        assert backward[-1] == "wait 3" and backward[-2] == "block"


def test_hops_that_no_document_spans_are_passed_on_without_computing() -> None:
    """Contiguous, each rank a document of its own: one block forward, two backward, all hops still made."""
    layout, case = dict(cp=3, context_split="contiguous"), Case(((8, 8, 8),), heads=2, kv_heads=2)
    for forward, backward in forked(3, events, layout, case):
        assert forward.count("block") == 1 and sum(event.startswith("start") for event in forward) == 2
        assert backward.count("block") <= 4 and sum(event.startswith("start") for event in backward) == 4
    assert error(on_all(layout, case)[0][0], one_device(case)) <= 1e-12


def test_causal_work_is_skipped_by_block() -> None:
    """Zigzag: the same work on every rank and every hop, in one kernel call a hop."""
    for forward, _ in forked(4, events, dict(cp=4), Case(((64,),), heads=2, kv_heads=2)):
        assert forward.count("block") == 4


def held(rank: int, layout: dict[str, Any], case: Case) -> tuple[int, int, int]:
    """Bytes above q, k, v and dout: at most during the forward, after it, at most during the backward."""
    section, mesh, batch, (q, k, v, dout) = prepared(rank, layout, case)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    core = core_of(mesh, section, case)
    with MemoryMeter([q, k, v, dout]) as meter:
        given = meter.sample()
        out = core(q, k, v, batch, None)
        forward, kept = meter.peak_bytes - given, meter.sample() - given
        meter.reset_peak()
        torch.autograd.grad(out, leaves, dout)
        return forward, kept, meter.peak_bytes - given


PER_RANK = 320


@pytest.mark.parametrize("kernels", [CpuFlash(), FormedScores()], ids=lambda way: type(way).__name__)
def test_memory_follows_a_ranks_tokens_not_the_rows_length(kernels: Kernels) -> None:
    """As many tokens a rank on rings of 3 and 4 need the same bytes to one; kept are kv, out and log-sum-exp."""
    found = {}
    for degree in (3, 4):
        case = Case(((degree * PER_RANK,),), heads=3, kv_heads=3, head_dim=2, kernels=kernels)
        found[degree] = forked(degree, held, dict(cp=degree), case)
    assert max(found[3]) == max(found[4])
    one = 8 * 3 * PER_RANK * 2  # bytes of q
    for _, kept, _ in found[4]:
        assert kept == 3 * one + one // 2
