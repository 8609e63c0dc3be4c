"""A tiny job with odd prime sizes, its batches and its one-device reference: shared by the tests that need ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from heptad.config.schema import Job
from heptad.models.batch import IGNORED, Batch
from heptad.models.build import Model, build
from heptad.models.resolve import resolve

SIZES = dict(layers=3, width=10, heads=4, kv_heads=2, head_dim=6, mlp_width=23, vocab=37, init_std=0.3)
GPT = dict(norm="layer", mlp="plain", activation="gelu", positions="learned", qkv_bias=True, mlp_bias=True)
LEARNING_RATE = 0.125


def tiny_job(model: dict[str, Any] | None = None, global_batch: int = 8, recompute: str = "none", **layout: Any) -> Job:
    """SGD without momentum, decay or clipping in float64, one sequence a micro-batch, one unit a bucket."""
    return resolve(
        Job.model_validate({
            "model": {**SIZES, **(model or {})},
            "layout": {"bucket_mb": 0.0, **layout},
            "precision": {"params": "fp64"},
            "recompute": {"mode": recompute},
            "optimizer": {
                "name": "sgd", "lr": LEARNING_RATE, "clip_norm": None, "weight_decay": 0.0, "schedule": "constant",
            },
            "data": {"seq_len": 11},
            "train": {"global_batch": global_batch, "micro_batch": 1, "steps": 5},
        })
    )  # fmt: skip


def tiny_batches(job: Job, data_rank: int, data_ranks: int, step: int) -> list[Batch]:
    """Keyed by step: ragged targets, sequence 0 without any, two documents in sequence 1."""
    generator = torch.Generator().manual_seed(step)
    shape = (job.train.global_batch, job.data.seq_len)
    ids, labels = (torch.randint(job.model.vocab, shape, generator=generator) for _ in range(2))
    labels[torch.rand(shape, generator=generator) < 0.3] = IGNORED
    labels[0] = IGNORED
    documents = torch.zeros(shape, dtype=torch.int64)
    documents[1, 5:] = 1
    positions = torch.arange(shape[1]).expand(shape) - 5 * documents
    index = step * ids.numel() + torch.arange(ids.numel()).view(shape)
    per_rank = shape[0] // data_ranks
    rows = [slice(i, i + 1) for i in range(data_rank * per_rank, (data_rank + 1) * per_rank)]
    return [Batch(ids[r], labels[r], positions[r], documents[r], index[r], step) for r in rows]


@dataclass
class ReferenceStep:
    """One device, plain autograd, one normalisation, SGD."""

    loss: float
    grads: dict[str, Tensor]
    params: dict[str, Tensor]


def reference(job: Job, steps: int, model: Model | None = None) -> list[ReferenceStep]:
    """`steps` steps of `job` on one device, without engine, executor and taps."""
    model = build(job) if model is None else model
    model.materialise(job.train.seed, torch.device("cpu"), torch.float64)
    done = []
    for step in range(1, steps + 1):
        batches = tiny_batches(job, 0, 1, step)
        for param in model.params.values():
            param.grad = None
        loss = torch.stack([model.loss(batch) for batch in batches]).sum() / sum(b.num_targets() for b in batches)
        loss.backward()
        trained = {name: param for name, param in model.params.items() if param.requires_grad}
        grads = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in trained.items()}
        with torch.no_grad():
            for name, grad in grads.items():
                trained[name] -= LEARNING_RATE * grad
        done.append(ReferenceStep(loss.item(), grads, {n: p.detach().clone() for n, p in model.params.items()}))
    return done


def floor_of(name: str, grads: dict[str, Tensor]) -> float:
    """Smallest scale of an error in `name`: 1e-6 of the largest gradient, or for a key's bias that of the key's weight.

    A softmax does not see what all its keys share, so a key's bias has gradient 0: the sum of what its weight's is made
    of, which cancels.
    """
    weight = grads.get(name.replace(".k.bias", ".k.weight")) if name.endswith(".k.bias") else None
    if weight is not None:
        return weight.abs().max().item()
    return 1e-6 * max(grad.abs().max().item() for grad in grads.values())


def worst_error(found: Tensor, start: int, stop: int, whole: Tensor, floor: float) -> float:
    """Largest difference of a flat range, relative to the tensor's largest value (or `floor`, if that is more)."""
    if stop == start:
        return 0.0
    scale = max(whole.abs().max().item(), floor)
    return (found - whole.flatten()[start:stop]).abs().max().item() / scale
