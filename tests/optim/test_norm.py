"""Gradient norm over every axis, and clipping."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.optim.fixtures import cut, masters, section, set_grads, values
from tests.tiny import tiny_job
from torch import Tensor

from heptad.config.schema import Job
from heptad.launch.forked import forked
from heptad.mesh.collectives import Group
from heptad.mesh.device import Mesh
from heptad.mesh.layout import Layout
from heptad.mesh.ledger import Ledger
from heptad.models.spec import param_specs
from heptad.optim.build import build_optimizer
from heptad.optim.norm import CHUNK, clip_, clip_factor, grad_norm, total_norm
from heptad.trace import Transfer
from heptad.train.step import Trainer


def world_group(rank: int, size: int) -> Group:
    import torch.distributed as dist

    return Group("dp_shard", tuple(range(size)), rank, dist.group.WORLD if size > 1 else None, Ledger())


def expected(p: float) -> float:
    flat = torch.cat([grad.reshape(-1) for grad in values(5).values()])
    return float(torch.linalg.vector_norm(flat, p))


def sharded(rank: int, size: int) -> tuple[float, float, list[Transfer]]:
    group = world_group(rank, size)
    shards = cut(values(0), group)
    set_grads(shards, values(5))
    norms = total_norm(shards), total_norm(shards, math.inf)
    return norms[0].item(), norms[1].item(), group.ledger.transfers()


@pytest.mark.parametrize("size", [2, 4])
def test_one_all_reduce_of_one_number(size: int) -> None:
    for norm, largest, transfers in forked(size, sharded, size):
        assert norm == pytest.approx(expected(2.0), rel=1e-12) and largest == expected(math.inf)
        (counted,) = transfers
        assert (counted.op, counted.phase, counted.count) == ("all_reduce", "norm", 2)
        assert counted.num_bytes == 2 * (2 * (size - 1) * 8 // size)


def test_whole_shards_send_nothing_and_count_once() -> None:
    shards = cut(values(0))
    set_grads(shards, values(5))
    assert total_norm(shards).item() == pytest.approx(expected(2.0), rel=1e-12)
    assert total_norm(shards, math.inf).item() == expected(math.inf)


def test_fp32_norm_of_a_long_gradient() -> None:
    """Where a plain fp32 sum of squares is 2e-4 off."""
    from heptad.optim.norm import _norm

    long = torch.rand(40 * CHUNK + 17) + 1
    assert _norm([(long, ())], 2.0).item() == pytest.approx(long.double().norm().item(), rel=3e-7)


def c_013(rank: int, size: int) -> float:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    group = world_group(rank, size)
    matrix = torch.full((12, 3), 0.5)  # squared norm 9 over all ranks
    rows = matrix.chunk(size)[rank]
    weight = torch.tensor([4.0])
    tensors = [DTensor.from_local(rows, mesh, [Shard(0)]), DTensor.from_local(weight, mesh, [Replicate()])]
    return grad_norm(tensors, lambda _mesh, _dim: group).item()


@pytest.mark.parametrize("size", [1, 2, 4])
def test_c_013_a_replicated_parameter_counts_once(size: int) -> None:
    for norm in forked(size, c_013, size):
        assert norm == pytest.approx(5.0, rel=1e-6)


def c_014(rank: int, p: float) -> tuple[float, list[list[float]]]:
    """Dense over 4 ranks; experts over (replicas 2) × (ep 2), one sharded by ep, one by both; one plain tensor."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    layout = Layout.of(section_layout())
    mesh = Mesh(layout, rank, [("dp_replicate", "dp_shard"), ("dp_replicate",), ("dp_shard",)], torch.device("cpu"))
    dense_mesh = mesh.device_mesh(("dp_replicate", "dp_shard"))
    expert_mesh = mesh.device_mesh(("dp_replicate",), ("dp_shard",))
    dense, expert, both, plain = whole_c_014()
    replica, ep = divmod(rank, 2)
    tensors: list[Tensor] = [
        DTensor.from_local(dense.chunk(4)[rank].clone(), dense_mesh, [Shard(0)]),
        DTensor.from_local(expert.chunk(2)[ep].clone(), expert_mesh, [Replicate(), Shard(0)]),
        DTensor.from_local(both.chunk(2)[ep].chunk(2, dim=1)[replica].clone(), expert_mesh, [Shard(1), Shard(0)]),
        plain.clone(),
    ]

    def group_of(device_mesh: object, dim: int) -> Group:
        name = device_mesh.mesh_dim_names[dim]  # type: ignore[attr-defined]
        return mesh.group(*name.split("*"))

    norm = grad_norm(tensors, group_of, p)
    factor = clip_factor(norm, 1.0)
    whole = [t.full_tensor() if isinstance(t, DTensor) else t for t in tensors]
    clipped = [(t * factor).tolist() for t in whole]
    return norm.item(), clipped


def section_layout() -> object:
    from heptad.config.schema import LayoutSection

    return LayoutSection(dp_replicate=2, dp_shard=2)


def whole_c_014() -> list[Tensor]:
    made = torch.Generator().manual_seed(3)
    shapes = [(12, 5), (6, 3), (4, 6), (7,)]
    return [torch.randn(shape, generator=made, dtype=torch.float64) for shape in shapes]


@pytest.mark.parametrize("p", [2.0, math.inf])
def test_c_014_tensors_on_several_meshes(p: float) -> None:
    whole = whole_c_014()
    want = float(torch.linalg.vector_norm(torch.cat([t.reshape(-1) for t in whole]), p))
    for norm, clipped in forked(4, c_014, p):
        assert norm == pytest.approx(want, rel=1e-12)
        for got, full in zip(clipped, whole, strict=True):
            torch.testing.assert_close(torch.tensor(got, dtype=torch.float64), full / want, rtol=1e-12, atol=1e-14)


CARVED: dict[str, tuple[dict[str, Any], set[str]]] = {
    "both cut over all ranks, in another order": (
        dict(zero=3, tp=2, dp_shard=2, ep=2, order="tp-cp-dp_replicate-dp_shard-pp"), {"dp_shard*tp"}),
    "the same two ranks": (dict(zero=0, dp_shard=2, tp=2, ep=2), {"ep"}),
    "other two ranks": (dict(zero=0, dp_shard=2, tp=2, ep=2, order="tp-cp-dp_replicate-dp_shard-pp"), {"ep", "tp"}),
    "experts alone": (dict(zero=0, dp_shard=4, ep=2, etp=2), {"ep*etp"}),
    "hsdp": (dict(zero=2, dp_replicate=2, dp_shard=2, ep=2), {"dp_shard"}),
}  # fmt: skip
"""Layout of four ranks, axes over which the norm is summed."""


def c_014_carved(rank: int, job: Job) -> tuple[list[float], list[float], list[Transfer]]:
    """Norms of keyed gradients, and after clipping; every shard has the values of its range of the whole tensors."""
    trainer = Trainer(job, rank, torch.device("cpu"))
    shards, whole = trainer.engine.shards, whole_carved(job)
    for shard in shards:
        shard.gradient().copy_(whole[shard.spec.name].view(-1)[shard.start : shard.stop])
    trainer.mesh.ledger.reset()
    norm = total_norm(shards)
    counted = trainer.mesh.ledger.transfers()
    norms = [norm.item(), total_norm(shards, math.inf).item()]
    clip_(shards, 0.5, norm)
    for shard in shards:
        clipped = whole[shard.spec.name].view(-1)[shard.start : shard.stop] * (0.5 / norm)
        torch.testing.assert_close(shard.gradient(), clipped, rtol=1e-12, atol=0)
    return norms, [total_norm(shards).item()], counted


def whole_carved(job: Job) -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(7)
    return {spec.name: torch.randn(spec.shape, generator=made, dtype=torch.float64) for spec in param_specs(job.model)}


@pytest.mark.parametrize("name", CARVED)
def test_c_014_dense_parameters_and_experts_on_ranks_of_their_own(name: str) -> None:
    """Each element counts once, and families that the same ranks hold share a sum, whatever the order of its ranks."""
    layout, axes = CARVED[name]
    job = tiny_job(dict(layers=1, experts=5, expert_width=7), **layout)
    flat = torch.cat([tensor.reshape(-1) for tensor in whole_carved(job).values()])
    want = [float(torch.linalg.vector_norm(flat, p)) for p in (2.0, math.inf)]
    for norms, clipped, counted in forked(4, c_014_carved, job):
        assert norms == pytest.approx(want, rel=1e-12) and clipped == pytest.approx([0.5], rel=1e-12)
        assert {item.axis for item in counted} == axes and all(item.count == 1 for item in counted)


def test_c_121_pre_clip_norm_and_factor() -> None:
    shards = cut(values(0))
    for shard in shards:
        shard.gradient().zero_()
    shards[1].gradient()[0], shards[3].gradient()[2] = 3.0, 4.0
    norm = total_norm(shards)
    factor = clip_(shards, 1.0, norm)
    assert norm.item() == 5.0 and factor.item() == 0.2
    assert shards[1].gradient()[0].item() == 3.0 * 0.2 and shards[3].gradient()[2].item() == 4.0 * 0.2
    before = masters(shards)
    build_optimizer(section(name="sgd", lr=1.0, weight_decay=0.0, schedule="constant"), shards, 1).step(1)
    assert shards[3].master[2].item() == pytest.approx(before["norm.weight"][2].item() - 0.8, rel=1e-15)


def test_clipping_leaves_a_short_gradient_and_a_zero_one_alone() -> None:
    shards = cut(values(0, torch.float32))
    assert clip_(shards, 1.0, total_norm(shards)).item() == 1.0
    set_grads(shards, {name: grad * 1e-3 for name, grad in values(5).items()})
    before = [shard.gradient().clone() for shard in shards]
    assert clip_(shards, 1.0, total_norm(shards)).item() == 1.0
    assert all(torch.equal(shard.gradient(), old) for shard, old in zip(shards, before, strict=True))


def test_a_nan_shows_in_the_norm() -> None:
    shards = cut(values(0, torch.float32))
    shards[2].gradient()[1] = math.nan
    assert math.isnan(total_norm(shards).item()) and math.isnan(total_norm(shards, math.inf).item())
