"""The axis contract of the data axis: outputs, every gradient, parameters after SGD, traffic, resident bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.tiny import GPT, floor_of, reference, tiny_batches, tiny_job, worst_error

from heptad.account.traffic import step_traffic
from heptad.axes.data import cost
from heptad.config.schema import Job
from heptad.launch.forked import forked
from heptad.trace import total
from heptad.train.step import Trainer

STEPS = 2
LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": dict(zero=3),
    "ddp 2": dict(zero=0, dp_replicate=2),
    "ddp over dp_shard 4": dict(zero=0, dp_shard=4),
    "zero-1 2": dict(zero=1, dp_shard=2),
    "zero-1 4": dict(zero=1, dp_shard=4),
    "zero-2 2": dict(zero=2, dp_shard=2),
    "zero-2 4": dict(zero=2, dp_shard=4),
    "zero-3 2": dict(zero=3, dp_shard=2),
    "zero-3 4": dict(zero=3, dp_shard=4),
    "zero-3 4, no prefetch": dict(zero=3, dp_shard=4, prefetch=0),
    "zero-3 2, two units ahead, shared buckets": dict(zero=3, dp_shard=2, prefetch=2, bucket_mb=0.01),
    "zero-2 2, reduced once": dict(zero=2, dp_shard=2, reduce_grads="step"),
    "zero-3 4, reduced once": dict(zero=3, dp_shard=4, reduce_grads="step"),
    "hsdp 2x2": dict(zero=3, dp_replicate=2, dp_shard=2),
    "zero-1 2x2": dict(zero=1, dp_replicate=2, dp_shard=2),
    "zero-2 2x2, shards outermost": dict(zero=2, dp_replicate=2, dp_shard=2, order="pp-dp_shard-dp_replicate-cp-tp"),
}  # fmt: skip


def train(rank: int, job: Job) -> list[dict[str, Any]]:
    trainer = Trainer(job, rank, torch.device("cpu"))
    layout = trainer.mesh.layout
    done = []
    for step in range(1, STEPS + 1):
        trainer.mesh.ledger.reset()
        batches = tiny_batches(job, layout.data_rank(rank), layout.data_ranks, step)
        result = trainer.step(step, batches, count_library=True)
        found = [(s.spec.name, s.start, s.stop, s.grad, s.master.clone()) for s in trainer.engine.shards]
        done.append(
            {"result": result, "shards": [(n, a, b, None if g is None else g.clone(), m) for n, a, b, g, m in found]}
        )
    model = trainer.parallel.model
    done[-1]["counted"] = total(trainer.mesh.ledger.transfers())
    sent = step_traffic(job, model.unit_specs, model.specs, trainer.parallel.recompute, place=layout.coords(rank)["pp"])
    done[-1]["predicted"] = total(sent)
    return done


def assert_equal_to_one_device(job: Job, num_ranks: int) -> list[list[dict[str, Any]]]:
    wanted = reference(job, STEPS)
    ranks = forked(num_ranks, train, job)
    for rank, steps in enumerate(ranks):
        for step, (found, want) in enumerate(zip(steps, wanted, strict=True)):
            where = f"rank {rank}, step {step + 1}"
            assert found["result"].loss == pytest.approx(want.loss, rel=1e-12), where
            norm = torch.stack([grad.square().sum() for grad in want.grads.values()]).sum().sqrt().item()
            assert found["result"].grad_norm == pytest.approx(norm, rel=1e-10), where
            for name, start, stop, grad, master in found["shards"]:
                floor = floor_of(name, want.grads)
                if grad is not None:
                    assert worst_error(grad, start, stop, want.grads[name], floor) <= 1e-10, (
                        f"{where}: gradient of {name}"
                    )
                assert worst_error(master, start, stop, want.params[name], floor) <= 1e-10, f"{where}: {name}"
    return ranks


@pytest.mark.parametrize("model", [{}, {"tied": True}, GPT | {"dropout": 0.1}], ids=["llama", "tied", "gpt"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_equals_one_device_and_sends_what_it_predicts(name: str, model: dict[str, Any]) -> None:
    layout = LAYOUTS[name]
    num_ranks = layout.get("dp_replicate", 1) * layout.get("dp_shard", 1)
    for rank in assert_equal_to_one_device(tiny_job(model, **layout), num_ranks):
        assert rank[-1]["predicted"] == rank[-1]["counted"]
        assert bool(rank[-1]["counted"]) == (num_ranks > 1)


@pytest.mark.parametrize("layout", [dict(zero=3, dp_shard=2), dict(zero=1, dp_shard=2), dict(zero=0, dp_shard=2)])
def test_full_recompute_changes_nothing(layout: dict[str, Any]) -> None:
    """C-022 at the engine: the same bits with and without recompute, dropout on."""
    runs = []
    for mode in ("none", "full"):
        job = tiny_job({"dropout": 0.2, "attention_dropout": 0.1}, recompute=mode, **layout)
        ranks = assert_equal_to_one_device(job, 2)
        assert all(rank[-1]["predicted"] == rank[-1]["counted"] for rank in ranks)
        runs.append([item for rank in ranks for step in rank for item in step["shards"]])
    for (name, _, _, grad, _), (_, _, _, again, _) in zip(*runs, strict=True):
        assert torch.equal(grad, again), name


@pytest.mark.parametrize("layout", [dict(dp_shard=2), dict(dp_replicate=2, dp_shard=2)], ids=["fsdp", "hsdp"])
@pytest.mark.parametrize("model", [{}, GPT], ids=["llama", "gpt"])
def test_the_fsdp2_adapter_meets_the_same_contract(layout: dict[str, Any], model: dict[str, Any]) -> None:
    job = tiny_job(model, zero=3, engine="fsdp2", **layout)
    for rank in assert_equal_to_one_device(job, layout.get("dp_replicate", 1) * 2):
        assert rank[-1]["predicted"] == rank[-1]["counted"]


def resident_bytes(rank: int, job: Job) -> tuple[int, dict[str, int], list[int]]:
    """(live bytes of all buffers between steps, predicted by kind, live bytes of full parameters at each action)."""
    trainer = Trainer(job, rank, torch.device("cpu"))
    layout = trainer.mesh.layout
    buckets = trainer.engine.buckets
    full_bytes: list[int] = []
    act = trainer.engine.act

    def spy(action: Any, phase: str) -> None:
        act(action, phase)
        full_bytes.append(sum(bucket.full.untyped_storage().nbytes() for bucket in buckets))

    trainer.engine.act = spy  # type: ignore[method-assign]
    trainer.step(1, tiny_batches(job, layout.data_rank(rank), layout.data_ranks, 1))
    storages = {}
    for bucket in buckets:
        for tensor in (bucket.full, bucket.master, bucket.grad_full, bucket.grad_shard):
            storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
    policy = trainer.parallel.policy
    sizes = (policy.params.itemsize, policy.reduce.itemsize, policy.master.itemsize)
    return sum(storages.values()), cost.memory([b.spec for b in buckets], job.layout.zero, *sizes), full_bytes


@pytest.mark.parametrize("params", ["fp64", "fp32", "bf16"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_resident_bytes_are_as_predicted_and_memory_is_really_freed(zero: int, params: str) -> None:
    job = tiny_job(zero=zero, dp_shard=2)
    job = job.model_copy(update={"precision": job.precision.model_copy(update={"params": params})})
    for measured, predicted, full_bytes in forked(2, resident_bytes, job):
        assert measured == sum(predicted.values())
        if zero == 3:
            assert predicted["params"] == 0
            assert full_bytes[-1] == 0
            assert max(full_bytes) > 0


def forward_then_look(rank: int, job: Job) -> list[int]:
    """Bytes of each bucket's full parameters right before the first backward."""
    trainer = Trainer(job, rank, torch.device("cpu"))
    layout, buckets, seen = trainer.mesh.layout, trainer.engine.buckets, []
    act = trainer.engine.act

    def spy(action: Any, phase: str) -> None:
        if phase == "backward" and not seen:
            seen.extend(bucket.full.untyped_storage().nbytes() for bucket in buckets)
        act(action, phase)

    trainer.engine.act = spy  # type: ignore[method-assign]
    trainer.step(1, tiny_batches(job, layout.data_rank(rank), layout.data_ranks, 1))
    return seen


def test_between_forward_and_backward_only_the_turning_unit_is_full() -> None:
    """The graph of every block is alive then; its parameters' bytes are not (a `.data` swap would keep them)."""
    job = tiny_job(zero=3, dp_shard=2, global_batch=2)
    for seen in forked(2, forward_then_look, job):
        assert [bool(num_bytes) for num_bytes in seen] == [False, False, False, False, True]


def test_a_stage_three_step_of_phi_parameters_sends_three_phi_less_the_turn() -> None:
    """The closed form, on plain units: gather, gather, reduce-scatter; the last unit is gathered once."""
    from heptad.axes.data.buckets import plan_buckets, unit_uses
    from heptad.models.spec import param_specs, unit_specs

    section = tiny_job().model
    buckets = plan_buckets(unit_specs(section), param_specs(section), {"dense": 4}, 0.0, 4)
    uses = unit_uses(unit_specs(section), buckets)
    sent = total(cost.traffic(buckets, uses, 3, {"dense": cost.Ranks(("dp_shard", 4), ("dp_replicate", 1))}, 1, 4, 4))
    phi = sum(bucket.numel for bucket in buckets)
    first, last = buckets[0].numel, buckets[-1].numel
    assert sent["dp_shard", "all_gather", "forward"] == (5, 3 * phi)
    assert sent["dp_shard", "all_gather", "backward"] == (3, 3 * (phi - first - last))  # a table is not read backward
    assert sent["dp_shard", "reduce_scatter", "backward"] == (5, 3 * phi)
