"""What `heptad timeline` shows of pipeline schedules: read the options, simulate, print or draw.

With --compare the times given are those of 1/P of the model; a schedule with V stages a rank has V times as many, each
1/V as long, so that all pictures show the same model. Read next: `simulate/pipeline.py`, `report/pipeline.py`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from heptad.axes.pipeline.formulas import FORMULAS, Chunk
from heptad.axes.pipeline.generate import FILE, generate
from heptad.errors import ConfigError, Problem
from heptad.report.panel import Panel
from heptad.report.pipeline import pipeline_svg
from heptad.schedule.pipeline import Pair, Schedule, format_schedule, parse_schedule
from heptad.simulate.pipeline import PairMode, SendMode, Simulation, simulate
from heptad.simulate.times import Links, Times


@dataclass(frozen=True, slots=True)
class Wanted:
    """The options as given; `seconds` holds those of f, i, w, b, fb, comm and latency that were."""

    schedule: str | None
    compare: str | None
    num_ranks: int | None
    chunks: int | None
    num_microbatches: int | None
    seconds: Mapping[str, float]
    pairs: str | None
    rendezvous: bool

    @property
    def names(self) -> list[str]:
        """The schedules, in the order given."""
        return (
            [self.schedule] if self.schedule is not None else [word.strip() for word in (self.compare or "").split(",")]
        )

    @property
    def chunk(self) -> Chunk:
        """The times of one stage, or of 1/P of the model."""
        f, i, w = (self.seconds.get(name, 1.0) for name in "fiw")
        b = self.seconds.get("b", i + w)
        return Chunk(f, i, w, b, self.seconds.get("fb", f + b))

    @property
    def mode(self) -> PairMode:
        """Of pairs; a rendezvous runs them as one block."""
        return PairMode(self.pairs or "block")


def show(wanted: Wanted, actions: bool, as_json: bool, output: str | None) -> None:
    """Print what was asked for; without --actions, --json and -o, the numbers as text. ConfigError as everywhere."""
    found = list(_problems(wanted, output))
    if found:
        raise ConfigError(*found)
    schedules = [_schedule(name, wanted) for name in wanted.names]
    _refuse_unused(wanted, schedules)
    runs = [_run(schedule, wanted) for schedule in schedules]
    if output is not None:
        Path(output).write_text(_picture(runs, wanted), encoding="utf-8")
    if as_json:
        entries = [_numbers(run, actions) for run in runs]
        print(json.dumps(entries[0] if wanted.compare is None else {"schedules": entries}))
    elif actions:
        heads = [""] if wanted.compare is None else [f"# {schedule.name}\n" for schedule in schedules]
        print("\n".join(head + format_schedule(schedule) for head, schedule in zip(heads, schedules, strict=True)))
    else:
        print("\n".join(_summary(run, wanted) for run in runs))


def _problems(wanted: Wanted, output: str | None) -> list[Problem]:
    found = []
    if wanted.schedule is not None and wanted.compare is not None:
        fix = "name them all in --compare, or leave out one option"
        found.append(Problem("--schedule", wanted.schedule, "either one schedule or several", fix))
    named = [name for name in wanted.names if not name.startswith(FILE)]
    for option, count in (("--pp", wanted.num_ranks), ("--microbatches", wanted.num_microbatches)):
        if named and count is None:
            found.append(Problem(option, None, f"{named[0]} is made for P ranks and M micro-batches", f"{option} 8"))
    for name, value in wanted.seconds.items():
        if not (math.isfinite(value) and value >= 0):
            found.append(Problem(f"--{name}", value, "a time is finite and not negative", f"--{name} 1"))
    at = wanted.chunk
    if not found and at.f + at.i + at.w + at.b <= 0:
        found.append(Problem("--f", at.f, "something takes time", "--f 1"))
    if not found and not max(at.f, at.b, at.f + at.b - min(at.f, at.b, at.i)) <= at.pair <= at.f + at.b:
        low, high = max(at.f, at.b, at.f + at.b - min(at.f, at.b, at.i)), at.f + at.b
        rule = f"a pair takes as long as its longer side at least, and as both at most: {low:g} to {high:g}"
        found.append(Problem("--fb", at.pair, rule, f"--fb {high:g}"))
    if wanted.pairs not in (None, "block", "early"):
        found.append(Problem("--pairs", wanted.pairs, "block or early", "--pairs block"))
    elif wanted.rendezvous and wanted.pairs == "early":
        found.append(Problem("--pairs", "early", "under --rendezvous a pair waits for both inputs", "--pairs block"))
    if output is not None and (not Path(output).parent.is_dir() or Path(output).is_dir()):
        found.append(Problem("-o", output, "a file in a folder that exists", "-o schedule.svg"))
    return found


def _schedule(name: str, wanted: Wanted) -> Schedule:
    """The schedule by name, or the file's, whose own numbers hold where none are given."""
    ranks, microbatches = wanted.num_ranks, wanted.num_microbatches
    if name.startswith(FILE):
        try:
            own = parse_schedule(Path(name.removeprefix(FILE)).read_text(encoding="utf-8"), name)
            ranks, microbatches = ranks or own.num_ranks, microbatches or own.num_microbatches
        except (OSError, ValueError):
            ranks, microbatches = ranks or 1, microbatches or 1  # refused below, with the reason
    assert ranks is not None and microbatches is not None
    chunks = None if wanted.compare is not None and name != "interleaved" else wanted.chunks
    return generate(name, ranks, chunks, microbatches)


def _refuse_unused(wanted: Wanted, schedules: list[Schedule]) -> None:
    """An option without effect is an error."""
    paired = any(map(_paired, schedules))
    for option, value in (("--pairs", wanted.pairs), ("--fb", wanted.seconds.get("fb"))):
        if value is not None and not paired:
            rule = f"no effect: nothing overlaps in {', '.join(schedule.name for schedule in schedules)}"
            raise ConfigError.of(option, value, rule, f"leave out {option}, or --schedule dualpipe")
    if wanted.compare is not None and wanted.chunks is not None and "interleaved" not in wanted.names:
        rule = "no effect: with --compare it is interleaved's number of stages a rank"
        raise ConfigError.of("--vpp", wanted.chunks, rule, "leave out --vpp, or compare interleaved too")


def _chunks(schedule: Schedule) -> int:
    """V."""
    return max(1, schedule.num_stages // schedule.num_ranks)


def _paired(schedule: Schedule) -> bool:
    return any(isinstance(step, Pair) for line in schedule.lines for step in line)


def _run(schedule: Schedule, wanted: Wanted) -> Simulation:
    at = _chunk(schedule, wanted)
    times = Times.uniform(schedule.num_stages, at.f, at.i, at.w, at.b, at.pair)
    links = Links.uniform(schedule.num_stages, wanted.seconds.get("comm", 0.0), wanted.seconds.get("latency", 0.0))
    sends = SendMode.RENDEZVOUS if wanted.rendezvous else SendMode.POSTED
    return simulate(schedule, times, links, wanted.mode, sends)


def _chunk(schedule: Schedule, wanted: Wanted) -> Chunk:
    """Times of one stage."""
    part, at = 1 if wanted.compare is None else _chunks(schedule), wanted.chunk
    return Chunk(at.f / part, at.i / part, at.w / part, at.b / part, at.pair / part)


def _numbers(run: Simulation, actions: bool) -> dict[str, object]:
    """What --json prints: `idle` and `peak_live` by rank; with --actions the lines too."""
    schedule = run.schedule
    lines = {"actions": format_schedule(schedule).splitlines()} if actions else {}
    return {
        "schedule": schedule.name,
        "ranks": schedule.num_ranks,
        "stages": schedule.num_stages,
        "microbatches": schedule.num_microbatches,
        "makespan": run.makespan,
        "idle_fraction": run.idle_fraction,
        "idle": list(run.idle),
        "peak_live": list(run.peak_live),
        **lines,
    }


def _summary(run: Simulation, wanted: Wanted) -> str:
    schedule = run.schedule
    return "\n".join(
        [
            f"{schedule.name}: {schedule.num_ranks} ranks, {schedule.num_stages} stages, "
            f"{schedule.num_microbatches} micro-batches, {run.makespan:g} long",
            *(f"  {line}" for line in _notes(run, wanted)),
            f"  live at most, by rank: {' '.join(map(str, run.peak_live))}",
        ]
    )


def _notes(run: Simulation, wanted: Wanted) -> list[str]:
    """Idle time beside the formula."""
    low, high = min(run.idle), max(run.idle)
    each = f"{high:.6g}" if math.isclose(low, high, abs_tol=1e-9) else f"{low:.6g} to {high:.6g}"
    notes = [f"idle {run.idle_fraction:.1%}: {each} of {run.makespan:.6g} on each rank"]
    schedule, formula = run.schedule, FORMULAS.get(run.schedule.name)
    if formula is not None:
        chunks, at = _chunks(schedule), _chunk(schedule, wanted)
        idle = formula.idle_s(schedule.num_ranks, chunks, schedule.num_microbatches, at)
        free = not (wanted.seconds.get("comm") or wanted.seconds.get("latency"))
        whole = wanted.mode is PairMode.BLOCK or not _paired(schedule)
        exact = free and whole and formula.exact(schedule.num_ranks, chunks, schedule.num_microbatches, at)
        range_ = "exact here" if exact else f"exact for {formula.where}, messages that take no time"
        notes.append(f"formula {formula.text} = {idle:.6g}, {range_}")
    return notes


def _picture(runs: list[Simulation], wanted: Wanted) -> str:
    at, first = wanted.chunk, runs[0].schedule
    part = "" if wanted.compare is None else ", for 1/P of the model"
    times = f"F {at.f:g}, I {at.i:g}, W {at.w:g}, B {at.b:g}"
    if any(_paired(run.schedule) for run in runs):
        times += f", F&B {at.pair:g}"
    times += "".join(f", {name} {wanted.seconds[name]:g}" for name in ("comm", "latency") if name in wanted.seconds)
    size = f"{first.num_ranks} ranks, {first.num_microbatches} micro-batches"
    panels = [Panel.simulated(run, run.schedule.name, "; ".join(_notes(run, wanted))) for run in runs]
    return pipeline_svg(panels, f"{size} ({times}{part})", "time, in the unit of F")
