"""Jobs of a few thousand parameters for every layout of the data axis, and running one against one device."""

from __future__ import annotations

from typing import Any

from heptad.config.schema import Job
from heptad.loader.synthetic import synthetic
from heptad.models.resolve import resolve
from heptad.verify.compare import Comparison
from heptad.verify.faults import parse
from heptad.verify.run import attempt

FACTORS: dict[str, tuple[Any, ...]] = {
    "zero": (0, 1, 2, 3),
    "ranks": (1, 2, 4, 8),
    "hsdp": (False, True),
    "accumulation": (1, 3),
    "tied": (False, True),
    "params": ("fp64", "fp32", "bf16"),
}
SIZES = dict(layers=2, width=13, heads=4, kv_heads=2, head_dim=4, mlp_width=11, vocab=29, max_positions=7, init_std=0.3)
GPT = dict(norm="layer", mlp="plain", activation="gelu", positions="learned", qkv_bias=True, mlp_bias=True, tied=True)


def valid(item: dict[str, Any]) -> bool:
    """Two replicas need two ranks."""
    return not item["hsdp"] or item["ranks"] >= 2


def layout_job(
    zero: int = 3,
    ranks: int = 2,
    hsdp: bool = False,
    accumulation: int = 2,
    tied: bool = False,
    params: str = "fp64",
    seed: int = 0,
    model: dict[str, Any] | None = None,
    optimizer: dict[str, Any] | None = None,
    **sections: dict[str, Any],
) -> Job:
    """`ranks` data ranks, two replicas with `hsdp`; one unit a bucket; AdamW with clipping that bites."""
    replicas = 2 if hsdp else 1
    layout = {"zero": zero, "dp_replicate": replicas, "dp_shard": ranks // replicas, "bucket_mb": 0.0}
    described = {
        "model": {**SIZES, "tied": tied, **(model or {})},
        "layout": layout | sections.pop("layout", {}),
        "precision": {"params": params} | sections.pop("precision", {}),
        "optimizer": {"lr": 0.02, "clip_norm": 0.5, "schedule": "linear"} | (optimizer or {}),
        "data": {"seq_len": 7, "seed": seed},
        "train": {"global_batch": ranks * accumulation, "micro_batch": 1, "steps": 3, "seed": seed}
        | sections.pop("train", {}),
        **sections,
    }
    return resolve(Job.model_validate(described))


def compared(job: Job, steps: int = 2, inject: tuple[str, ...] = ()) -> Comparison:
    """`job` as it is on forked ranks against one device."""
    found, _, failure = attempt(job, synthetic(job), steps, parse(inject, job, steps))
    assert found is not None, failure
    return found
