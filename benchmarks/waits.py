"""Lines of the table about pipeline schedules in time: every stage's work is a wait of fixed length.

Real ranks, programs, executor, tapes and messages; F, I and W of a stage each sleep for their time, so that two cores
run four ranks as four devices would. What is left is what a runtime can get wrong: the order, what waits for what, and
what it costs to go from one action to the next. The simulator is told how long the waits of a kind took in the mean
(the system wakes a sleeper late) and how long a message does, which the naive schedule shows: there nothing hides it.
A rank idles while it waits for another, has not begun or is done.
Read next: `pipeline.py` (real stages against torch's), `heptad/schedule/executor.py`.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.lines import Effort, Row
from benchmarks.netbox import Netbox
from benchmarks.peers import CPU, Size, batch_of
from benchmarks.ranks import launch
from torch import Tensor, nn

from heptad.axes.pipeline.generate import GENERATORS, generate
from heptad.axes.pipeline.transport import Transport
from heptad.config.schema import LayoutSection
from heptad.mesh.device import Mesh
from heptad.mesh.layout import Layout
from heptad.models.batch import Batch
from heptad.models.build import Model
from heptad.models.layers import Linear
from heptad.models.spec import UnitSpec
from heptad.models.taps import Dys, GradSink
from heptad.schedule.action import COMPUTE, WAIT_OF_TRANSPORT, Action, UnitUse
from heptad.schedule.executor import Executor
from heptad.schedule.expand import Stages, expand
from heptad.schedule.lower import DataRule, lower
from heptad.simulate.pipeline import Simulation, simulate
from heptad.simulate.times import Links, Times
from heptad.trace import Event

SCHEDULES = tuple(name for name, generator in GENERATORS.items() if not generator.asynchronous)
RANKS, MICROBATCHES = 4, (8, 16)
FORWARD_S, INPUT_S, WEIGHT_S = 0.080, 0.080, 0.060
"""Of a rank's whole share of the model; with V stages a rank each takes the V-th part."""
RATE, BYTES_PER_S = "200mbit", 25e6
TRANSFER_S = 0.024
"""What one message holds the slow link."""


@dataclass(frozen=True, slots=True)
class Waits:
    """A pipeline of waits: seconds of one stage, floats that a message carries."""

    schedule: str
    ranks: int
    microbatches: int
    forward_s: float
    input_s: float
    weight_s: float
    message: int = 1

    def stages(self) -> Stages:
        """One unit a stage."""
        schedule = generate(self.schedule, self.ranks, None, self.microbatches)
        return Stages.of(schedule, tuple(range(at, at + 1) for at in range(schedule.num_stages)))

    def simulated(self, bytes_per_s: float | None = None) -> Simulation:
        """The same times in the simulator; messages at no cost, or over links of `bytes_per_s`."""
        schedule = self.stages().schedule
        times = Times.uniform(schedule.num_stages, self.forward_s, self.input_s, self.weight_s)
        seconds = 0.0 if bytes_per_s is None else 4 * self.message / bytes_per_s
        return simulate(schedule, times, Links.uniform(schedule.num_stages, seconds))

    def simulated_as(self, means: dict[str, float], latency_s: float) -> Simulation:
        """With other seconds for a kind of action, by its letter, and for a message."""
        schedule = self.stages().schedule
        forward, whole = means["F"], means.get("B", self.input_s + self.weight_s)
        parts = means.get("I", self.input_s), means.get("W", self.weight_s)
        times = Times.uniform(schedule.num_stages, forward, *parts, b=whole)
        return simulate(schedule, times, Links.uniform(schedule.num_stages, latency_s=latency_s))


def of_rank_times(name: str, ranks: int, microbatches: int, scale: float = 1.0, message: int = 1) -> Waits:
    """Each rank's stages together take FORWARD_S, INPUT_S and WEIGHT_S; `scale` changes them all."""
    part = scale / GENERATORS[name].chunks
    return Waits(name, ranks, microbatches, part * FORWARD_S, part * INPUT_S, part * WEIGHT_S, message)


class _Wait(torch.autograd.Function):
    """A tapped layer whose forward and backward sleep."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, link: Tensor, stage: Stage, sink: GradSink | None) -> Tensor:
        ctx.stage, ctx.sink, ctx.shape = stage, sink, x.shape
        time.sleep(stage.waits.forward_s)
        return x.new_zeros(()) if stage.last else torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        time.sleep(ctx.stage.waits.input_s)
        if ctx.sink is not None:
            ctx.stage.write_weight_grads((), (dy,), ctx.sink)
        dx = dy.new_empty(ctx.shape) if ctx.needs_input_grad[0] else None
        return dx, dy if ctx.sink is None else None, None, None


class Stage(Linear):
    """A stage that waits instead of computing."""

    def __init__(self, waits: Waits, last: bool) -> None:
        super().__init__(1, 1, bias=False)
        self.waits, self.last = waits, last

    def forward(self, x: Tensor | None, batch: Batch | None = None) -> Tensor:
        """A message to a message, or to the sum of losses."""
        assert self.tape is not None
        x = torch.empty(1, self.waits.message) if x is None else x
        link = self.tape.links(self, (), x, torch.Size(()) if self.last else x.shape)[0]
        out: Tensor = _Wait.apply(x, link, self, self.tape.sink)
        return out

    def write_weight_grads(self, saved: tuple[Tensor, ...], dys: Dys, sink: GradSink) -> None:
        """W."""
        time.sleep(self.waits.weight_s)


class _NoData:
    """An engine without a data axis and without gradients."""

    uses_taps = True

    def act(self, action: Action, phase: str) -> None:
        raise AssertionError(f"nothing is gathered or reduced here: {action}")

    def whole(self, unit: nn.Module) -> AbstractContextManager[None]:
        return nullcontext()

    def add_matmul(self, param: nn.Parameter, a: Tensor, b: Tensor) -> None: ...

    def add_rows(self, param: nn.Parameter, rows: Tensor, values: Tensor) -> None: ...

    def add(self, param: nn.Parameter, grad: Tensor) -> None: ...


@dataclass(frozen=True, slots=True)
class Run:
    """One rank's step: when its first compute action began and its last ended, on its host's clock; the seconds of each
    compute action by letter; the seconds between that it waited for another rank."""

    first_s: float
    last_s: float
    computed: dict[str, list[float]]
    waited_s: float


_WAITS = frozenset(WAIT_OF_TRANSPORT.values())


class Pipeline:
    """One rank's program of waits."""

    def __init__(self, rank: int, waits: Waits) -> None:
        stages = waits.stages()
        count = len(stages.units)
        mesh = Mesh(Layout.of(LayoutSection(pp=waits.ranks)), rank, [("pp",)], CPU)
        uses = tuple(UnitUse(f"stage {at}", (), (), ()) for at in range(count))
        units: list[nn.Module] = [Stage(waits, at == count - 1) for at in range(count)]
        specs = tuple(UnitSpec(use.name, "custom", (), ()) for use in uses)
        shape = torch.Size((1, waits.message))
        up, down = mesh.group("pp"), mesh.another("pp")
        transport = Transport(up, down, stages, uses, lambda batch: shape, torch.float32, CPU)
        model = Model(nn.ModuleList(units), units, (), specs)
        self.executor = Executor(model, _NoData(), 0, rank=rank, ledger=mesh.ledger, transport=transport)
        self.program = lower(expand(stages, rank, uses), uses, DataRule("never", "never"))
        self.batches = [batch_of(Size(vocab=3, seq_len=1), 0, at) for at in range(waits.microbatches)]

    def run(self) -> Run:
        """One step, all ranks starting together."""
        dist.barrier()
        events: list[Event] = []
        self.executor.run(self.program, self.batches, update=lambda _: None, record=events)
        kinds = [action.kind for action in self.program]
        work = [at for at, kind in enumerate(kinds) if kind in COMPUTE]
        seconds = [event.end_s - event.start_s for event in events]
        computed: dict[str, list[float]] = defaultdict(list)
        for at in work:
            computed[kinds[at].value].append(seconds[at])
        waited = sum(seconds[at] for at in range(work[0], work[-1]) if kinds[at] in _WAITS)
        return Run(events[work[0]].start_s, events[work[-1]].end_s, dict(computed), waited)


def _runs(rank: int, every: Sequence[Waits], rounds: int) -> list[list[Run]]:
    """`rounds` steps of each in turns, after one of the shortest of each schedule that is not counted."""
    pipelines = [Pipeline(rank, waits) for waits in every]
    least = min(waits.microbatches for waits in every)
    for waits, pipeline in zip(every, pipelines, strict=True):
        if waits.microbatches == least:
            pipeline.run()
    found: list[list[Run]] = [[] for _ in every]
    for _ in range(rounds):
        for at, pipeline in enumerate(pipelines):
            found[at].append(pipeline.run())
    return found


@dataclass(frozen=True, slots=True)
class Seen:
    """One step: seconds from the first action of a rank to the last; shares of ranks × that time."""

    span_s: float
    idle: float
    """Ranks waited for another one, had not begun or were done."""
    own: float
    """The runtime went from one action to the next, posted messages."""
    means: dict[str, float]
    """Seconds of an action by letter."""

    @classmethod
    def of(cls, runs: Sequence[Run]) -> Seen:
        """From all ranks'."""
        first, last = min(run.first_s for run in runs), max(run.last_s for run in runs)
        whole = len(runs) * (last - first)
        idle = sum(run.first_s - first + last - run.last_s + run.waited_s for run in runs) / whole
        every: dict[str, list[float]] = defaultdict(list)
        for run in runs:
            for letter, seconds in run.computed.items():
                every[letter] += seconds
        busy = sum(map(sum, every.values())) / whole
        return cls(last - first, idle, 1 - idle - busy, {letter: fmean(found) for letter, found in every.items()})

    def unhidden_s(self, ranks: int) -> float:
        """Seconds of the step in which no rank computed, where never two do."""
        return self.span_s * (1 - ranks * (1 - self.idle - self.own))


def measured(every: Sequence[Waits], rounds: int, box: Netbox | None = None) -> list[Seen]:
    """For each of `every`, all on equally many ranks, the median step of `rounds` by its time (of two the faster)."""
    seen = launch(every[0].ranks, _runs, every, rounds, box=box, first=True)
    found = []
    for at in range(len(every)):
        steps = [Seen.of(together) for together in zip(*(rank[at] for rank in seen), strict=True)]
        found.append(sorted(steps, key=lambda step: step.span_s)[(len(steps) - 1) // 2])
    return found


def idle_time(effort: Effort) -> list[Row]:
    """Measured idle fraction ÷ simulated, every schedule; and whether schedules stand in the order of theory."""
    every = [of_rank_times(name, RANKS, count) for count in MICROBATCHES for name in SCHEDULES]
    found = dict(zip(every, measured(every, min(2, effort.rounds)), strict=True))
    message_s = median(
        found[waits].unhidden_s(RANKS) / (2 * (RANKS - 1) * waits.microbatches)
        for waits in every
        if waits.schedule == "naive"
    )
    rows = []
    for name in SCHEDULES:
        parts, worst = [], 0.0
        for waits in (waits for waits in every if waits.schedule == name):
            seen = found[waits]
            expected = waits.simulated_as(seen.means, message_s)
            worst = max(worst, abs(seen.idle / expected.idle_fraction - 1))
            parts.append(
                f"M = {waits.microbatches}: {seen.idle:.4f} against {expected.idle_fraction:.4f} (ideal "
                f"{waits.simulated().idle_fraction:.4f}), the runtime's own {seen.own:.4f}"
            )
        what = f"idle fraction of {name}, measured ÷ simulated: away from 1, P = {RANKS}, waits for work"
        rows.append(Row(what, worst, 0.05, note=f"{'; '.join(parts)}; {1e3 * message_s:.2f} ms a message"))
    for count in MICROBATCHES:
        rows.append(_order({waits: seen.span_s for waits, seen in found.items() if waits.microbatches == count}, count))
    return rows


def _order(spans: dict[Waits, float], count: int) -> Row:
    """How many pairs of schedules, 1 % apart in theory, stand the other way round."""
    expected = {waits: waits.simulated().makespan for waits in spans}
    wrong = sum(
        (expected[a] < 0.99 * expected[b] and spans[a] >= spans[b])
        or (expected[b] < 0.99 * expected[a] and spans[b] >= spans[a])
        for a, b in combinations(spans, 2)
    )
    order = ", ".join(f"{w.schedule} {spans[w]:.2f} ({expected[w]:.2f})" for w in sorted(spans, key=spans.__getitem__))
    what = f"pairs of schedules in another order than theory's, P = {RANKS}, M = {count}, waits for work"
    return Row(what, wrong, 0.0, note=f"seconds a step, in brackets as simulated: {order}")


def overlap(effort: Effort) -> list[Row]:
    """A DualPipe step ÷ a 1F1B step at equal parameters a rank, over a slow link.

    A rank of DualPipe on P ranks holds 2/P of the model; so does one of 1F1B on P/2 ranks, where two replicas have half
    the micro-batches each. Summing the twins' gradients costs both the same and is left out of both.
    """
    count, message = 2 * RANKS, int(TRANSFER_S * BYTES_PER_S / 4)
    rows = []
    for slow in (False, True):
        size = message if slow else 1
        dual = of_rank_times("dualpipe", RANKS, count, 0.5, size)
        plain = of_rank_times("1f1b", RANKS // 2, count // 2, 1.0, size)
        spans = []
        for waits in (dual, plain):
            with Netbox(waits.ranks, RATE) if slow else nullcontext() as box:
                spans.append(measured([waits], min(3, effort.rounds), box)[0].span_s)
        speed = BYTES_PER_S if slow else None
        expected = [waits.simulated(speed).makespan for waits in (dual, plain)]
        link = f"{RATE.removesuffix('mbit')} Mbit/s links, {1e3 * TRANSFER_S:.0f} ms a message" if slow else "loopback"
        note = (
            f"{spans[0]:.3f} s against {spans[1]:.3f} s; predicted {expected[0] / expected[1]:.3f}: "
            f"{expected[0]:.3f} s against {expected[1]:.3f} s"
        )
        what = f"DualPipe ÷ 1F1B at equal parameters a rank ({RANKS} ranks, {count} micro-batches), {link}"
        rows.append(Row(what, spans[0] / spans[1], note=note))
    return rows
