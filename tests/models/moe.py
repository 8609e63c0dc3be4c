"""Small models with experts, latent attention and multi-token prediction, in sizes that share no factor."""

from __future__ import annotations

import torch
from tests.models.helpers import packed
from torch import Tensor

from heptad.config.schema import ModelSection
from heptad.models.batch import Batch
from heptad.models.router import Router
from heptad.models.spec import complete

SOFTMAX = ModelSection(
    layers=3, width=28, heads=6, kv_heads=3, head_dim=10, mlp_width=37, vocab=53, init_std=0.3,
    experts=5, experts_per_token=2, expert_width=11, dense_layers=1,
)  # fmt: skip
DEEPSEEK = ModelSection(
    layers=2, width=28, heads=6, mlp_width=37, vocab=53, init_std=0.3, attention_kind="mla", q_lora_rank=13,
    kv_lora_rank=9, qk_nope_head_dim=5, qk_rope_head_dim=4, v_head_dim=7, experts=6, experts_per_token=2,
    expert_width=11, shared_experts=2, dense_layers=1, router="deepseek", router_groups=3, router_group_limit=2,
    routed_scale=1.7, bias_update_speed=0.1,
)  # fmt: skip
LOSSES = dict(aux_loss=0.7, z_loss=0.3)


def router_of(section: ModelSection, seed: int = 1) -> Router:
    """One router in float64, with random weights."""
    router = Router(complete(section), seed, "blocks.1.mlp").double()
    router.place(torch.device("cpu"), torch.float64)
    with torch.no_grad():
        router.gate.weight.copy_(torch.randn(router.gate.weight.shape, generator=torch.Generator().manual_seed(seed)))
    return router


def tokens_of(batch: Batch, width: int = 28, seed: int = 2) -> Tensor:
    """[N, D] in float64, by the token's number in the batch."""
    generator = torch.Generator().manual_seed(seed)
    every = torch.randn(1000, width, generator=generator, dtype=torch.float64)
    return every[batch.index.flatten()]


def filled(lengths: list[list[int]], padding: int) -> Batch:
    """`packed`, of whose rows the last `padding` places only fill up."""
    batch = packed(lengths)
    real = torch.ones_like(batch.ids, dtype=torch.bool)
    real[:, batch.ids.shape[1] - padding :] = False
    return batch.aimed(batch.labels, real)


def rows_of(batch: Batch) -> list[Batch]:
    """Each row as a batch of its own."""
    names = ("ids", "labels", "positions", "documents", "index")
    found = []
    for at in range(batch.ids.shape[0]):
        parts = [getattr(batch, name)[at : at + 1] for name in names]
        found.append(Batch(*parts, step=batch.step, real=None if batch.real is None else batch.real[at : at + 1]))
    return found
