"""Resident bytes of parameters, gradients, masters and optimizer state under T equal the costs of the local shapes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.tiny import GPT, tiny_batches, tiny_job

from heptad.axes.data import cost
from heptad.axes.data.buckets import plan_buckets, ranges_of
from heptad.config.schema import Job
from heptad.launch.forked import forked
from heptad.mesh.layout import Layout
from heptad.models.cut import cuts
from heptad.models.spec import param_specs, unit_specs
from heptad.optim.cost import state_bytes
from heptad.precision.dtypes import dtypes_of
from heptad.train.step import Trainer
from heptad.units import BYTES_PER_ELEMENT

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp 2": dict(zero=0, tp=2),
    "tp 4, cut stream": dict(zero=1, tp=4, sequence_parallel=True),
    "tp 2 x zero-2 2": dict(zero=2, tp=2, dp_shard=2),
    "tp 2 x zero-3 2, cut stream": dict(zero=3, tp=2, dp_shard=2, sequence_parallel=True),
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "one kv head": dict(kv_heads=1),
    "gpt": GPT,
    "qwen": dict(qk_norm=True, tied=True),
}


def memory_job(model: str, layout: str, params: str) -> Job:
    """AdamW, whose two moments lie beside each master element."""
    job = tiny_job(MODELS[model], **LAYOUTS[layout])
    optimizer = job.optimizer.model_copy(update={"name": "adamw"})
    return job.model_copy(
        update={"optimizer": optimizer, "precision": job.precision.model_copy(update={"params": params})}
    )


def resident(rank: int, job: Job) -> dict[str, int]:
    """Live bytes after a step: of the buffers, and of the optimizer's state tensors."""
    trainer = Trainer(job, rank, torch.device("cpu"))
    layout = trainer.mesh.layout
    trainer.step(1, tiny_batches(job, layout.data_rank(rank), layout.data_ranks, 1))
    buffers: dict[int, int] = {}
    for bucket in trainer.engine.buckets:
        for tensor in (bucket.full, bucket.master, bucket.grad_full, bucket.grad_shard):
            buffers[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
    masters = {piece.tensor.untyped_storage()._cdata for piece in trainer.pieces()[: len(trainer.engine.shards)]}
    state = {
        piece.tensor.untyped_storage()._cdata: piece.tensor.untyped_storage().nbytes()
        for piece in trainer.optimizer.pieces()
    }
    assert masters <= set(buffers) and not set(state) & set(buffers)
    return {"buffers": sum(buffers.values()), "state": sum(state.values())}


def predicted(job: Job, rank: int) -> dict[str, int]:
    """From the cut alone: local buckets, and of the optimizer what this rank's shard of them really is."""
    layout, dtypes = Layout.of(job.layout), dtypes_of(job.precision, "cpu")
    specs, coords = param_specs(job.model), Layout.of(job.layout).coords(rank)
    held = cuts(specs, job.model, layout.degree("tp"), job.layout.sequence_parallel)[coords["tp"]]
    num_shards = layout.degree("dp_shard") if job.layout.zero else 1
    sizes = [BYTES_PER_ELEMENT[name] for name in (dtypes.params, dtypes.reduce, dtypes.master)]
    local = [held[spec.name].local for spec in specs]
    buckets = plan_buckets(unit_specs(job.model), local, {"dense": num_shards}, job.layout.bucket_mb, sizes[1])
    at = coords["dp_shard"] if num_shards > 1 else 0
    real = []
    for bucket in buckets:
        for slot in bucket.slots:
            (run,) = held[slot.spec.name].runs
            real.append(replace(slot.spec, shape=(run.within(*ranges_of(bucket, slot)[at]).numel,)))
    return {
        "buffers": sum(cost.memory(buckets, job.layout.zero, *sizes).values()),
        "state": state_bytes(job.optimizer, real, sizes[2]),
    }


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("model", "params"), list(zip(MODELS, ["fp64", "fp32", "bf16", "bf16"], strict=True)))
def test_resident_bytes_are_those_of_the_local_shapes(model: str, params: str, layout: str) -> None:
    job = memory_job(model, layout, params)
    for rank, found in enumerate(forked(job.layout.tp * job.layout.dp_shard, resident, job)):
        assert found == predicted(job, rank), rank
