"""The four region pairs: values and gradients against whole tensors, what they send, what a rank's rows are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from heptad.config.schema import LayoutSection
from heptad.launch.forked import forked
from heptad.mesh.device import Mesh
from heptad.mesh.layout import Layout
from heptad.mesh.regions import SINGLE, Stream
from heptad.trace import total
from heptad.units import sent_bytes

B, L, D = 3, 5, 7  # 15 tokens: no even number of ranks divides them


def whole(seed: int) -> Tensor:
    return torch.randn(B, L, D, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def pairs(rank: int, num_ranks: int, sequence: bool) -> dict[str, Any]:
    mesh = Mesh(Layout.of(LayoutSection(tp=num_ranks)), rank, [("tp",)], torch.device("cpu"))
    stream = Stream(mesh.group("tp"), sequence)
    x = stream.local(whole(0)).clone().requires_grad_()
    inside = stream.enter(x, B * L)
    assert torch.equal(inside.detach().reshape(B, L, D), whole(0))
    (dx,) = torch.autograd.grad(inside, x, whole(rank + 1).reshape(inside.shape))  # each rank has its own part of it
    partial = whole(rank + 1).requires_grad_()
    y = stream.leave(partial)
    mesh.ledger.phase = "backward"
    (dpartial,) = torch.autograd.grad(y, partial, stream.local(whole(9)).reshape(y.shape))
    return {"dx": dx, "y": y.detach(), "dpartial": dpartial, "own": stream.own(B * L), "sent": mesh.ledger.transfers()}


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_every_pair_equals_the_whole_tensor(num_ranks: int, sequence: bool) -> None:
    if num_ranks == 1 and sequence:
        assert SINGLE.local(whole(0)).equal(whole(0)) and SINGLE.own(15) == (0, 15)
        return
    expected = sum((whole(rank + 1) for rank in range(num_ranks)), torch.zeros(B, L, D, dtype=torch.float64))
    size = -(-B * L // num_ranks) * num_ranks * D * 8 if sequence else B * L * D * 8
    ops = {"all_gather": 1, "reduce_scatter": 1} if sequence else {"all_reduce": 1}
    forward = {("tp", op, "forward"): (2, 2 * sent_bytes(op, size, num_ranks)) for op in ops if op == "all_reduce"}
    forward |= {
        ("tp", "all_gather", "forward"): (1, sent_bytes("all_gather", size, num_ranks)),
        ("tp", "reduce_scatter", "forward"): (2, 2 * sent_bytes("reduce_scatter", size, num_ranks)),
        ("tp", "all_gather", "backward"): (1, sent_bytes("all_gather", size, num_ranks)),
    } if sequence else {}  # fmt: skip
    for found in forked(num_ranks, pairs, num_ranks, sequence):
        start, stop = found["own"]
        for name in ("dx", "y"):
            rows = found[name].reshape(-1, D)
            assert torch.allclose(rows[: stop - start], expected.reshape(-1, D)[start:stop], rtol=1e-14, atol=1e-14)
            assert not rows[stop - start :].any()  # padding
        assert torch.equal(found["dpartial"], whole(9))
        assert total(found["sent"]) == (forward if num_ranks > 1 else {})


def test_rows_of_every_rank_cover_the_tokens_once() -> None:
    for tokens in range(1, 40):
        for num_ranks in (1, 2, 3, 4, 8):
            group: Any = type("Ranks", (), {"size": num_ranks})
            owned = []
            for index in range(num_ranks):
                group.index = index
                owned += range(*Stream(group, True).own(tokens))
            assert owned == list(range(tokens))
