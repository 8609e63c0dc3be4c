"""What overlapped pairs hide: a DualPipe step ÷ the same one with its units one after the other, over a slow link.

The real step, dispatch and transfers of a small mixture of experts, P = 2 and two expert ranks, each of the four ranks
on a node of its own in a box (`netbox.py`); but core attention and experts also sleep for fixed times, so that two
cores run four ranks as four devices would (as in `waits.py`; of ranks that share cores, one computes while another
waits, overlapped or not). A sleep is 1.1 times what one all-to-all takes by its bytes, so in a pair, whose stretches
are of one and two sleeps, each of the four transfers of two units could hide. Without turns nothing of them does.

The prediction is the simulator's: a pair saves four transfers a block, other actions wait for theirs; messages between
stages have the link to themselves. Read next: `waits.py`, `heptad/mesh/turns.py`, `heptad/schedule/expand.py`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import torch
from benchmarks.lines import Effort, Row, row_of
from benchmarks.measure import Times, alternate, ratio
from benchmarks.netbox import Netbox
from benchmarks.peers import CPU, Contender, Size, batch_of, check
from benchmarks.ranks import launch
from torch import Tensor

from heptad.axes.pipeline.generate import generate
from heptad.config.schema import DataSection, Job, LayoutSection, ModelSection, PrecisionSection, TrainSection
from heptad.models.moe import MoE
from heptad.models.resolve import resolve
from heptad.simulate import times as stage_times
from heptad.simulate.pipeline import PairMode, simulate
from heptad.simulate.times import Links
from heptad.train.step import Trainer

RATE, BYTES_PER_S = "200mbit", 25e6
EP, PP = 2, 2


@dataclass(frozen=True, slots=True)
class Mixture:
    """A model whose blocks are all mixtures, and its step: `microbatches` of `tokens` a rank. Little is computed."""

    layers: int = 6
    width: int = 256
    experts: int = 8
    choices: int = 4
    tokens: int = 256
    microbatches: int = 12
    sleep: float = 1.1
    """Of a forward's attention, and of its experts, ÷ the time of one all-to-all; backwards sleep twice as long."""

    @property
    def travel_s(self) -> float:
        """One all-to-all of a rank: the rows that leave it, of even choices."""
        return 4 * self.width * self.tokens * self.choices * (EP - 1) / EP / BYTES_PER_S

    @property
    def sleep_s(self) -> float:
        """Of attention, and of experts, in a forward."""
        return self.sleep * self.travel_s

    def job(self) -> Job:
        """Stage 0, both data ranks of a stage with half of its experts."""
        return resolve(
            Job(
                model=ModelSection(
                    layers=self.layers, width=self.width, heads=1, head_dim=8, mlp_width=8, vocab=64,
                    experts=self.experts, experts_per_token=self.choices, expert_width=8,
                ),
                layout=LayoutSection(zero=0, pp=PP, dp_shard=EP, ep=EP, schedule="dualpipe"),
                precision=PrecisionSection(params="fp32"),
                data=DataSection(seq_len=self.tokens),
                train=TrainSection(global_batch=EP * self.microbatches, micro_batch=1, steps=100_000),
            )
        )  # fmt: skip

    def predicted_s(self, overlapped: bool) -> float:
        """Seconds of a step without its update, in the simulator."""
        schedule = generate("dualpipe", PP, None, self.microbatches)
        blocks, sleep, travel = self.layers / schedule.num_stages, self.sleep_s, self.travel_s
        forward, backward = blocks * (2 * sleep + 2 * travel), blocks * (4 * sleep + 2 * travel)
        hidden = blocks * 4 * travel if overlapped else 0.0
        every = [[seconds] * schedule.num_stages for seconds in (forward, backward, 0.0)]
        message_s = 4 * self.width * self.tokens / BYTES_PER_S
        links, mode = Links.uniform(schedule.num_stages, message_s), PairMode.BLOCK if overlapped else PairMode.EARLY
        return simulate(schedule, stage_times.Times.stages(*every, hidden_s=hidden), links, mode).makespan


class _Sleeps(torch.autograd.Function):
    """x -> x, after `seconds`; backward after twice as many."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return dy, None


def _slower(module: Any, seconds: float) -> None:
    forward = module.forward
    module.forward = lambda *inputs: _Sleeps.apply(forward(*inputs), seconds)


class Dual:
    """A rank's whole step; `turns` False: units of a pair one after the other."""

    def __init__(self, rank: int, mixture: Mixture, turns: bool) -> None:
        self.name = "in turns" if turns else "one by one"
        self.trainer = Trainer(mixture.job(), rank, CPU)
        parallel = self.trainer.parallel
        assert parallel.stages is not None and parallel.stages.giving
        if not turns:
            stages = replace(parallel.stages, giving=frozenset())
            self.trainer.parallel = replace(parallel, stages=stages)
            self.trainer.program = self.trainer.parallel.program(mixture.microbatches)
        for module in parallel.model.module.modules():
            block: Any = module
            if isinstance(getattr(block, "mlp", None), MoE):
                _slower(block.attention, mixture.sleep_s)
                _slower(block.mlp.experts, mixture.sleep_s)
        size = Size(vocab=64, seq_len=mixture.tokens)
        data = self.trainer.mesh.layout.coords(rank)["dp_shard"]
        self.batches = [batch_of(size, data, at) for at in range(mixture.microbatches)]

    def step(self, number: int) -> float:
        return self.trainer.step(number, [replace(batch, step=number) for batch in self.batches]).loss


def both(rank: int, mixture: Mixture) -> list[Contender]:
    """Both forms of the step; they train alike."""
    sides: list[Contender] = [Dual(rank, mixture, turns) for turns in (True, False)]
    check(sides, steps=1, tolerance=0.0)
    return sides


def _timed(rank: int, mixture: Mixture, rounds: int) -> Times:
    return alternate(both(rank, mixture), rounds, steps=1, warmup=1)


def overlapped(effort: Effort) -> list[Row]:
    """In turns ÷ one by one, four nodes."""
    mixture, runs = Mixture(), list[Times]()
    for _ in range(min(2, effort.launches)):
        with Netbox(EP * PP, RATE) as box:
            runs.append(launch(EP * PP, _timed, mixture, effort.rounds, box=box, first=True)[0])
    seconds = [mixture.predicted_s(turns) for turns in (True, False)]
    note = (
        f"{mixture.microbatches} micro-batches of {mixture.tokens} tokens, an all-to-all {1e3 * mixture.travel_s:.0f} "
        f"ms, a forward's unit sleeps {2e3 * mixture.sleep_s:.0f}; predicted {seconds[0] / seconds[1]:.3f}: "
        f"{1e3 * seconds[0]:.0f} ms against {1e3 * seconds[1]:.0f} ms"
    )
    what = (
        "DualPipe with overlapped all-to-all ÷ without, P = 2, 2 expert ranks, 4 nodes × 1, 200 Mbit/s, waits for work"
    )
    return [row_of(what, ratio(runs, "in turns", ["one by one"]), 0.85, note=note)]
