"""The lines of the context axis: memory and time against length, balance, and its ways against each other and torch's.

Attention alone is what the axis changes, so most lines measure that (`attention.py`), with few heads: 64K tokens take
half a minute on one core. Four ranks share two cores: their times say what total work costs, not what four cores would.
Exponents are slopes of least squares through (log L, log value); their bound is the slope's 95 % interval.
Read next: `attention.py`, `ringlink.py`, `torchcp.py`.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from benchmarks.attention import Case, Counting, Side, alike
from benchmarks.lines import Effort, Row, row_of
from benchmarks.measure import Times, alternate, ratio
from benchmarks.peers import Contender, Ours, Size, batch_of, check, job_of
from benchmarks.ranks import launch
from benchmarks.torchcp import METHODS, TorchRing, refusal

from heptad.axes.context.split import pairs, place
from heptad.mesh.meter import MemoryMeter, everything_alive

LENGTHS = (4096, 8192, 16384, 32768, 65536)
DEGREES = (1, 2, 4)
STEP_LENGTHS = (4096, 8192, 16384)
STEP = Size(layers=2, width=64, heads=2, mlp_width=172, vocab=256, seq_len=8192)
WAYS = Case(4096, heads=4, kv_heads=4)
AGAINST = Case(8192, heads=2, kv_heads=2)
STUDENT = {1: 12.71, 2: 4.30, 3: 3.18}  # two-sided 95 % by degrees of freedom


class Seen(NamedTuple):
    """Of one length: bytes at the peak of the rank that holds most, seconds of the slowest rank."""

    peak_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Slope:
    """Least squares of log y over log x, and the upper end of its 95 % interval (none: two points)."""

    value: float
    upper: float | None

    @classmethod
    def of(cls, x: Sequence[float], y: Sequence[float]) -> Slope:
        """Through at least two points."""
        logs = [math.log(value) for value in x], [math.log(value) for value in y]
        fit = statistics.linear_regression(*logs)
        freedom = len(x) - 2
        if freedom == 0:
            return cls(fit.slope, None)
        rest = sum((b - fit.intercept - fit.slope * a) ** 2 for a, b in zip(*logs, strict=True))
        spread = math.sqrt(rest / freedom / (statistics.pvariance(logs[0]) * len(x)))
        return cls(fit.slope, fit.slope + STUDENT[freedom] * spread)


def _largest(value: float) -> float:
    found = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def attention_seen(rank: int, case: Case, repeats: int) -> Seen:
    """Forward and backward: once under the meter, then `repeats` times on the clock."""
    side = Side(rank, case, "heptad")
    meter = MemoryMeter([*side.leaves, side.dout])
    with meter:
        side.step(0)
    took = []
    for _ in range(repeats):
        dist.barrier()
        start = time.perf_counter()
        side.step(0)
        took.append(_largest(time.perf_counter() - start))
    return Seen(int(_largest(meter.peak_bytes)), statistics.median(took) if took else math.nan)


def sweep(rank: int, lengths: Sequence[int]) -> list[Seen]:
    """Every length, shorter ones more often."""
    return [attention_seen(rank, Case(length), 1 + lengths[-1] // length // 4) for length in lengths]


def step_peak(rank: int, size: Size) -> int:
    """Peak bytes of live storages in a train step of this rank, batch and states of the optimizer included."""
    ours = Ours(size, rank, job_of(size, 1, 0, cp=dist.get_world_size()), reads=0)
    ours.trainer.step(1, [batch_of(size.tokens(64), 0, 1)])
    with MemoryMeter(everything_alive()) as meter:
        ours.step(2)
    return int(_largest(meter.peak_bytes))


def _peak_rows(what: str, lengths: Sequence[int], peaks: dict[int, list[int]], cause: str) -> list[Row]:
    rows = []
    for degree, seen in peaks.items():
        slope = Slope.of(lengths, seen)
        note = ", ".join(f"{length // 1024}K {peak / 1e6:.1f} MB" for length, peak in zip(lengths, seen, strict=True))
        label = f"exponent of the length in peak bytes, {what}, C = {degree}"
        rows.append(Row(label, slope.value, 1.02, slope.upper, note=note))
    for degree in (degree for degree in peaks if degree > 1):
        share = peaks[degree][-1] / peaks[1][-1]
        label = f"C · peak bytes of a rank ÷ peak of one rank without the axis, {what}, C = {degree}"
        note = f"{share:.3f} of it at {lengths[-1] // 1024}K tokens; {cause}"
        rows.append(Row(label, degree * share, note=note))
    return rows


def length(effort: Effort) -> list[Row]:
    """Peak bytes and seconds of attention, and peak bytes of a step, for C = 1, 2, 4."""
    cut = None if effort.launches > 1 else 3
    lengths, step_lengths = LENGTHS[:cut], STEP_LENGTHS[: None if cut is None else 2]
    seen = {degree: launch(degree, sweep, lengths, timeout_s=900.0)[0] for degree in DEGREES}
    own = "one rank saves and returns q, k, v, out and gradients; a ring has buffers for keys and gradients beside them"
    peaks = {degree: [one.peak_bytes for one in found] for degree, found in seen.items()}
    rows = _peak_rows("attention forward + backward", lengths, peaks, own)
    four, eight = (launch(degree, attention_seen, Case(lengths[1]), 0)[0].peak_bytes for degree in (4, 8))
    note = f"{eight / 1e6:.2f} MB against {four / 1e6:.2f} MB, {lengths[1] // 1024}K tokens: buffers no longer grow"
    rows.append(Row("peak bytes of a rank, attention forward + backward, C = 8 ÷ C = 4", eight / four, 0.52, note=note))
    for degree, found in seen.items():
        slope = Slope.of(lengths, [one.seconds for one in found])
        note = ", ".join(f"{n // 1024}K {one.seconds:.2f} s" for n, one in zip(lengths, found, strict=True))
        shared = "; four ranks share two cores" if degree > 2 else ""
        label = f"exponent of the length in seconds, attention forward + backward, C = {degree}"
        rows.append(Row(label, slope.value, None, slope.upper, note=f"{note}{shared}; 2 is its work"))
    for degree in DEGREES[1:]:
        share = seen[degree][-1].seconds / seen[1][-1].seconds
        label = f"seconds ÷ those of one rank, attention of {lengths[-1] // 1024}K tokens, C = {degree}"
        rows.append(Row(label, share, note="two cores allow 0.5"))
    step = {
        degree: [launch(degree, step_peak, STEP.tokens(n), timeout_s=900.0)[0] for n in step_lengths]
        for degree in DEGREES
    }
    whole = "parameters, their states and the batch's numbers are whole on every rank"
    return rows + _peak_rows("a model's step", step_lengths, step, whole)


def _splits(rank: int, size: Size) -> list[Contender]:
    job = job_of(size, 1, 0, cp=dist.get_world_size())
    plain = job.model_copy(update={"layout": job.layout.model_copy(update={"context_split": "contiguous"})})
    return [Ours(size, rank, job, "zigzag", reads=0), Ours(size, rank, plain, "contiguous", reads=0)]


def timed_splits(rank: int, size: Size, rounds: int) -> Times:
    """A model's step in both orders, which are asserted to train alike."""
    contenders = _splits(rank, size)
    check(contenders, steps=1)
    return alternate(contenders, rounds, steps=1, warmup=1)


def splits(effort: Effort) -> list[Row]:
    """Zigzag ÷ contiguous, a step of one causal document."""
    rows = []
    for degree in DEGREES[1:]:
        runs = [launch(degree, timed_splits, STEP, effort.rounds)[0] for _ in range(min(2, effort.launches))]
        note = f"attention alone on as many cores as ranks: {degree / (2 * degree - 1):.2f}"
        if degree > 2:
            note += "; four ranks share two cores, so a rank that waits leaves its core to others"
        what = f"step, zigzag ÷ contiguous, a causal document of {STEP.seq_len} tokens, C = {degree}, loopback"
        rows.append(row_of(what, ratio(runs, "zigzag", ["contiguous"]), None, note=note))
    return rows


def packed(length: int, seed: int) -> tuple[int, ...]:
    """Documents of log-normal lengths (median 665 tokens) that fill a row; the last one is cut off."""
    source, lengths, left = random.Random(seed), list[int](), length
    while left:
        lengths.append(min(left, max(1, round(source.lognormvariate(6.5, 1.2)))))
        left -= lengths[-1]
    return tuple(lengths)


def planned(case: Case, degree: int, split: str = "zigzag") -> float:
    """Busiest ÷ mean by the pure part."""
    seen = pairs(place(case.numbered(), degree, 1, split))
    return float(seen.max() / seen.mean())


def counted(rank: int, cases: Sequence[Case]) -> list[int]:
    """FLOPs of the blocks this rank runs, forward and backward, of each case."""
    found = []
    for case in cases:
        counting = Counting()
        Side(rank, case, "counted", counting).step(0)
        found.append(counting.flops(case))
    return found


def balance(effort: Effort, run: int = 8192, plan: int = 65536) -> list[Row]:
    """FLOPs on the busiest rank ÷ mean, planned for long rows and counted on ranks that run shorter ones."""
    rows = []
    for label, seeds in (("one causal document", (None,)), ("packed documents", range(4))):
        short, long = (
            [Case(n, documents=() if seed is None else packed(n, seed)) for seed in seeds] for n in (run, plan)
        )
        for degree in DEGREES[1:]:
            flops = list(zip(*launch(degree, counted, short), strict=True))  # of each case, of each rank
            ran = [max(ranks) / statistics.mean(ranks) for ranks in flops]
            for value, case in zip(ran, short, strict=True):
                assert math.isclose(value, planned(case, degree), rel_tol=1e-9), (value, case)
            ahead = max(planned(case, degree) for case in long)
            plain = max(planned(case, degree, "contiguous") for case in long)
            note = (
                f"largest of {len(short)} rows; from blocks run, {run} tokens: {max(ran):.6f}, as planned; planned at "
                f"{plan}: {ahead:.6f}, in plain order {plain:.2f}"
            )
            what = f"FLOPs on the busiest rank ÷ mean, {label}, C = {degree}"
            rows.append(Row(what, max(*ran, ahead), 1.02, note=note))
    return rows


def timed_torch(rank: int, case: Case, rounds: int) -> Times:
    """Our ring and torch's, both ways it moves keys."""
    sides = [Side(rank, case, "heptad"), *(TorchRing(rank, case, method) for method in METHODS)]
    alike(sides)
    return alternate(sides, rounds, steps=1, warmup=1)


def against_torch(effort: Effort) -> list[Row]:
    """Ring attention ÷ torch's, where the latter runs."""
    refused = launch(2, refusal)[0]
    note = "torch's context_parallel runs here" if refused is None else f"torch's context_parallel refuses: {refused}"
    note += "; so this is its ring (private) with the CPU's kernel given by hand" if refused else ""
    rows = []
    for degree in DEGREES[1:]:
        runs = [launch(degree, timed_torch, AGAINST, effort.rounds)[0] for _ in range(min(2, effort.launches))]
        what = f"ring attention forward + backward ÷ torch's ring, {AGAINST.length} tokens, C = {degree}, loopback"
        shared = "; four ranks share two cores" if degree > 2 else ""
        rows.append(row_of(what, ratio(runs, "heptad", METHODS), None, note=f"{note}{shared}"))
    return rows


def ways_of(rank: int, case: Case) -> list[Side]:
    """Every way to cut attention over these ranks, the ring first."""
    names = ["ring", "ulysses", "gather", *(["ring+ulysses"] if dist.get_world_size() > 2 else [])]
    inner = {"ring+ulysses": {"cp_ulysses": 2}}
    return [Side(rank, case, name, context=name, **inner.get(name, {})) for name in names]


def timed_ways(rank: int, case: Case, rounds: int) -> Times:
    """All of them, asserted to compute the same."""
    sides = ways_of(rank, case)
    alike(sides)
    return alternate(sides, rounds, steps=1, warmup=1)


def ways(effort: Effort) -> list[Row]:
    """Dealt heads, gathered keys and both ÷ the ring."""
    rows = []
    for degree in DEGREES[1:]:
        runs = [launch(degree, timed_ways, WAYS, effort.rounds)[0] for _ in range(min(2, effort.launches))]
        shared = "four ranks share two cores" if degree > 2 else ""
        for name in list(runs[0])[1:]:
            what = f"attention forward + backward, {name} ÷ ring, {WAYS.length} tokens, C = {degree}, loopback"
            rows.append(row_of(what, ratio(runs, name, ["ring"]), None, note=shared))
    return rows
