"""Cases of the field on a training step: normalisation, stages, skips, recompute, tied and initial values."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.tiny import reference, tiny_batches, tiny_job
from tests.verify.layouts import layout_job
from torch import Tensor, nn

from heptad.config.check import check
from heptad.config.schema import Job, ModelSection
from heptad.errors import ConfigError
from heptad.launch.forked import forked
from heptad.loader.loader import Loader
from heptad.loader.synthetic import synthetic
from heptad.mesh.collectives import _ordered_sum
from heptad.mesh.layout import Layout
from heptad.mesh.piece import Piece
from heptad.models.batch import IGNORED, Batch
from heptad.models.build import Model, wrap
from heptad.models.spec import Init, ParamSpec
from heptad.precision.policy import Policy
from heptad.train.step import NonFinite, StepResult, Trainer
from heptad.verify.compare import assemble
from heptad.verify.ranks import Watched

Outcome = tuple[StepResult, list[Piece], list[Piece]]


class Weights(nn.Module):
    """One weight, starting at 1, for each position of the global batch: token i's loss is weight[i] · label[i]."""

    def __init__(self, section: ModelSection) -> None:
        super().__init__()
        self.first = _Weights(section.width)
        self.last = _Sum()

    def units(self) -> list[nn.Module]:
        return [self.first, self.last]

    def param_specs(self) -> tuple[ParamSpec, ...]:
        shape = tuple(self.first.weight.shape)
        return (ParamSpec("first.weight", shape, ("positions",), "bias", Init("constant", 1.0)),)


class _Weights(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: None, batch: Batch) -> Tensor:
        return self.weight[batch.index % self.weight.numel()]


class _Sum(nn.Module):
    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        return (x * batch.labels.clamp(min=0)).sum()


def batch_of(labels: list[list[int]], first: int = 0) -> Batch:
    """Labels [B, L] at global positions first, first + 1, …"""
    wanted = torch.tensor(labels)
    index = first + torch.arange(wanted.numel()).view(wanted.shape)
    zeros = torch.zeros_like(wanted)
    return Batch(zeros, wanted, torch.arange(wanted.shape[1]).expand(wanted.shape), zeros, index, 1)


def weights_model(width: int) -> Model:
    with torch.device("meta"):
        return wrap(Weights(ModelSection(width=width)), ModelSection(width=width))


def step_on(rank: int, job: Job, batches: list[list[Batch]], model: Model | None = None) -> Outcome:
    trainer = Trainer(job, rank, torch.device("cpu"), model)
    result = trainer.step(1, batches[rank])
    shards = trainer.engine.shards
    return result, [s.piece(s.gradient().clone()) for s in shards], [s.piece(s.master.clone()) for s in shards]


def whole(outcomes: list[Outcome], which: int) -> dict[str, Tensor]:
    tensors, split = assemble([outcome[which] for outcome in outcomes])
    assert not split
    return tensors


def test_c_001_tokens_weigh_the_same_however_samples_are_cut_into_micro_batches() -> None:
    job = tiny_job(global_batch=2, zero=0)
    a, b = batch_of([[4, IGNORED, IGNORED]]), batch_of([[0, 0, 0]], first=3)
    result, grads, _ = step_on(0, job, [[a, b]], weights_model(6))
    assert result.loss == 1.0  # a mean of means gives 2.0
    assert grads[0].tensor.tolist() == [1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    found = []
    for micro_batch in (4, 2, 1):
        tiny = layout_job(ranks=1, zero=0, accumulation=4, params="fp32", optimizer={"clip_norm": None})
        tiny = tiny.model_copy(update={"train": tiny.train.model_copy(update={"micro_batch": micro_batch})})
        found.append(step_on(0, tiny, [Loader(tiny, 0, 1, synthetic(tiny)).step(0)]))
    for result, grads, _ in found[1:]:
        assert result.loss == pytest.approx(found[0][0].loss, rel=1e-6)
        for piece, right in zip(grads, found[0][1], strict=True):
            torch.testing.assert_close(piece.tensor, right.tensor, rtol=1e-6, atol=1e-6)


def test_c_002_every_token_of_every_rank_has_the_same_weight() -> None:
    rows = [[[1, IGNORED, IGNORED]], [[1, 1, 1]]]
    batches = [[batch_of(row, first=3 * rank)] for rank, row in enumerate(rows)]
    two = forked(2, step_on, tiny_job(global_batch=2, dp_shard=2), batches, weights_model(6))
    one = step_on(0, tiny_job(global_batch=2), [batches[0] + batches[1]], weights_model(6))
    assert whole(two, 1)["first.weight"].tolist() == [0.25, 0.0, 0.0, 0.25, 0.25, 0.25]
    assert torch.equal(whole(two, 1)["first.weight"], whole([one], 1)["first.weight"])
    assert [outcome[0].loss for outcome in two] == [one[0].loss] * 2 == [1.0, 1.0]


def trained(rank: int, jobs: list[Job], steps: int) -> list[tuple[list[float], list[float], list[Piece]]]:
    """(losses, gradient norms, parameters) of each job after `steps` steps on the same sequences."""
    found = []
    for job in jobs:
        trainer, layout = Trainer(job, rank, torch.device("cpu")), Layout.of(job.layout)
        data = [tiny_batches(job, layout.data_rank(rank), layout.data_ranks, step) for step in range(1, steps + 1)]
        results = [trainer.step(step + 1, batches) for step, batches in enumerate(data)]
        params = [shard.piece(shard.master.clone()) for shard in trainer.engine.shards]
        found.append(([r.loss for r in results], [r.grad_norm for r in results], params))
    return found


def test_c_003_loss_norm_and_parameters_do_not_depend_on_the_number_of_devices() -> None:
    found: list[tuple[list[float], list[float], dict[str, Tensor]]] = []
    for world in (1, 2, 4):
        modes: list[dict[str, Any]] = [{"zero": zero} for zero in (0, 1, 2, 3)] + [{"engine": "fsdp2"}]
        jobs = [tiny_job({"layers": 2}, dp_shard=world, **mode) for mode in (modes if world > 1 else modes[:1])]
        ranks = forked(world, trained, jobs, 3, timeout_s=120)
        for at in range(len(jobs)):
            assert all(report[at][:2] == ranks[0][at][:2] for report in ranks)
            found.append((*ranks[0][at][:2], assemble([report[at][2] for report in ranks])[0]))
    losses, norms, params = found[0]
    for other_losses, other_norms, other_params in found[1:]:
        assert other_losses == pytest.approx(losses, rel=1e-6) and other_norms == pytest.approx(norms, rel=1e-6)
        for name, right in params.items():
            torch.testing.assert_close(other_params[name], right, rtol=1e-6, atol=1e-6)


def test_c_008_a_rank_without_targets_adds_nothing_and_takes_part() -> None:
    job = tiny_job({"layers": 1}, global_batch=2, dp_shard=2)
    kept, empty = tiny_batches(job, 0, 1, 1)[1], tiny_batches(job, 0, 1, 1)[0]
    assert kept.num_targets() > 0 == empty.num_targets()
    two = forked(2, step_on, job, [[kept], [empty]])
    alone = step_on(0, tiny_job({"layers": 1}, global_batch=1), [[kept]])
    assert two[0][0].loss == two[1][0].loss == pytest.approx(alone[0].loss, rel=1e-12)
    for name, grad in whole(two, 1).items():
        torch.testing.assert_close(grad, whole([alone], 1)[name], rtol=1e-10, atol=1e-12)
    for result, grads, params in forked(2, step_on, job, [[empty], [empty]]):
        assert (result.loss, result.grad_norm, result.skipped) == (0.0, 0.0, True)
        assert all(not piece.tensor.any() for piece in grads) and all(p.tensor.isfinite().all() for p in params)


def test_c_045_sums_of_16_bit_gradients_run_in_fp32() -> None:
    assert Policy.of(layout_job(params="bf16").precision, "cpu").reduce is torch.float32
    ones = [torch.ones(3, dtype=torch.bfloat16) for _ in range(512)]
    running = torch.zeros(3, dtype=torch.bfloat16)
    for one in ones:
        running += one
    out = torch.empty(3, dtype=torch.float32)
    _ordered_sum(out, ones, accumulate=False)
    assert (running.tolist(), out.tolist()) == ([256.0] * 3, [512.0] * 3)
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(1001, generator=generator).bfloat16() for _ in range(16)]
    right = torch.stack([part.double() for part in parts]).sum(0)
    rounded = torch.empty(1001, dtype=torch.bfloat16)
    _ordered_sum(rounded, parts, accumulate=False)
    assert ((rounded.double() - right).abs() <= right.abs() * 2**-8 + 1e-6).all()


@pytest.mark.parametrize("name", ["sgd", pytest.param("adamw", marks=pytest.mark.slow)])
def test_c_047_stages_agree_under_accumulation(name: str) -> None:
    """K = 4, 5 steps, widths that four ranks do not divide; buckets and prefetch differ between the stages."""
    settings: list[dict[str, Any]] = [
        {"zero": 0, "bucket_mb": 1.0},
        {"zero": 1, "prefetch": 0},
        {"zero": 2, "prefetch": 3},
        {"zero": 3, "bucket_mb": 0.001},
    ]
    jobs = []
    for width in (3, 5, 36):
        model = {"layers": 1, "width": width, "heads": 2, "kv_heads": 1, "mlp_width": 7}
        for setting in settings:
            job = tiny_job(model, global_batch=16, dp_shard=4, **setting)
            optimizer = job.optimizer.model_copy(update={"name": name, "lr": 0.01})
            jobs.append(job.model_copy(update={"optimizer": optimizer}))
    ranks = forked(4, trained, jobs, 5, timeout_s=240)
    params = [assemble([report[at][2] for report in ranks])[0] for at in range(len(jobs))]
    for first in range(0, len(jobs), len(settings)):
        for other in params[first + 1 : first + len(settings)]:
            for param, right in params[first].items():
                torch.testing.assert_close(other[param], right, rtol=1e-6, atol=1e-8)


class Poisoned(Trainer):
    """Rank 1's loss is nan in step 3, and so are its gradients."""

    def poison(self, step: int) -> None:
        """Before `step`."""
        head = self.parallel.model.units[-1]
        forward = type(head).forward
        sick = step == 3 and self.rank == 1
        head.forward = lambda x, batch: forward(head, x, batch) * (math.nan if sick else 1.0)


def spiked(rank: int, job: Job) -> tuple[list[StepResult | str], bool, float]:
    """Results of 4 steps, whether step 3 left every bit of the state alone, and what step 4 moved."""
    trainer = Poisoned(job, rank, torch.device("cpu"))
    results: list[StepResult | str] = []
    untouched, moved = True, 0.0

    def state() -> list[Tensor]:
        held = [shard.master for shard in trainer.engine.shards] + [
            piece.tensor for piece in trainer.optimizer.pieces()
        ]
        return [tensor.clone() for tensor in held]

    for step in range(1, 5):
        before, updates = state(), trainer.optimizer.updates
        trainer.poison(step)
        try:
            results.append(trainer.step(step, tiny_batches(job, rank, 2, step)))
        except NonFinite as error:
            results.append(str(error))
        same = all(torch.equal(a, b) for a, b in zip(before, state(), strict=True))
        if step == 3:
            untouched = same and trainer.optimizer.updates == updates
        else:
            moved += not same
    return results, untouched, moved


def with_optimizer(job: Job, **options: Any) -> Job:
    return job.model_copy(update={"optimizer": job.optimizer.model_copy(update=options)})


def test_c_054_a_nan_on_one_rank_is_skipped_by_all_before_anything_changed() -> None:
    job = with_optimizer(tiny_job({"layers": 1}, global_batch=4, dp_shard=2), name="adamw", lr=0.01, clip_norm=1.0)
    for results, untouched, moved in forked(2, spiked, job):
        skipped = [isinstance(result, StepResult) and result.skipped for result in results]
        assert skipped == [False, False, True, False] and untouched and moved == 3
    for results, untouched, _ in forked(2, spiked, with_optimizer(job, nonfinite="raise")):
        assert isinstance(results[2], str) and "step 3" in results[2] and "rank 1" in results[2] and untouched


def test_c_096_a_spike_on_rank_1_is_seen_and_named_by_every_rank() -> None:
    job = tiny_job({"layers": 1}, global_batch=4, dp_replicate=2, zero=0)
    for results, untouched, _ in forked(2, spiked, job):
        spike = results[2]
        assert isinstance(spike, StepResult) and spike.skipped and spike.bad_rank == 1 and untouched


@pytest.mark.parametrize("layout", [{"zero": 0, "dp_shard": 2}, {"zero": 3, "dp_shard": 2}], ids=["ddp", "sharded"])
def test_c_022_recompute_changes_no_bit(layout: dict[str, Any]) -> None:
    found = []
    for mode in ("none", "full"):
        job = tiny_job({"layers": 2, "dropout": 0.1, "attention_dropout": 0.1}, 4, mode, **layout)
        found.append(forked(2, step_on, job, [tiny_batches(job, rank, 2, 1) for rank in range(2)]))
    for plain, again in zip(*found, strict=True):
        assert plain[0] == again[0]
        for a, b in zip(plain[1] + plain[2], again[1] + again[2], strict=True):
            assert torch.equal(a.tensor, b.tensor), a.name


def initial(rank: int, job: Job) -> list[Piece]:
    torch.manual_seed(rank)
    return [shard.piece(shard.master.clone()) for shard in Trainer(job, rank, torch.device("cpu")).engine.shards]


def test_c_024_every_layout_starts_from_the_same_weights_and_a_perturbed_replica_is_seen() -> None:
    layouts: list[dict[str, Any]] = [{"dp_shard": 4}, {"dp_shard": 2, "dp_replicate": 2}, {"dp_shard": 4, "zero": 0}]
    right, _ = assemble([initial(0, tiny_job())])
    for layout in layouts:
        ranks = forked(4, initial, tiny_job(**layout))
        tensors, split = assemble(ranks)
        assert not split and all(torch.equal(tensors[name], right[name]) for name in right)
    ranks[3][5].tensor[0] += 1e-3  # stage 0: every rank holds a replica
    assert assemble(ranks)[1] == [ranks[3][5].name]


def tied_run(rank: int, job: Job) -> tuple[bool, list[Piece]]:
    trainer = Watched(job, rank)
    module: Any = trainer.parallel.model.module
    for step in (1, 2, 3):
        trainer.step(step, tiny_batches(job, rank, 2, step))
    same = module.head.out.weight is module.embed.tokens.weight
    return same, [shard.piece(shard.master.clone()) for shard in trainer.engine.shards]


def test_c_019_tied_names_stay_one_object_from_meta_to_a_sharded_step() -> None:
    """Under FSDP2, whose units are roots of their own and would untie them, a tied head is refused before it starts."""
    with pytest.raises(ConfigError, match="tied"):
        check(tiny_job({"tied": True}, dp_shard=2, engine="fsdp2", bucket_mb=1.0))
    job = tiny_job({"layers": 2, "tied": True}, dp_shard=2)
    ranks = forked(2, tied_run, job)
    assert all(same for same, _ in ranks)
    params, _ = assemble([pieces for _, pieces in ranks])
    for name, right in reference(job, 3)[-1].params.items():
        torch.testing.assert_close(params[name], right, rtol=1e-10, atol=1e-10)
