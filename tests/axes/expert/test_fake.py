"""The dispatch on fake tensors: counts that the host needs are taken to be even, and everything else follows."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from tests.axes.expert.ranks import DEEPSEEK, SOFTMAX, Case, cut, mixture, stacks
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from heptad.axes.expert.apply import dispatch_over
from heptad.launch.forked import forked
from heptad.mesh.collectives import Group
from heptad.mesh.ledger import Ledger
from heptad.models.batch import Batch
from heptad.trace import total


def on_fake_ranks(_: int, case: Case, rank: int) -> dict[tuple[str, str, str], tuple[int, int]]:
    """Forward and backward of rank `rank` of a mixture, alone."""
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=case.world)
    ledger = Ledger()

    def group(axis: str, ranks: tuple[int, ...]) -> Group:
        pg = dist.new_group(list(ranks)) if len(ranks) > 1 else None
        return Group(axis, ranks, ranks.index(rank), pg, ledger, point_to_point=False)

    ep, etp = divmod(rank, case.etp)
    ranks = [at * case.etp + etp for at in range(case.ep)]
    inner = case.ep if case.inner == 1 else case.inner
    node = ranks[ep // inner * inner :][:inner]
    across = None if case.inner == 1 else group("ep", tuple(ranks[ep % inner :: inner]))
    parts = group("etp", tuple(range(ep * case.etp, (ep + 1) * case.etp)))
    moe, batch, x = mixture(case), case.batch(rank), case.stream(rank)
    weights = {name: cut(stack.weight.detach(), case, rank) for name, stack in stacks(moe)}
    moe.dispatch = dispatch_over(group("ep", tuple(node)), parts, across)
    fake = FakeTensorMode()
    for module in moe.modules():
        for name, param in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(fake.from_tensor(param.detach())))
    for name, stack in stacks(moe):
        stack.weight = nn.Parameter(fake.from_tensor(weights[name]))
    if moe.router.bias is not None:
        moe.router.bias = fake.from_tensor(moe.router.bias)
    fields = ("ids", "labels", "positions", "documents", "index")
    tokens = Batch(*(fake.from_tensor(getattr(batch, name)) for name in fields), step=0, mixed=False)
    x = fake.from_tensor(x).requires_grad_()
    with fake:
        y = moe(x, tokens)
        y.sum().backward()
    assert isinstance(y, FakeTensor) and y.shape == x.shape
    for name, stack in stacks(moe):
        assert stack.weight.grad is not None and stack.weight.grad.shape == weights[name].shape
    return total(ledger.transfers())


@pytest.mark.parametrize(
    "case",
    [
        Case(SOFTMAX, 1),
        Case(DEEPSEEK, 4),
        Case(SOFTMAX, 2, 2),
        Case(DEEPSEEK, 4, inner=2, changes=(("experts", 12),)),
    ],
    ids=["one rank", "ep 4", "ep 2, etp 2", "two levels"],
)
def test_forward_and_backward_run_on_fake_tensors(case: Case) -> None:
    (sent,) = forked(1, on_fake_ranks, case, case.world - 1)
    axes = {"ep": case.ep, "etp": case.etp}
    assert {axis for axis, _, _ in sent} == {axis for axis, degree in axes.items() if degree > 1}
