"""What the executor does is what the schedule claims: (stage, micro-batch) alive on each rank, and the bits of the loss
of the same micro-batches in the same order on one device.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.tiny import tiny_batches, tiny_job

from heptad.axes.pipeline.generate import GENERATORS, claimed_live
from heptad.axes.program import microbatches_of
from heptad.config.schema import Job
from heptad.launch.forked import forked
from heptad.schedule import compute as compute_module
from heptad.schedule.action import Action, Kind
from heptad.schedule.pipeline import peak_live, singles
from heptad.train.step import Trainer

NAMES = tuple(name for name, generator in GENERATORS.items() if not generator.asynchronous)


def jobs_of(pp: int, params: str = "fp64") -> list[Job]:
    """Every schedule on `pp` ranks, with one and with two stages a rank where it takes them."""
    found = []
    for name in NAMES:
        generator = GENERATORS[name]
        if generator.even and pp % 2:
            continue
        for vpp in (1, 2) if generator.any_chunks else (generator.chunks,):
            job = tiny_job({"layers": pp * vpp}, global_batch=2 * pp, pp=pp, vpp=vpp, schedule=name)
            precision = job.precision.model_copy(update={"params": params})
            found.append(job.model_copy(update={"precision": precision}))
    return found


def live(rank: int, jobs: list[Job]) -> list[int]:
    """Per job, the most (stage, micro-batch) of which this rank held something for a backward."""
    compute = compute_module.Step.compute
    peaks = []
    for job in jobs:
        trainer = Trainer(job, rank, torch.device("cpu"))
        stages = trainer.parallel.stages
        assert stages is not None
        counts = [0]

        def counted(step: Any, action: Action, stages: Any = stages, counts: list[int] = counts) -> None:
            compute(step, action)
            counts.append(len({(stages.stage_of(unit), microbatch) for unit, microbatch in step.runs}))

        compute_module.Step.compute = counted  # type: ignore[method-assign]
        trainer.step(1, tiny_batches(job, 0, 1, 1))
        compute_module.Step.compute = compute  # type: ignore[method-assign]
        assert peak_live(stages.schedule)[rank] == max(counts), (job.layout.schedule, rank)
        peaks.append(max(counts))
    return peaks


@pytest.mark.parametrize("pp", [2, 3, 4])
def test_live_activations_of_every_rank_are_the_schedules_claim(pp: int) -> None:
    jobs = jobs_of(pp)
    ranks = forked(pp, live, jobs)
    for at, job in enumerate(jobs):
        layout = job.layout
        claimed = claimed_live(layout.schedule, layout.pp, layout.vpp, microbatches_of(job))
        assert claimed == tuple(peaks[at] for peaks in ranks), (layout.schedule, layout.vpp)


def losses(rank: int, jobs: list[Job]) -> list[tuple[float, list[int]]]:
    """Per job, the first step's loss and the micro-batches whose loss is computed here, in order."""
    found = []
    for job in jobs:
        trainer = Trainer(job, rank, torch.device("cpu"))
        stages = trainer.parallel.stages
        assert stages is not None
        last = stages.schedule.num_stages - 1
        line = singles(stages.schedule.lines[rank])
        order = [a.microbatch for a in line if a.stage == last and a.kind is Kind.FORWARD]
        found.append((trainer.step(1, tiny_batches(job, 0, 1, 1)).loss, order))
    return found


@pytest.mark.parametrize(
    ("pp", "params"),
    [(2, "fp64"), (2, "fp32"), *(pytest.param(4, p, marks=pytest.mark.slow) for p in ("fp64", "fp32"))],
)
def test_the_first_loss_has_the_bits_of_one_device(pp: int, params: str) -> None:
    """One device sums the losses of the micro-batches in the order of the last stage; two last stages have two sums."""
    jobs = jobs_of(pp, params)
    ranks = forked(pp, losses, jobs)
    for at, job in enumerate(jobs):
        off: dict[str, Any] = dict(pp=1, vpp=None, schedule="1f1b")
        alone = Trainer(job.model_copy(update={"layout": job.layout.model_copy(update=off)}), 0, torch.device("cpu"))
        batches = tiny_batches(job, 0, 1, 1)
        outputs = alone.parallel.executor.run(alone.program[:-1], batches)
        orders = [report[at][1] for report in ranks if report[at][1]]
        assert sorted(m for order in orders for m in order) == list(range(len(batches)))
        total = sum(torch.stack([outputs[m] for m in order]).double().sum().item() for order in orders)
        right = total / sum(batch.num_targets() for batch in batches)
        assert {report[at][0] for report in ranks} == {right}, job.layout
        if orders == [list(range(len(batches)))]:
            assert right == alone.step(1, batches).loss
        else:
            assert job.layout.schedule == "dualpipe"
