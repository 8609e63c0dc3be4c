"""Core attention of all context ranks together equals a plain masked softmax on one device, with its gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.axes.context.attention import Case, error, on_all, one_device
from tests.tiny import tiny_job

from heptad.axes.context.apply import Core, cut_attention
from heptad.axes.context.kernels import CpuFlash, FormedScores
from heptad.config.schema import LayoutSection
from heptad.launch.forked import forked
from heptad.mesh.device import Mesh
from heptad.mesh.layout import Layout
from heptad.models.attention import Attention
from heptad.models.build import build
from heptad.models.decoder import Decoder
from heptad.models.dropout import Dropout

LAYOUTS: dict[str, dict[str, Any]] = {
    "ring of 2": dict(cp=2),
    "ring of 3": dict(cp=3),
    "ring of 4": dict(cp=4),
    "ring of 3, contiguous": dict(cp=3, context_split="contiguous"),
    "ulysses 2": dict(cp=2, context="ulysses"),
    "ulysses 3": dict(cp=3, context="ulysses"),
    "ulysses 4": dict(cp=4, context="ulysses"),
    "ring 2 x ulysses 2": dict(cp=4, context="ring+ulysses", cp_ulysses=2),
    "gather 2": dict(cp=2, context="gather"),
    "gather 3": dict(cp=3, context="gather"),
    "gather 4": dict(cp=4, context="gather", context_split="contiguous"),
}
PACKED = ((23,), (5, 11, 7), (1, 2, 19, 1))
DROPPED = Dropout(0.3, 1, "blocks.0.scores", first_head=24)
FORMED = FormedScores()
CASES = {
    "one document a row": Case(),
    "documents that differ by row": Case(PACKED),
    "grouped heads": Case(PACKED, kv_heads=4),
    "three kv heads": Case(PACKED, kv_heads=3),
    "one kv head": Case(PACKED, kv_heads=1),
    "window": Case(window=5),
    "window and documents": Case(PACKED, kv_heads=2, window=4),
    "window of two": Case(PACKED, kv_heads=1, window=2),
    "formed scores": Case(PACKED, kv_heads=4, kernels=FORMED),
    "dropout": Case(PACKED, kv_heads=3, kernels=FORMED, dropout=DROPPED),
    "dropout and window": Case(PACKED, kv_heads=6, window=5, kernels=FORMED, dropout=DROPPED),
    "fewer tokens than chunks": Case(((3, 2), (5,)), kv_heads=4),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_equals_one_device_with_every_gradient(name: str) -> None:
    for (label, case), (found, _) in zip(CASES.items(), on_all(LAYOUTS[name], *CASES.values()), strict=True):
        assert error(found, one_device(case)) <= 1e-12, label


@pytest.mark.parametrize("name", ["ring of 2", "ring 2 x ulysses 2", "gather 3"])
@pytest.mark.parametrize("kernels", [CpuFlash(), FORMED], ids=lambda way: type(way).__name__)
def test_rows_longer_than_a_tile(name: str, kernels: Any) -> None:
    cases = [
        Case(((1031,),), heads=2, kv_heads=1, head_dim=3, kernels=kernels),
        Case(((307, 724),), heads=2, kv_heads=1, head_dim=3, window=283, kernels=kernels),
    ]
    for case, (found, _) in zip(cases, on_all(LAYOUTS[name], *cases), strict=True):
        assert error(found, one_device(case)) <= 1e-12


@pytest.mark.parametrize("name", ["ring of 4", "ulysses 4", "ring 2 x ulysses 2", "gather 4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_types_lose_no_more_than_on_one_device(name: str, dtype: torch.dtype) -> None:
    """Gradients of a block are rounded once each before they are summed: a few times one device's one rounding."""
    case = Case(((101,), (37, 64)), kv_heads=3, dtype=dtype)
    right = one_device(case)
    alone, _ = on_all(dict(cp=2, context="gather"), replace(case, kernels=FORMED))[0]
    found, _ = on_all(LAYOUTS[name], case)[0]
    assert error(found, right) <= 2 * error(alone, right) <= (3e-6 if dtype == torch.float32 else 3e-2)


@pytest.mark.parametrize("name", LAYOUTS)
def test_another_document_changes_no_bit(name: str) -> None:
    """C-127: tokens of one document differ, all other documents' outputs and gradients are the same to the bit."""
    case = Case(((5, 11, 7), (13, 10)), kv_heads=6)
    tensors = case.tensors()
    others = tuple(x.clone() for x in tensors)
    for x in others:
        x[0, :, 5:16] = x[0, :, 5:16].flip(1).neg()
    (first, _), (second, _) = (on_all(LAYOUTS[name], case, tensors=given)[0] for given in (tensors, others))
    same = torch.ones(2, 23, dtype=torch.bool)
    same[0, 5:16] = False
    for x, y in zip(first, second, strict=True):
        assert torch.equal(x.transpose(1, 2)[same], y.transpose(1, 2)[same])
        assert not torch.equal(x.transpose(1, 2)[~same], y.transpose(1, 2)[~same])


def test_a_window_of_one_is_the_values_themselves() -> None:
    case = Case(PACKED, window=1)
    _, _, v, dout = case.tensors()
    ((out, dq, dk, dv), _), *_ = on_all(LAYOUTS["ring 2 x ulysses 2"], case)
    assert torch.equal(out, v) and torch.equal(dv, dout)
    assert dq.abs().max() <= 1e-14 and dk.abs().max() <= 1e-14


def strided_and_neighbours(rank: int) -> tuple[tuple[int, ...], tuple[int, ...], bool]:
    mesh = Mesh(Layout.of(LayoutSection(cp=4, cp_ulysses=2)), rank, [("cp",)], torch.device("cpu"))
    whole, again, ring = mesh.group("cp"), mesh.strided("cp", 1), mesh.strided("cp", 2)
    assert whole.ranks == again.ranks and ring.ranks[ring.index] == rank
    return ring.ranks, mesh.neighbours("cp", 2).ranks, whole.pg is not again.pg


def test_neighbours_deal_heads_and_every_second_rank_is_in_a_ring() -> None:
    """The ring's hops have communication of their own, even where its ranks are those of another group."""
    assert forked(4, strided_and_neighbours) == [
        ((0, 2), (0, 1), True), ((1, 3), (0, 1), True), ((0, 2), (2, 3), True), ((1, 3), (2, 3), True),
    ]  # fmt: skip


def test_every_block_of_a_model_gets_the_core() -> None:
    job = tiny_job({"layers": 3, "window": 5})
    model = build(job)
    mesh = Mesh(Layout.of(LayoutSection()), 0, [("cp",)], torch.device("cpu"))
    ring, neighbours = mesh.strided("cp", 1), mesh.neighbours("cp", 1)
    cut_attention(model, ring, neighbours, False, job.model, FORMED)
    assert isinstance(model.module, Decoder)
    cores = {module.core for module in model.module.modules() if isinstance(module, Attention)}
    assert cores == {Core(ring, neighbours, False, 5, FORMED)}


def test_a_batch_that_was_not_cut_is_refused() -> None:
    case = Case(heads=2, kv_heads=2)
    mesh = Mesh(Layout.of(LayoutSection()), 0, [("cp",)], torch.device("cpu"))
    core = Core(mesh.strided("cp", 1), mesh.neighbours("cp", 1), False, None, CpuFlash())
    q, k, v, _ = case.tensors()
    with pytest.raises(AssertionError, match="not cut for this ring"):
        core(q, k, v, case.batch(), None)


def test_planted_drop_by_local_heads_is_seen() -> None:
    """Were a rank's heads counted from 0, ranks would drop alike: another result than one device's."""
    case = CASES["dropout"]
    wrong = replace(case, dropout=replace(DROPPED, first_head=0))
    assert error(on_all(LAYOUTS["ulysses 2"], case)[0][0], one_device(wrong)) > 1e-2
