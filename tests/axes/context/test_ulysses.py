"""Ulysses: which kv heads go where, what is sent, and that heads come back to the tokens they came from."""

from __future__ import annotations

import pytest
import torch
from tests.axes.context.attention import Case, on_all
from torch import Tensor

from heptad.axes.context.ulysses import dealt_kv_heads, to_heads, to_tokens
from heptad.config.schema import LayoutSection
from heptad.launch.forked import forked
from heptad.mesh.device import Mesh
from heptad.mesh.layout import Layout
from heptad.trace import Transfer


def test_kv_heads_go_to_the_ranks_whose_query_heads_read_them() -> None:
    assert dealt_kv_heads(8, 8, 2) == tuple(range(8))  # nothing twice
    assert dealt_kv_heads(8, 4, 2) == (0, 1, 2, 3)
    assert dealt_kv_heads(8, 2, 4) == (0, 0, 1, 1)  # fewer than ranks: neighbours hold the same one
    assert dealt_kv_heads(8, 1, 4) == (0, 0, 0, 0)
    assert dealt_kv_heads(6, 3, 2) == (0, 0, 1, 1, 2, 2)  # rank 0 reads 0, 0, 1: one for each query head
    assert dealt_kv_heads(12, 3, 2) == (0, 0, 1, 1, 2, 2)  # rank 0 reads 0, 0, 0, 0, 1, 1: one for two query heads


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("kv_heads", [1, 2, 3, 4, 6, 12])
def test_a_ranks_query_heads_find_their_kv_head(ranks: int, kv_heads: int) -> None:
    dealt, heads = dealt_kv_heads(12, kv_heads, ranks), 12 // ranks
    here = len(dealt) // ranks
    for rank in range(ranks):
        for head in range(heads):
            assert dealt[rank * here + head // (heads // here)] == (rank * heads + head) // (12 // kv_heads)


@pytest.mark.parametrize(("kv_heads", "dealt"), [(12, 12), (4, 4), (1, 4), (3, 12)])
@pytest.mark.parametrize(("dtype", "size"), [(torch.float64, 8), (torch.bfloat16, 2)])
def test_sends_what_the_formula_says(kv_heads: int, dealt: int, dtype: torch.dtype, size: int) -> None:
    """(C-1)/C · B·(L/C)·(2H + 2H_kv)·d forward, H_kv what is dealt; backward the same."""
    case = Case(kv_heads=kv_heads, dtype=dtype)
    ((_, sent),) = on_all(dict(cp=4, context="ulysses"), case)
    num_bytes = size * 3 * len(case.rows) * -(-case.length // 4) * (2 * 12 + 2 * dealt) * case.head_dim // 4
    assert sent == [Transfer("all_to_all", "cp", phase, num_bytes, 2) for phase in ("backward", "forward")]


@pytest.mark.parametrize("kv_heads", [12, 1])
def test_two_levels_send_each_its_formula(kv_heads: int) -> None:
    """Heads are dealt over 2 neighbours, what keys are then there go round a ring of 2."""
    case = Case(kv_heads=kv_heads)
    ((_, sent),) = on_all(dict(cp=4, context="ring+ulysses", cp_ulysses=2), case)
    tokens = 2 * -(-case.length // 4)  # of a ring rank
    dealt = max(kv_heads, 2)
    swapped = 8 * len(case.rows) * (tokens // 2) * (2 * 12 + 2 * dealt) * case.head_dim // 2
    hop = 8 * 2 * len(case.rows) * tokens * (dealt // 2) * case.head_dim
    assert sent == [
        Transfer("all_to_all", "cp", "backward", swapped, 2),
        Transfer("all_to_all", "cp", "forward", swapped, 2),
        Transfer("send", "cp", "backward", 2 * hop, 2),
        Transfer("send", "cp", "forward", hop, 1),
    ]


def there_and_back(rank: int) -> list[Tensor]:
    """Each value names its row, head, token and feature."""
    mesh = Mesh(Layout.of(LayoutSection(cp=3)), rank, [("cp",)], torch.device("cpu"))
    group = mesh.neighbours("cp", 3)
    whole = torch.arange(2 * 6 * 15 * 7, dtype=torch.float64).view(2, 6, 15, 7)
    mine = whole[:, :, 5 * rank : 5 * rank + 5].clone().requires_grad_()
    keys = (-whole[:, :3, 5 * rank : 5 * rank + 5]).clone().requires_grad_()
    q, kv = to_heads(mine, keys, 2 * keys, group)
    assert torch.equal(q, whole[:, 2 * rank : 2 * rank + 2])
    assert torch.equal(kv, torch.stack((-whole[:, rank : rank + 1], -2 * whole[:, rank : rank + 1])))
    assert q.is_contiguous() and kv.is_contiguous()
    back = to_tokens(q, group)
    assert torch.equal(back, mine) and back.transpose(1, 2).is_contiguous()  # as the projection reads it
    return list(torch.autograd.grad((back * mine.detach()).sum() + kv.sum(), (mine, keys)))


def test_heads_and_tokens_come_back_in_order_and_so_do_gradients() -> None:
    whole = torch.arange(2 * 6 * 15 * 7, dtype=torch.float64).view(2, 6, 15, 7)
    for rank, (dq, dk) in enumerate(forked(3, there_and_back)):
        assert torch.equal(dq, whole[:, :, 5 * rank : 5 * rank + 5])
        assert torch.equal(dk, torch.full_like(dk, 3.0))
