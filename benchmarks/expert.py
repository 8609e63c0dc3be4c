"""Lines of the expert axis: two levels of dispatch against one, a mixture against a dense model, grouped products.

Two levels: two nodes in a box (`netbox.py`), two ranks each, every one with a quarter of the experts; one mixture
forward and backward, whose experts are small, so that rows on the card are what takes time. By rows a token of K
choices crosses K/2 times with one level, and with two once if any of its experts is on the other node. What two levels
send beside rows are choices and gate weights there, and the weights' gradients back. Read next: `turns.py` (what
overlapped pairs hide), `heptad/axes/expert/two_level.py`.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import Any

import torch
from benchmarks.lines import Effort, Row, _Gradients, row_of
from benchmarks.measure import Times, alternate, ratio
from benchmarks.netbox import Netbox
from benchmarks.peers import CPU, Contender, Ours, Size, batch_of, job_of
from benchmarks.ranks import launch
from torch import nn

from heptad.axes.expert.apply import dispatch_over
from heptad.config.schema import Job, LayoutSection, ModelSection
from heptad.mesh.device import Mesh
from heptad.mesh.layout import Layout
from heptad.models.grouped import grouped
from heptad.models.moe import MoE
from heptad.models.resolve import resolve
from heptad.models.spec import complete

RATE = "200mbit"
NODES, PER_NODE = 2, 2
RANKS = NODES * PER_NODE


@dataclass(frozen=True, slots=True)
class Crossing:
    """K of E experts for each of `tokens` of a rank, rows of `width` floats."""

    experts: int = 32
    choices: int = 8
    width: int = 1024
    tokens: int = 256

    @property
    def beside(self) -> float:
        """Over four trips, what travels beside a row ÷ its bytes: int32 choices, fp32 weights and their gradients."""
        return self.choices * (4 + 4 + 4) / (4 * 4 * self.width)

    def crossing(self, rank: int, chosen: torch.Tensor) -> tuple[int, int]:
        """Rows that `rank` sends to the other node in one level and in two, of choices [n, K]."""
        away = chosen // (self.experts // NODES) != rank // PER_NODE
        return int(away.sum()), int(away.any(1).sum())


class Routed:
    """One mixture on this rank, forward and backward; inner: ranks of a node where there are two levels, else 1."""

    def __init__(self, rank: int, crossing: Crossing, inner: int) -> None:
        self.name = "one level" if inner == 1 else "two levels"
        section = complete(
            ModelSection(
                layers=1, width=crossing.width, heads=1, head_dim=8, mlp_width=8, vocab=3,
                experts=crossing.experts, experts_per_token=crossing.choices, expert_width=2,
            )
        )  # fmt: skip
        layout = Layout.of(LayoutSection(dp_shard=RANKS, ep=RANKS, ep_inner=inner))
        mesh = Mesh(layout, rank, [("etp",), ("edp",)], CPU)
        across, etp = mesh.strided("ep", inner), mesh.group("etp")
        self.ledger = mesh.ledger
        self.moe = MoE(section, None, 0, "mixture")
        generator = torch.Generator().manual_seed(0)
        for stack in (self.moe.experts.gate, self.moe.experts.up, self.moe.experts.down):
            assert stack is not None
            stack.weight = nn.Parameter(torch.empty(crossing.experts // RANKS, *stack.weight.shape[1:]))
        for param in self.moe.parameters():
            nn.init.normal_(param, std=0.02, generator=generator)
        self.moe.router.place(CPU, torch.float32)
        two = (mesh.neighbours("ep", inner), etp, across)
        self.moe.dispatch = dispatch_over(across, etp) if inner == 1 else dispatch_over(*two)
        self.batch = batch_of(Size(vocab=3, seq_len=crossing.tokens), rank, 0)
        self.x = torch.randn(1, crossing.tokens, crossing.width, generator=torch.Generator().manual_seed(rank))

    def step(self, number: int) -> float:
        x = self.x.detach().requires_grad_()
        out = self.moe(x, self.batch)
        (dx,) = torch.autograd.grad(out, x, torch.ones_like(out))
        return float(dx.sum())


def levels(rank: int, crossing: Crossing) -> list[Routed]:
    """One level and two; they compute the same."""
    sides = [Routed(rank, crossing, 1), Routed(rank, crossing, PER_NODE)]
    one, two = (side.step(0) for side in sides)
    assert math.isclose(one, two, rel_tol=1e-3, abs_tol=1e-2), (one, two)
    return sides


def _timed(rank: int, crossing: Crossing, rounds: int) -> Times:
    return alternate(levels(rank, crossing), rounds, steps=1, warmup=1)


def sent(rank: int, crossing: Crossing, inner: int, steps: int) -> tuple[int, int]:
    """`steps` steps; rows that cross in one level and in two, of one step's choices."""
    side = Routed(rank, crossing, inner)
    side.moe.router.choices = {}
    for number in range(steps):
        side.step(number)
    return crossing.crossing(rank, side.moe.router.choices.popitem()[1]) if steps else (0, 0)


def _on_card(crossing: Crossing, inner: int, steps: int = 4) -> tuple[float, list[int]]:
    """Of a step, bytes on the first node's card and rows that cross from there in one level and in two; a launch
    without a step tells what starting up costs."""
    with Netbox(NODES, RATE) as box:
        launch(RANKS, sent, crossing, inner, 0, box=box)
        before = box.sent_bytes()[0]
        rows = launch(RANKS, sent, crossing, inner, steps, box=box)[:PER_NODE]
        return (box.sent_bytes()[0] - 2 * before) / steps, [sum(found) for found in zip(*rows, strict=True)]


def two_levels(effort: Effort) -> list[Row]:
    """Bytes on a node's card and time, two levels ÷ one."""
    crossing = Crossing()
    (two, rows), (one, also) = (_on_card(crossing, inner) for inner in (PER_NODE, 1))
    assert rows == also, "the same choices"
    tokens = PER_NODE * crossing.tokens
    predicted = rows[1] / rows[0] * (1 + crossing.beside)
    limit = 1.01 * tokens / rows[0] * (1 + crossing.beside)
    note = (
        f"{two / 1e6:.2f} MB a step against {one / 1e6:.2f} MB; a token has {rows[0] / tokens:.3f} experts on the "
        f"other node and crosses {rows[1] / tokens:.3f} times, by rows {rows[1] / rows[0]:.3f}, with choices and "
        f"weights {predicted:.3f}; limit: one node ÷ those experts, choices and weights, 1 % for frames"
    )
    where = f"K = {crossing.choices} of {crossing.experts} experts, {NODES} nodes × {PER_NODE}, 200 Mbit/s"
    found = [Row(f"bytes on the card, two-level ÷ one-level dispatch, {where}", two / one, limit, note=note)]
    runs = []
    for _ in range(min(2, effort.launches)):
        with Netbox(NODES, RATE) as box:
            runs.append(launch(RANKS, _timed, crossing, 2 * effort.rounds, box=box)[0])
    note = f"{crossing.tokens} tokens a rank, forward and backward; by bytes {predicted:.3f}"
    what = f"time, two-level ÷ one-level dispatch, {where}"
    return [*found, row_of(what, ratio(runs, "two levels", ["one level"]), None, note=note)]


DENSE = Size(layers=4, width=192, heads=6, mlp_width=512, vocab=4096, seq_len=128, sequences=8)
EXPERTS, CHOICES = 8, 2


def mixed(dense: Size) -> Job:
    """The model with mixtures in place of MLPs: the experts of one token are together as wide."""
    job = job_of(dense, 1, 0)
    width = dense.mlp_width // CHOICES
    changes: dict[str, Any] = dict(experts=EXPERTS, experts_per_token=CHOICES, expert_width=width, kv_heads=None)
    given = job.model.model_dump(by_alias=True, exclude_unset=True) | changes
    return resolve(job.model_copy(update={"model": ModelSection.model_validate(given)}))


def _whole(rank: int, size: Size, rounds: int, steps: int) -> Times:
    sides: list[Contender] = [Ours(size, rank, mixed(size), "mixture"), Ours(size, rank, job_of(size, 1, 0), "dense")]
    times = alternate(sides, rounds, steps)
    gradients = [_Gradients(side) for side in sides if isinstance(side, Ours)]
    return times | {f"{name}, gradients": found for name, found in alternate(gradients, rounds, steps).items()}


def against_dense(effort: Effort) -> list[Row]:
    """A step of a mixture ÷ a dense one at equal active FLOPs, 1 rank."""
    runs = [launch(1, _whole, DENSE, effort.rounds, effort.steps)[0] for _ in range(effort.launches)]
    tokens = DENSE.seq_len * DENSE.sequences
    what = f"{CHOICES} of {EXPERTS} experts ÷ dense at equal active FLOPs, 1 rank, {tokens} tokens"
    more = f"{EXPERTS // CHOICES} times the parameters of an MLP to update, smaller products, sorting"
    whole = row_of(f"MoE step, {what}", ratio(runs, "mixture", ["dense"]), None, note=more)
    found = ratio(runs, "mixture, gradients", ["dense, gradients"])
    return [whole, row_of(f"MoE forward and backward, {what}", found, None, note="the same without the update")]


def _cuda_s(work: Any, repeats: int) -> float:
    """Median seconds of `work` on the device."""
    seconds = []
    for _ in range(repeats + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        seconds.append(1e-3 * start.elapsed_time(end))
    return statistics.median(seconds[3:])


def grouped_products(effort: Effort) -> list[Row]:
    """One grouped product ÷ a loop over experts, bf16, on a GPU; sizes of a DeepSeek-V3 block's experts on one of 8."""
    rows, experts, inputs, outputs = [], 32, 7168, 2048
    for each in (32, 256):
        generator = torch.Generator("cuda").manual_seed(0)
        counts = torch.randint(each // 2, 3 * each // 2, (experts,), generator=generator, device="cuda").tolist()
        x = torch.randn(sum(counts), inputs, dtype=torch.bfloat16, device="cuda", generator=generator)
        weights = torch.randn(experts, inputs, outputs, dtype=torch.bfloat16, device="cuda", generator=generator)

        def loop(x: torch.Tensor = x, weights: torch.Tensor = weights, counts: list[int] = counts) -> torch.Tensor:
            return torch.cat([part @ weight for part, weight in zip(x.split(counts), weights, strict=True)])

        def one(x: torch.Tensor = x, weights: torch.Tensor = weights, counts: list[int] = counts) -> torch.Tensor:
            return grouped(x, weights, counts)

        torch.testing.assert_close(one(), loop(), rtol=2e-2, atol=2.0)
        seconds = [_cuda_s(work, 10 * effort.rounds) for work in (one, loop)]
        note = f"{1e6 * seconds[0]:.0f} µs against {1e6 * seconds[1]:.0f} µs; {torch.cuda.get_device_name()}"
        what = f"grouped product ÷ loop, {experts} experts of {inputs} × {outputs}, {each} rows each in the mean, bf16"
        rows.append(Row(what, seconds[0] / seconds[1], note=note))
    return rows


def no_gpu() -> str | None:
    """What keeps this machine from measuring `grouped_products`, or None."""
    return None if torch.cuda.is_available() else "it needs CUDA"
