"""On a CUDA device: the fused kernel's blocks, alone and merged, are those of formed scores in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.axes.context.attention import Case, core_of, error, one_device
from tests.axes.context.test_kernels import both_ways, drawn, plain

from heptad.axes.context.kernels import CudaFlash, FormedScores, Seen, edge_bias
from heptad.axes.context.split import place
from heptad.config.schema import LayoutSection
from heptad.mesh.device import Mesh
from heptad.mesh.layout import Layout

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 6), (6, 2), (6, 1)])
@pytest.mark.parametrize("kind", ["full", "causal", "window"])
def test_a_block_equals_a_plain_softmax(heads: int, kv_heads: int, kind: str) -> None:
    q, k, v, dout = drawn(heads, kv_heads, 7, 7 if kind == "causal" else 11, torch.bfloat16)
    mask = {
        "full": None,
        "causal": torch.ones(7, 7, dtype=torch.bool).tril(),
        "window": torch.arange(7).unsqueeze(1) - torch.arange(11) < -2,
    }[kind]
    right = plain(q, k, v, dout, mask)
    q, k, v, dout = (x.to(CUDA) for x in (q, k, v, dout))
    seen = Seen(kind == "causal", edge_bias(7, 11, -2, q) if kind == "window" else None)
    found = both_ways(CudaFlash(), q, k, v, dout, seen)
    assert error(tuple(x.cpu() for x in found), right) <= 1e-2


ROWS = ((1031,), (307, 724))


@pytest.mark.parametrize("case", [Case(ROWS, 6, 6), Case(ROWS, 6, 3, window=283)])
def test_merged_blocks_lose_no_more_than_on_the_cpu(case: Case) -> None:
    """A ring of one rank: documents and windows make blocks of every kind."""
    found = {}
    for device, kernels in ((CUDA, CudaFlash()), (torch.device("cpu"), FormedScores())):
        narrow = replace(case, dtype=torch.bfloat16, kernels=kernels)
        mesh = Mesh(Layout.of(LayoutSection()), 0, [("cp",)], device)
        whole = narrow.batch()
        batch = replace(whole, context=place(whole.documents.numpy(), 1, 1, "contiguous")).to(device)
        q, k, v, dout = (x.to(device) for x in narrow.tensors())
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = core_of(mesh, LayoutSection(), narrow)(q, k, v, batch, None)
        grads = torch.autograd.grad(out, leaves, dout)
        found[device] = error(tuple(x.detach().cpu() for x in (out, *grads)), one_device(narrow))
    assert found[CUDA] <= 2 * found[torch.device("cpu")]
