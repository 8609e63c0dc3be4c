"""Paired timing and what it proves: short blocks of each contender in turn, medians, a bound of the ratio.

Machines drift (other processes, clocks, caches), so contenders run inside the same ranks, A B A B …, every block
between barriers; a pair's ratio compares neighbours in time. The figure is the median of the pairs' ratios over
several launches (a launch fixes memory layout and process placement); its upper bound is the 97.5th percentile of a
bootstrap of that median which resamples launches first and pairs inside them. Pure arithmetic but for `alternate`.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from benchmarks.peers import Contender

Times = dict[str, list[float]]
"""Seconds a step of each block, by contender; as long for each."""


def alternate(contenders: Sequence[Contender], rounds: int, steps: int, warmup: int = 2) -> Times:
    """Seconds a step (the slowest rank's) of `rounds` blocks of `steps` steps for each contender, interleaved."""
    number = {contender.name: 100 for contender in contenders}
    times: Times = {contender.name: [] for contender in contenders}
    for at in range(-1, rounds):
        order = contenders if at % 2 == 0 else list(reversed(contenders))
        for contender in order:
            dist.barrier()
            start = time.perf_counter()
            for _ in range(steps if at >= 0 else warmup):
                number[contender.name] += 1
                contender.step(number[contender.name])
            if at >= 0:
                times[contender.name].append((time.perf_counter() - start) / steps)
    for name in times:
        slowest = torch.tensor(times[name], dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        times[name] = slowest.tolist()
    return times


@dataclass(frozen=True, slots=True)
class Ratio:
    """Median of ours ÷ theirs, the upper end of its 95 % interval, and the medians in seconds behind it."""

    value: float
    upper: float
    ours_s: float
    theirs_s: float
    num_pairs: int


def ratio(launches: Sequence[Times], ours: str, theirs: Sequence[str], seed: int = 0) -> Ratio:
    """Ours against the best of `theirs` (the one with the least median over all launches)."""
    medians = {name: statistics.median(t for times in launches for t in times[name]) for name in theirs}
    best = min(medians, key=lambda name: medians[name])
    pairs = [[a / b for a, b in zip(times[ours], times[best], strict=True)] for times in launches]
    every = [value for launch in pairs for value in launch]
    ours_s = statistics.median(t for times in launches for t in times[ours])
    return Ratio(statistics.median(every), upper_bound(pairs, seed), ours_s, medians[best], len(every))


def upper_bound(groups: Sequence[Sequence[float]], seed: int = 0, draws: int = 2000) -> float:
    """97.5th percentile of the bootstrapped median of all values, groups resampled first, then values inside them."""
    source = random.Random(seed)
    medians = []
    for _ in range(draws):
        chosen = source.choices(groups, k=len(groups))
        medians.append(statistics.median(v for group in chosen for v in source.choices(group, k=len(group))))
    return sorted(medians)[int(0.975 * draws)]
