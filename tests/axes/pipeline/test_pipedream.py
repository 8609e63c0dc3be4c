"""PipeDream: every update of every stage equals the one-device model of stale weights; staleness is really there."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.axes.pipeline.stale_model import StaleReference, StaleStep
from tests.tiny import GPT, floor_of, tiny_batches, tiny_job, worst_error
from torch import Tensor

from heptad.account.traffic import step_traffic
from heptad.axes.data.versions import Versions
from heptad.axes.pipeline.generate import generate
from heptad.axes.pipeline.generators.pipedream import versions
from heptad.axes.program import stages_of
from heptad.config.schema import Job
from heptad.launch.forked import forked
from heptad.models.batch import IGNORED
from heptad.models.build import build
from heptad.schedule.action import Action, Kind, Program, UnitUse
from heptad.schedule.check import ScheduleError, check
from heptad.schedule.expand import Stages, expand
from heptad.schedule.lower import DataRule, lower
from heptad.trace import total
from heptad.train.step import StepResult, Trainer

STEPS = 2
BOUND = 1e-10
ADAMW: dict[str, Any] = dict(name="adamw", lr=0.01, eps=1e-4, weight_decay=0.1)
MOMENTUM: dict[str, Any] = dict(momentum=0.9, lr=0.05, weight_decay=0.1)
MUON: dict[str, Any] = dict(name="adamw", roles={"matrix": "muon"}, lr=0.01, eps=1e-4, muon_lr=0.02)
SIX: dict[str, Any] = dict(layers=6)
DROPPED: dict[str, Any] = GPT | dict(dropout=0.1, attention_dropout=0.1)

CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "2 ranks, as many micro-batches": ({}, dict(pp=2, global_batch=2, zero=0), {}),
    "2 ranks, AdamW": ({}, dict(pp=2, global_batch=5, zero=0), ADAMW),
    "3 ranks": ({}, dict(pp=3, global_batch=3, zero=0), MOMENTUM),
    "3 ranks, 2P+1, AdamW": (SIX, dict(pp=3, global_batch=7, zero=1), ADAMW),
    "4 ranks, fewer than P": (SIX, dict(pp=4, global_batch=3, zero=0), ADAMW),
    "4 ranks, 2P+1": (SIX, dict(pp=4, global_batch=9, zero=0), MOMENTUM),
    "4 ranks, uneven": (SIX, dict(pp=4, global_batch=4, layers_per_stage=(1, 3, 1, 1), zero=1), ADAMW),
    "2 x data 2": ({}, dict(pp=2, global_batch=10, zero=0, dp_replicate=2), ADAMW),
    "2 x data 2, stage 1": ({}, dict(pp=2, global_batch=10, zero=1, dp_shard=2), ADAMW),
    "3 x data 2, stage 1": (SIX, dict(pp=3, global_batch=14, zero=1, dp_shard=2), MOMENTUM),
    "4 x data 2, stage 0": (SIX, dict(pp=4, global_batch=18, zero=0, dp_shard=2), ADAMW),
    "hybrid shards": ({}, dict(pp=2, global_batch=20, zero=1, dp_shard=2, dp_replicate=2), ADAMW),
    "large buckets, far ahead": (SIX, dict(pp=2, global_batch=10, zero=1, dp_shard=2, bucket_mb=0.01, prefetch=3), {}),
    "Muon, stage 1": ({}, dict(pp=2, global_batch=10, zero=1, dp_shard=2), MUON),
    "tensor 2, cut stream": ({}, dict(pp=2, global_batch=5, zero=0, tp=2, sequence_parallel=True), ADAMW),
    "dropout, recompute": (DROPPED | SIX, dict(pp=3, global_batch=7, zero=0, recompute="full"), MOMENTUM),
    "dropout, data and tensor": (DROPPED, dict(pp=2, global_batch=10, zero=1, dp_shard=2, tp=2), MOMENTUM),
    "selective recompute": ({}, dict(pp=2, global_batch=5, zero=1, recompute="selective"), ADAMW),
    "frozen embedding": (SIX | dict(frozen=("embed.*",)), dict(pp=3, global_batch=14, zero=1, dp_shard=2), ADAMW),
    "frozen first stage": (
        SIX | dict(frozen=("embed.*", "blocks.[0-2].*")), dict(pp=3, global_batch=7, zero=0), ADAMW,
    ),
}  # fmt: skip

Held = list[tuple[str, int, int, Tensor]]


def job_of(name: str) -> Job:
    model, layout, optimizer = CASES[name]
    job = tiny_job(model, schedule="pipedream", **layout)
    return job.model_copy(update={"optimizer": job.optimizer.model_copy(update=optimizer)})


def updates_of(job: Job) -> int:
    """Micro-batches of a step that have a target: one data rank's first has none."""
    return job.train.global_batch // data_ranks(job) - (data_ranks(job) == 1)


def data_ranks(job: Job) -> int:
    return job.layout.dp_replicate * job.layout.dp_shard


def train(rank: int, job: Job, broken: str = "") -> list[tuple[StepResult, list[Held], Held, int]]:
    """Of each step: its figures, the gradients of each update, the parameters after it, versions alive at most."""
    if broken == "nothing kept":
        Versions.exchange = lambda self, microbatch: None  # type: ignore[method-assign]
    trainer = Trainer(job, rank, torch.device("cpu"))
    layout, engine = trainer.mesh.layout, trainer.engine
    grads: list[Held] = []
    alive: list[int] = []
    apply = trainer.optimizer.step

    def step_of_optimizer(step: int) -> None:
        shards = [shard for shard in engine.shards if shard.spec.trainable]
        grads.append([(s.spec.name, s.start, s.stop, s.gradient().clone()) for s in shards])
        apply(step)

    setattr(trainer.optimizer, "step", step_of_optimizer)  # noqa: B010
    if broken == "not finite":
        assert trainer.stale is not None
        scale = trainer.stale.scale
        setattr(trainer.stale, "scale", lambda microbatch: math.nan if microbatch == 1 else scale(microbatch))  # noqa: B010
    act = engine.act

    def counted(action: Action, phase: str) -> None:
        act(action, phase)
        alive.append(engine.versions.number + (action.kind is Kind.KEEP))  # the update comes at once

    setattr(engine, "act", counted)  # noqa: B010
    done = []
    for step in range(1, STEPS + 1):
        grads.clear()
        batches = tiny_batches(job, layout.data_rank(rank), layout.data_ranks, step)
        if broken == "no targets":
            batches = [replace(batch, labels=torch.full_like(batch.labels, IGNORED)) for batch in batches]
        trainer.mesh.ledger.reset()
        result = trainer.step(step, batches)
        if not broken:
            model, place = trainer.parallel.model, layout.coords(rank)["pp"]
            sent = step_traffic(job, model.unit_specs, model.specs, trainer.parallel.recompute, place=place)
            assert total(sent) == total(trainer.mesh.ledger.transfers())
        assert trainer.optimizer.updates == (0 if broken == "no targets" else step * updates_of(job))
        masters = [(s.spec.name, s.start, s.stop, s.master.clone()) for s in engine.shards if s.spec.trainable]
        done.append((result, list(grads), masters, max(alive, default=1)))
        assert engine.versions.number == 1
    return done


def reference(job: Job) -> list[StaleStep]:
    model = build(job)
    model.materialise(job.train.seed, torch.device("cpu"), torch.float64)
    stages = stages_of(job, model.unit_specs)
    assert stages is not None
    stale = StaleReference(job, model, stages.units)
    ranks = data_ranks(job)
    done = []
    for step in range(1, STEPS + 1):
        of_ranks = [tiny_batches(job, rank, ranks, step) for rank in range(ranks)]
        done.append(stale.step(step, list(zip(*of_ranks, strict=True))))
    return done


def world(job: Job) -> int:
    layout = job.layout
    return layout.pp * layout.dp_replicate * layout.dp_shard * layout.tp


def distance(found: Held, whole: dict[str, Tensor], grads: dict[str, Tensor]) -> float:
    return max(
        (worst_error(t, start, stop, whole[name], floor_of(name, grads)) for name, start, stop, t in found), default=0.0
    )


@pytest.mark.parametrize("name", CASES)
def test_every_update_is_that_of_stale_weights(name: str) -> None:
    job = job_of(name)
    wanted = reference(job)
    for steps in forked(world(job), train, job):
        for (result, grads, masters, _), want in zip(steps, wanted, strict=True):
            assert abs(result.loss - want.loss) < 1e-12 * abs(want.loss)
            assert abs(result.grad_norm - want.norm) < BOUND * want.norm
            assert not result.skipped and result.clip_factor == 1.0
            assert len(grads) == len(want.grads)
            for found, whole in zip(grads, want.grads, strict=True):
                assert distance(found, whole, whole) < BOUND
            assert distance(masters, want.params, want.grads[-1]) < BOUND


def test_a_step_without_targets_changes_nothing() -> None:
    job = job_of("2 ranks, as many micro-batches")
    model = build(job)
    model.materialise(job.train.seed, torch.device("cpu"), torch.float64)
    whole = {name: param.detach() for name, param in model.params.items()}
    for steps in forked(2, train, job, "no targets"):
        for result, grads, masters, _ in steps:
            assert result.skipped and result.loss == 0.0 and not grads
            assert distance(masters, whole, whole) == 0.0


def test_an_update_that_is_not_finite_is_left_out() -> None:
    job = job_of("2 ranks, AdamW")
    for steps in forked(2, train, job, "not finite"):
        for result, grads, masters, _ in steps:
            assert result.skipped and not math.isfinite(result.grad_norm) and math.isfinite(result.loss)
            assert len(grads) == 3  # of five micro-batches the first has no target, the second is not finite
            assert all(tensor.isfinite().all() for _, _, _, tensor in masters)


def test_without_kept_weights_the_gradients_are_others() -> None:
    """What the test above would see if a backward used the newest weights."""
    job = job_of("3 ranks, 2P+1, AdamW")
    wanted = reference(job)
    ranks = forked(world(job), train, job, "nothing kept")
    apart = [distance(steps[0][1][-1], wanted[0].grads[-1], wanted[0].grads[-1]) for steps in ranks]
    assert min(apart[:-1]) > 1e-4


def test_as_many_versions_live_as_claimed() -> None:
    job = job_of("4 ranks, 2P+1")
    ranks = forked(world(job), train, job)
    assert [steps[-1][3] for steps in ranks] == [4, 3, 2, 1]


def programs(num_ranks: int, num_microbatches: int, rule: DataRule, split: int = 2) -> list[tuple[Program, Any]]:
    """The program of each rank, and the arguments of its check; `split` units a stage, a bucket each."""
    schedule = generate("pipedream", num_ranks, None, num_microbatches)
    stages = Stages.of(schedule, tuple(range(split * i, split * (i + 1)) for i in range(num_ranks)))
    found = []
    for rank in range(num_ranks):
        own = set(stages.held(rank))
        buckets = [(unit,) if unit in own else () for unit in range(split * num_ranks)]
        uses = tuple(UnitUse(f"u{i}", bucket, bucket, bucket) for i, bucket in enumerate(buckets))
        work = expand(stages, rank, uses)
        found.append((lower(work, uses, rule), (uses, rule, (), work.pairs)))
    return found


RULES = [DataRule("never", "step", scatter=False), DataRule("step", "step", replicas=True, prefetch=2)]


@pytest.mark.parametrize("rule", RULES, ids=["stage 0", "stage 1"])
def test_programs_use_the_versions_that_the_schedule_says(rule: DataRule) -> None:
    for num_ranks in range(1, 7):
        for num_microbatches in (1, 2, 3, 5, 8, 13):
            lines = generate("pipedream", num_ranks, None, num_microbatches).lines
            for rank, (program, args) in enumerate(programs(num_ranks, num_microbatches, rule)):
                check(program, *args)
                updates, kept, used, peak = 0, dict[int, int](), dict[int, int](), 1
                for action in program:
                    match action.kind:
                        case Kind.KEEP:
                            kept[action.microbatch] = updates
                        case Kind.NEWEST:
                            del kept[action.microbatch]
                        case Kind.UPDATE_STAGE:
                            updates += 1
                        case Kind.BACKWARD:
                            used[action.microbatch] = kept.get(action.microbatch, updates)
                    peak = max(peak, len({updates, *kept.values()}))
                assert used == versions(lines[rank])
                depth = num_ranks - rank - 1
                assert peak <= min(num_microbatches, depth + 1)
                assert peak == depth + 1 or num_microbatches < 2 * depth


@pytest.mark.parametrize("rule", RULES, ids=["stage 0", "stage 1"])
def test_a_program_without_one_of_its_actions_is_refused(rule: DataRule) -> None:
    program, args = programs(3, 5, rule)[0]
    for position, action in enumerate(program):
        if action.kind in (Kind.KEEP, Kind.EXCHANGE, Kind.NEWEST, Kind.UPDATE_STAGE, Kind.REDUCE, Kind.DROP):
            with pytest.raises(ScheduleError):
                check((*program[:position], *program[position + 1 :]), *args)


def test_a_backward_with_other_weights_is_refused() -> None:
    program, args = programs(2, 4, RULES[0])[0]
    exchange = next(action for action in program if action.kind is Kind.EXCHANGE)
    newest = Action(Kind.NEWEST, exchange.index, exchange.microbatch)
    early = [action for action in program if action != newest]
    early.insert(early.index(exchange) + 2, newest)  # in the middle of the backward
    with pytest.raises(ScheduleError, match="are not the stage's"):
        check(tuple(early), *args)
    update = Action(Kind.UPDATE_STAGE, exchange.index, exchange.microbatch)
    twice = [*program[:-1], update, program[-1]]
    with pytest.raises(ScheduleError, match="updated twice"):
        check(tuple(twice), *args)
