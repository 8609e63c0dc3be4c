"""Updates equal torch's own optimizers on whole tensors; state, learning rate and options take effect."""

from __future__ import annotations

import pytest
import torch
from tests.optim.fixtures import cut, masters, section, set_grads, specs, values
from torch import Tensor

from heptad.mesh.collectives import Group
from heptad.mesh.ledger import Ledger
from heptad.optim.build import Optimizer, build_optimizer
from heptad.optim.schedule import lr_at

STEPS = 4


def piece_group(index: int, size: int) -> Group:
    """A group of which this process plays one rank (elementwise updates send nothing)."""
    return Group("dp_shard", tuple(range(size)), index, None, Ledger())


def train(size: int, dtype: torch.dtype = torch.float64, **options: object) -> dict[str, Tensor]:
    """Whole masters after STEPS updates on `size` ranks, one after the other in this process."""
    parts: dict[str, list[Tensor]] = {spec.name: [] for spec in specs()}
    for index in range(size):
        shards = cut(values(0, dtype), piece_group(index, size) if size > 1 else None)
        optimizer = build_optimizer(section(**options), shards, STEPS)
        for step in range(1, STEPS + 1):
            set_grads(shards, values(step, dtype))
            optimizer.step(step)
        for shard in shards:
            parts[shard.spec.name].append(shard.master)
    return {spec.name: torch.cat(parts[spec.name]).view(spec.shape) for spec in specs()}


def torch_train(make: object, dtype: torch.dtype = torch.float64, **options: object) -> dict[str, Tensor]:
    chosen = section(**options)
    whole = values(0, dtype)
    decayed = [whole[spec.name] for spec in specs() if spec.role in chosen.decay_roles]
    others = [whole[spec.name] for spec in specs() if spec.role not in chosen.decay_roles]
    groups = [{"params": decayed, "weight_decay": chosen.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = make(groups)  # type: ignore[operator]
    for step in range(1, STEPS + 1):
        for name, grad in values(step, dtype).items():
            whole[name].grad = grad
        for group in optimizer.param_groups:
            group["lr"] = lr_at(chosen, step, STEPS)
        optimizer.step()
    return whole


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1, 2, 3, 64])
def test_adamw_equals_torch(size: int, dtype: torch.dtype) -> None:
    options = {"lr": 0.1, "betas": (0.8, 0.9), "weight_decay": 0.3, "eps": 1e-3, "warmup_steps": 2}
    want = torch_train(lambda g: torch.optim.AdamW(g, betas=(0.8, 0.9), eps=1e-3, foreach=False), dtype, **options)
    tol = 1e-12 if dtype == torch.float64 else 2e-6
    for name, got in train(size, dtype, **options).items():
        torch.testing.assert_close(got, want[name], rtol=tol, atol=tol)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_sgd_equals_torch(size: int, momentum: float) -> None:
    options = {"name": "sgd", "lr": 0.1, "weight_decay": 0.3, "momentum": momentum}
    want = torch_train(lambda g: torch.optim.SGD(g, momentum=momentum, foreach=False), **options)
    for name, got in train(size, **options).items():
        torch.testing.assert_close(got, want[name], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_c_053_decay_by_role_not_by_shape(size: int) -> None:
    for index in range(size):
        shards = cut(values(0), piece_group(index, size) if size > 1 else None)
        before = masters(shards)
        build_optimizer(section(lr=0.1, weight_decay=0.5, schedule="constant"), shards, 1).step(1)
        for shard in shards:
            old = before[shard.spec.name]
            if shard.spec.role in ("norm", "bias"):
                assert torch.equal(shard.master, old)
            else:
                torch.testing.assert_close(shard.master, old * 0.95, rtol=1e-15, atol=0)


def resume(optimizer: Optimizer, saved: dict[str, Tensor], meta: dict[str, object]) -> None:
    def fill(name: str, start: int, stop: int, out: Tensor) -> None:
        out.copy_(saved[name][start:stop])

    optimizer.load(fill, meta)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_c_055_c_057_state_moves_between_rank_counts(name: str) -> None:
    options = section(name=name, lr=0.1, **({"momentum": 0.9} if name == "sgd" else {}))
    whole = cut(values(0))
    first = build_optimizer(options, whole, 6)
    for step in (1, 2, 3):
        set_grads(whole, values(step))
        first.step(step)
    saved = {piece.name: piece.tensor.clone() for piece in first.pieces()}
    weights = {shard.spec.name: shard.master.clone().view(shard.spec.shape) for shard in whole}
    for step in (4, 5, 6):
        set_grads(whole, values(step))
        first.step(step)
    for index in range(3):
        shards = cut(weights, piece_group(index, 3))
        second = build_optimizer(options, shards, 6)
        assert [piece.name for piece in second.pieces()] == list(saved)
        resume(second, saved, {"updates": 3})
        for step in (4, 5, 6):
            set_grads(shards, values(step))
            second.step(step)
        for shard, end in zip(shards, whole, strict=True):
            assert torch.equal(shard.master, end.master[shard.start : shard.stop])


def test_c_110_learning_rate_after_a_resume() -> None:
    options = section(name="muon", lr=1.0, muon_lr=3.0, warmup_steps=2)

    def seen(steps: range, optimizer: Optimizer) -> list[list[float]]:
        rates = []
        for step in steps:
            optimizer.step(step)
            rates.append([group.lr for group in optimizer.groups])
        return rates

    uninterrupted = seen(range(1, 11), build_optimizer(options, cut(values(0)), 10))
    first = build_optimizer(options, cut(values(0)), 10)
    head = seen(range(1, 6), first)
    second = build_optimizer(options, cut(values(0)), 10)
    resume(second, {piece.name: piece.tensor for piece in first.pieces()}, first.meta())
    assert head + seen(range(6, 11), second) == uninterrupted
    for step, rates in enumerate(uninterrupted, start=1):
        assert sorted(set(rates)) == [lr_at(options, step, 10), lr_at(options, step, 10, 3.0)]


EFFECTS: dict[str, tuple[dict[str, object], object]] = {
    "name": ({}, "sgd"),
    "roles": ({}, {"matrix": "sgd"}),
    "lr": ({}, 0.2),
    "muon_lr": ({"name": "muon"}, 0.3),
    "betas": ({}, (0.5, 0.6)),
    "eps": ({}, 0.5),
    "momentum": ({"name": "sgd"}, 0.5),
    "muon_momentum": ({"name": "muon"}, 0.5),
    "weight_decay": ({}, 0.0),
    "decay_roles": ({}, ("norm",)),
    "schedule": ({}, "constant"),
    "warmup_steps": ({}, 2),
    "decay_steps": ({}, 1),
    "min_lr_ratio": ({}, 0.9),
}


@pytest.mark.parametrize("field", sorted(EFFECTS))
def test_c_120_every_option_changes_the_update(field: str) -> None:
    base, value = EFFECTS[field]
    plain = train(1, **({"lr": 0.1} | base))
    changed = train(1, **({"lr": 0.1} | base | {field: value}))
    assert any(not torch.equal(plain[name], changed[name]) for name in plain)


def test_c_120_no_option_is_forgotten() -> None:
    elsewhere = {"clip_norm", "nonfinite"}  # read by the step: see test_norm.py and tests/train
    assert set(EFFECTS) | elsewhere == set(type(section()).model_fields)


def test_a_gradient_of_another_dtype() -> None:
    shards = cut(values(0, torch.float32), grad_dtype=torch.bfloat16)
    set_grads(shards, values(1))
    build_optimizer(section(name="muon"), shards, 1).step(1)
    reference = cut(values(0, torch.float32))
    set_grads(reference, {name: grad.bfloat16().float() for name, grad in values(1).items()})
    build_optimizer(section(name="muon"), reference, 1).step(1)
    for left, right in zip(shards, reference, strict=True):
        assert torch.equal(left.master, right.master)
        assert left.grad is not None and left.grad.dtype == torch.bfloat16


def test_fake_tensors_take_the_same_path() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=False):
        whole = {spec.name: torch.empty(spec.shape) for spec in specs()}
        shards = cut(whole)
        build_optimizer(section(name="muon"), shards, 2).step(1)
