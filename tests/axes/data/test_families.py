"""Two families of buckets: which parameters share one, who holds what of it, what it sends and keeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.tiny import tiny_batches, tiny_job

from heptad.axes.data import cost
from heptad.axes.data.buckets import part_width, plan_buckets
from heptad.axes.data.engine import DataEngine
from heptad.axes.data.stages import holder_axes, replica_axes, shard_axes, shard_counts
from heptad.config.schema import LayoutSection
from heptad.launch.forked import forked
from heptad.mesh.layout import Layout
from heptad.models.cut import family_of
from heptad.models.spec import param_specs, unit_specs
from heptad.train.step import Trainer

MOE: dict[str, Any] = dict(layers=2, experts=5, expert_width=7, dense_layers=1, frozen=("*.experts.gate.*",))
LAYOUTS: dict[str, dict[str, Any]] = {
    "stage 0": dict(zero=0, dp_shard=4, ep=2),
    "stage 1": dict(zero=1, dp_shard=2, tp=2, ep=2),
    "stage 2, runs": dict(zero=2, dp_shard=4, ep=2, etp=2),
    "stage 3, runs": dict(zero=3, dp_shard=4, etp=2),
    "stage 3, hsdp": dict(zero=3, dp_shard=2, dp_replicate=2, etp=2),
    "stage 3, an odd order": dict(zero=3, dp_shard=2, cp=2, ep=2, order="cp-tp-pp-dp_replicate-dp_shard"),
}


@pytest.mark.parametrize("bucket_mb", [0.0, 1.0])
def test_no_bucket_has_parameters_of_both(bucket_mb: float) -> None:
    model = tiny_job(MOE).model
    specs = param_specs(model)
    buckets = plan_buckets(unit_specs(model), specs, {"dense": 4, "expert": 2}, bucket_mb, 8)
    for bucket in buckets:
        kinds = {(family_of(slot.spec), slot.spec.trainable) for slot in bucket.slots}
        assert kinds == {(bucket.family, bucket.trainable)}
        assert bucket.num_shards == {"dense": 4, "expert": 2}[bucket.family] and not bucket.numel % (
            8 * bucket.num_shards
        )
    assert sorted(slot.spec.name for bucket in buckets for slot in bucket.slots) == sorted(spec.name for spec in specs)
    of_experts = [[slot.spec.name for slot in bucket.slots] for bucket in buckets if bucket.family == "expert"]
    names = [f"blocks.1.mlp.experts.{part}.weight" for part in ("gate", "up", "down")]
    assert sorted(of_experts) == [names[:1], names[1:]]
    widths = {name: part_width(buckets, [name]) for name in (names[1], "head.norm.weight")}
    assert part_width(buckets, list(widths)) == sum(widths.values()), "each family by itself"


def test_axes_of_the_families() -> None:
    layout = Layout.of(LayoutSection(dp_replicate=2, dp_shard=4, cp=2, tp=2, ep=2, etp=2))
    assert shard_counts(layout, 3) == {"dense": 8, "expert": 4} and shard_counts(layout, 0) == {"dense": 1, "expert": 1}
    for zero in range(4):
        for family in ("dense", "expert"):
            both = shard_axes(zero, family) + replica_axes(zero, family)
            parts = layout.degree(*holder_axes(zero, family)) // layout.degree(*shard_axes(zero, family))
            assert layout.degree(*both) * parts == layout.world
    found = cost.families(layout, 0)["expert"]
    assert (found.shards, found.replicas) == (("none", 1), ("dp_replicate*edp", 8))


Held = list[tuple[str, int, int, bool]]


def held(rank: int, job: Any) -> tuple[Held, list[tuple[tuple[int, int], ...]], int, int]:
    """This rank's ranges, each shard's tiles, live bytes of buffers between steps, the predicted ones."""
    trainer = Trainer(job, rank, torch.device("cpu"))
    layout, engine = trainer.mesh.layout, trainer.engine
    assert isinstance(engine, DataEngine)
    batches = tiny_batches(job, layout.data_rank(rank), layout.data_ranks, 1)
    trainer.step(1, batches)
    storages = {}
    for bucket in engine.buckets:
        grads = (bucket.grad_full, bucket.grad_shard) if bucket.spec.trainable else ()
        for tensor in (bucket.full, bucket.master, *grads):
            storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
    kept = cost.memory([bucket.spec for bucket in engine.buckets], job.layout.zero, 8, 8, 8)
    ranges = [(shard.spec.name, shard.start, shard.stop, shard.owner) for shard in engine.shards]
    return ranges, [shard.ranges for shard in engine.shards], sum(storages.values()), sum(kept.values())


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_element_lies_on_as_many_ranks_and_the_tiles_say_where(name: str) -> None:
    job = tiny_job(MOE, **LAYOUTS[name])
    layout = Layout.of(job.layout)
    found = forked(layout.world, held, job)
    for spec in param_specs(job.model):
        counts = torch.zeros(spec.numel, dtype=torch.int64)
        for ranges, *_ in found:
            for _, start, stop, owner in (item for item in ranges if item[0] == spec.name):
                counts[start:stop] += owner
        copies = layout.world // layout.degree(*holder_axes(job.layout.zero, family_of(spec)))
        assert counts.unique().tolist() == [copies]
    specs = {spec.name: spec for spec in param_specs(job.model)}
    for rank, (ranges, tiles, live, predicted) in enumerate(found):
        assert live == predicted
        for at, (spec_name, *_) in enumerate(ranges):
            group = layout.group_of(rank, holder_axes(job.layout.zero, family_of(specs[spec_name])))
            if len(group) == 1:
                assert tiles[at] == ()
                continue
            for other, (first, last) in zip(group, tiles[at], strict=True):
                _, start, stop, owner = found[other][0][at]
                assert (first, last) == (start, stop) if owner else first == last
