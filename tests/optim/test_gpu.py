"""The fused CUDA path gives what the CPU gives."""

from __future__ import annotations

import pytest
import torch
from tests.optim.fixtures import cut, section, set_grads, values

from heptad.optim.build import build_optimizer
from heptad.optim.norm import clip_, total_norm


def train(device: str, dtype: torch.dtype, **options: object) -> tuple[list[torch.Tensor], float, float]:
    shards = cut({name: value.to(device) for name, value in values(0, dtype).items()})
    optimizer = build_optimizer(section(lr=0.1, **options), shards, 3)
    for step in range(1, 4):
        set_grads(shards, values(step, dtype))
        norm = total_norm(shards)
        factor = clip_(shards, 1.0, norm)
        optimizer.step(step)
    assert all(shard.master.device.type == device for shard in shards)
    return [shard.master.cpu() for shard in shards], norm.item(), factor.item()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["adamw", "sgd", "muon"])
def test_cuda_equals_cpu(name: str, dtype: torch.dtype) -> None:
    options: dict[str, object] = {"name": name} | ({"momentum": 0.9} if name == "sgd" else {})
    (cpu, norm, factor), (cuda, cuda_norm, cuda_factor) = (
        train(device, dtype, **options) for device in ("cpu", "cuda")
    )
    tolerance = 1e-10 if dtype == torch.float64 else 2e-5
    assert (cuda_norm, cuda_factor) == pytest.approx((norm, factor), rel=tolerance)
    for found, want in zip(cuda, cpu, strict=True):
        torch.testing.assert_close(found, want, rtol=tolerance, atol=tolerance)
