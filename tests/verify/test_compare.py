from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.verify.layouts import layout_job
from tests.verify.test_moe_layouts import GROUPS, LIMITED, SOFTMAX

from heptad.launch.forked import RankFailed
from heptad.loader.synthetic import synthetic
from heptad.mesh.piece import Piece
from heptad.optim.roles import decay_of, kind_of
from heptad.verify.compare import assemble, compare
from heptad.verify.judge import Difference, Judge, granted
from heptad.verify.localise import Blame, guilty, module_of, present
from heptad.verify.ranks import run_layout
from heptad.verify.reference import Reference
from heptad.verify.run import attempt
from heptad.verify.update import WholeOptimizer


def piece(start: int, stop: int, values: torch.Tensor) -> Piece:
    return Piece("w", (2, 5), start, stop, values[start:stop].clone())


def test_pieces_become_whole_tensors_and_replicas_must_agree_in_every_bit() -> None:
    values = torch.arange(10.0)
    ranks = [[piece(0, 3, values)], [piece(3, 10, values)], [piece(0, 3, values)], [piece(3, 10, values)]]
    whole, split = assemble([*ranks, [piece(10, 10, values)]])
    assert torch.equal(whole["w"], values.view(2, 5)) and not split
    ranks[2][0].tensor[0] = -0.0  # equal to 0.0, but not the same bits
    assert assemble(ranks)[1] == ["w"]


@pytest.mark.parametrize(
    ("ranges", "says"),
    [
        ([(0, 3), (4, 10)], "held by no rank or by two"),
        ([(0, 3), (2, 10)], "held by no rank or by two"),
        ([(0, 3), (3, 9)], "from 9 on"),
        ([(0, 3), (3, 10), (3, 10)], "more replicas"),
    ],
)
def test_pieces_that_do_not_tile_are_an_invariant_broken(ranges: list[tuple[int, int]], says: str) -> None:
    with pytest.raises(AssertionError, match=says):
        assemble([[piece(start, stop, torch.arange(10.0))] for start, stop in ranges])


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_the_references_optimizers_are_torchs(name: str) -> None:
    job = layout_job(ranks=1, optimizer={"name": name, "schedule": "constant", "weight_decay": 0.1} | (
        {"momentum": 0.9} if name == "sgd" else {}
    ))  # fmt: skip
    reference = Reference(job, synthetic(job))
    section, specs = job.optimizer, reference.specs
    mine = {name: value.clone() for name, value in reference.masters.items()}
    theirs = {name: torch.nn.Parameter(value.clone()) for name, value in reference.masters.items()}
    groups = [{"params": [theirs[spec.name]], "weight_decay": decay_of(section, spec)} for spec in specs]
    assert {kind_of(section, spec) for spec in specs} == {name}
    torchs: torch.optim.Optimizer
    if name == "adamw":
        torchs = torch.optim.AdamW(groups, lr=section.lr, betas=section.betas, eps=section.eps, foreach=False)
    else:
        torchs = torch.optim.SGD(groups, lr=section.lr, momentum=0.9, foreach=False)
    optimizer = WholeOptimizer(section, specs, total_steps=5)
    generator = torch.Generator().manual_seed(1)
    for step in range(1, 4):
        grads = {n: torch.randn(p.shape, generator=generator, dtype=torch.float64) for n, p in theirs.items()}
        for key, param in theirs.items():
            param.grad = grads[key].clone()
        torchs.step()
        optimizer.step(step, mine, grads)
        for key, param in theirs.items():
            torch.testing.assert_close(mine[key], param.detach(), rtol=1e-13, atol=1e-15)


DENSE = dict(qk_norm=True, tied=True, qkv_bias=True, mlp_bias=True)
REORDERED: dict[str, dict[str, Any]] = {
    "dense": dict(model=DENSE),
    "softmax, jitter": dict(model=SOFTMAX),
    "latents, depths": dict(model={**LIMITED, "mtp_depth": 2}),
    "dropout": dict(model=GROUPS),
    "in parts": dict(model={**LIMITED, "attention": "math"}, layout=dict(tp=2, cp=2, etp=2)),
    "more parts than rows": dict(model={**LIMITED, "kv_lora_rank": 1}, layout=dict(tp=4, cp=2, ep=4, ep_inner=2)),
}


@pytest.mark.parametrize("name", REORDERED)
def test_a_reordered_step_is_the_same_function(name: str) -> None:
    job = layout_job(**REORDERED[name])
    reference = Reference(job, synthetic(job))
    right = reference.compute(1)
    for other in reference.reordered(1):
        assert other.loss == pytest.approx(right.loss, rel=1e-12) and other.norm == pytest.approx(right.norm, rel=1e-12)
        assert other.added == pytest.approx(right.added, rel=1e-12)
        for key, grad in right.grads.items():
            torch.testing.assert_close(other.grads[key], grad, rtol=1e-9, atol=1e-12)
    assert reference.compute(1).grads.keys() == right.grads.keys()  # and it leaves the parameters as they were
    assert reference.compute(1).loss == right.loss


def test_in_bf16_a_gradient_has_a_floor_only_where_it_is_noise() -> None:
    assert granted(1.0, 0.01, 100.0) == (1.0, 0.03)
    assert granted(1.0, 0.0, 100.0) == (1.0, 3 * 2.0**-8)
    assert granted(1.1, 0.5, 256.0) == (1.1, pytest.approx(1.5 / 1.1))  # small beside the largest, and known
    assert granted(0.9, 0.0, 256.0) == (1.0, 1.0)  # noise: no larger than a rounding of the largest
    assert granted(1.1, 0.6, 256.0) == (1.1, pytest.approx(1.8 / 1.1))  # or than its own noise
    assert granted(0.0, 0.0, 256.0) == (1.0, 1.0)
    assert granted(3.0, 2.0, 256.0) == (3.0, pytest.approx(6 / 3))
    assert granted(0.0, 0.0, 0.0)[1] == 3 * 2.0**-8


def test_a_rank_that_fails_is_a_difference_not_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    from heptad.verify import ranks

    def broken(*args: object) -> None:
        raise ValueError("no such thing")

    monkeypatch.setattr(ranks, "Watched", broken)
    job = layout_job()
    with pytest.raises(RankFailed, match="no such thing"):
        run_layout(job, synthetic(job), 1)
    comparison, reports, failure = attempt(job, synthetic(job), 1)
    assert comparison is None and reports == [] and failure is not None and "no such thing" in failure


def test_experts_loads_are_compared_as_whole_numbers() -> None:
    job = layout_job(ranks=1, accumulation=1, model=dict(experts=5, experts_per_token=2, expert_width=3))
    comparison, reports, _ = attempt(job, synthetic(job), 1)
    assert comparison is not None and comparison.ok
    (name, counts), *_ = reports[0].steps[0].loads.items()
    counts[-1] += 1  # as if a choice had been dropped
    (found,) = compare(job, Reference(job, synthetic(job)), reports, 1).differences
    assert (found.kind, found.name) == ("load", name) and module_of(found) == "blocks.0.mlp.router"


def test_blame_is_the_fewest_axes_whose_absence_heals() -> None:
    job = layout_job(ranks=4, hsdp=True, accumulation=3, recompute={"mode": "full"})
    assert present(job) == ["dp_replicate", "dp_shard", "accumulation", "zero", "recompute", "prefetch"]

    def healed_without(*wrong: str):  # type: ignore[no-untyped-def]
        return lambda variant: not set(wrong) & set(present(variant))

    assert guilty(job, healed_without("zero")) == Blame("zero", ())
    assert guilty(job, healed_without("recompute", "accumulation")) == Blame("accumulation+recompute")
    three = guilty(job, healed_without("dp_replicate", "accumulation", "recompute"))
    assert three == Blame("dp_replicate+accumulation+recompute")
    assert guilty(job, lambda variant: False) == Blame("none of the axes: model or optimizer")
    assert guilty(job, lambda variant: variant.layout.zero == 0 or variant.layout.dp_shard == 1).also == ("zero",)


def test_a_difference_names_its_module() -> None:
    assert module_of(Difference(1, "gradient", "blocks.1.mlp.up.weight", 1.0, 0.1)) == "blocks.1.mlp.up"
    assert module_of(Difference(1, "output", "blocks.1", 1.0, 0.1)) == "blocks.1"
    assert module_of(Difference(1, "norm", "", 1.0, 0.1)) == "gradient norm"


def test_in_bf16_gradients_that_are_all_too_far_are_wrong_together() -> None:
    """Each at 2.5 times the distance of the reordered runs: none by itself is beyond three."""
    job = layout_job(params="bf16", ranks=1)
    reference = Reference(job, synthetic(job))
    judge = Judge(1, reference, reference.follow(1, []))
    for factor, wrong in ((1.9, []), (2.5, ["all together"]), (3.5, None)):
        grads, judge.found = {}, []
        for name, right in judge.right.grads.items():
            noise = max(float((other.grads[name] - right).square().mean().sqrt()) for other in judge.others)
            grads[name] = right + factor * max(noise, 2.0**-8 * float(right.square().mean().sqrt()))
        judge.gradients(grads)
        names = [item.name for item in judge.found]
        assert names == wrong if wrong is not None else len(names) == len(grads) + 1
