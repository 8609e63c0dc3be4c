"""Schedules by name: `generate("zbv", 4, None, 8)`, or `file:my.txt` for lines of your own. Pure, no torch.

Each generator is a function of P ranks, V stages a rank and M micro-batches; what it cannot do is refused with the
nearest values that it can (`problems`), and what it keeps alive is claimed by its `live`, which the checker proves. A
file is checked before it is used. Read next: `generators/`, one short file each, then `schedule/pipeline_check.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from heptad.axes.pipeline.generators import (
    dualpipe,
    dualpipev,
    gpipe,
    interleaved,
    naive,
    one_f_one_b,
    pipedream,
    zbh1,
    zbv,
)
from heptad.errors import ConfigError, Problem, nearest
from heptad.schedule.pipeline import Line, Schedule, parse_schedule
from heptad.schedule.pipeline_check import BrokenSchedule, check_schedule


@dataclass(frozen=True, slots=True)
class Generator:
    """What stands behind a name: `lines(P, V, M)`, and `live(P, V, M, rank)`, the chunks alive at most.

    chunks: V where the job names none. any_chunks: it can do every other V too. least: M is at least that many times P.
    even: so are P and M. asynchronous: no flush, weights are stale. split: backwards come as I and W.
    """

    lines: Callable[[int, int, int], tuple[Line, ...]]
    live: Callable[[int, int, int, int], int]
    chunks: int = 1
    any_chunks: bool = False
    least: int = 0
    even: bool = False
    asynchronous: bool = False
    split: bool = False


GENERATORS = {
    "naive": Generator(naive.naive, naive.live, any_chunks=True),
    "gpipe": Generator(gpipe.gpipe, gpipe.live, any_chunks=True),
    "1f1b": Generator(one_f_one_b.one_f_one_b, one_f_one_b.live),
    "interleaved": Generator(interleaved.interleaved, interleaved.live, chunks=2, any_chunks=True),
    "pipedream": Generator(pipedream.pipedream, pipedream.live, asynchronous=True),
    "zbh1": Generator(zbh1.zbh1, zbh1.live, any_chunks=True, split=True),
    "zbv": Generator(zbv.zbv, zbv.live, chunks=2, split=True),
    "dualpipe": Generator(dualpipe.dualpipe, dualpipe.live, least=2, even=True, split=True),
    "dualpipev": Generator(dualpipev.dualpipev, dualpipev.live, chunks=2, least=2, split=True),
}
FILE = "file:"


def generate(name: str, num_ranks: int, chunks: int | None, num_microbatches: int) -> Schedule:
    """The schedule `name` for P ranks, V stages a rank (None: the schedule's own V) and M micro-batches.

    ConfigError names every value that this schedule cannot do. `file:path` reads, checks and returns the lines of a
    file, whose ranks, stages and micro-batches must be those of the job.
    """
    found = list(problems(name, num_ranks, chunks, num_microbatches))
    if found:
        raise ConfigError(*found)
    if name.startswith(FILE):
        return _from_file(name, num_ranks, chunks, num_microbatches)
    generator = GENERATORS[name]
    per_rank = chunks or generator.chunks
    lines = generator.lines(num_ranks, per_rank, num_microbatches)
    return Schedule(name, num_ranks * per_rank, num_microbatches, lines, generator.asynchronous)


def claimed_live(name: str, num_ranks: int, chunks: int | None, num_microbatches: int) -> tuple[int, ...] | None:
    """Per rank, the most chunks (stage, micro-batch) alive at once, as the schedule claims; None for a file."""
    generator = GENERATORS.get(name)
    if generator is None:
        return None
    per_rank = chunks or generator.chunks
    return tuple(generator.live(num_ranks, per_rank, num_microbatches, rank) for rank in range(num_ranks))


def problems(name: str, num_ranks: int, chunks: int | None, num_microbatches: int) -> Iterator[Problem]:
    """Everything that keeps `name` from working with these numbers, each with the nearest numbers that work."""
    for field, value in (("layout.pp", num_ranks), ("layout.vpp", chunks), ("microbatches", num_microbatches)):
        if value is not None and value < 1:
            yield Problem(field, value, "at least one", f"{field} = 1")
    if name.startswith(FILE) or min(num_ranks, 1 if chunks is None else chunks, num_microbatches) < 1:
        return
    generator = GENERATORS.get(name)
    if generator is None:
        close = nearest(name, GENERATORS)
        fix = f'schedule = "{close}"' if close else "one of these names"
        yield Problem("layout.schedule", name, f"one of {', '.join(GENERATORS)}, or {FILE}path", fix)
        return
    if chunks is not None and chunks != generator.chunks and not generator.any_chunks:
        yield Problem("layout.vpp", chunks, _why_chunks(name, generator), _fix_chunks(name, generator, chunks))
    usable = num_ranks
    if generator.even and num_ranks % 2:
        usable, above = max(2, num_ranks - 1), num_ranks + 1
        enough = "" if num_microbatches >= generator.least * above else f" with {generator.least * above} micro-batches"
        fix = f"pp = {usable}" if num_ranks == 1 else f"pp = {usable}, or {above}{enough}"
        yield Problem("layout.pp", num_ranks, f"{name} pairs rank r with rank P-1-r, so pp is even", fix)
    yield from _microbatches(name, generator, usable, num_microbatches)


def _microbatches(name: str, generator: Generator, num_ranks: int, num_microbatches: int) -> Iterator[Problem]:
    least = generator.least * num_ranks
    how = "there are train.global_batch / (train.micro_batch × data ranks)"
    if num_microbatches < least:
        rule = (
            f"{name} needs {generator.least} micro-batches a rank: at least {generator.least} × {num_ranks} = {least}"
        )
        yield Problem("microbatches", num_microbatches, rule, f'{least}, or schedule = "1f1b", which takes any; {how}')
    elif generator.even and num_microbatches % 2:
        near = f"{num_microbatches - 1} or {num_microbatches + 1}"
        rule = f"{name} sends half of the micro-batches from each end, so their number is even"
        yield Problem("microbatches", num_microbatches, rule, f"{near}; {how}")


def _why_chunks(name: str, generator: Generator) -> str:
    if name == "dualpipe":
        return "dualpipe has pp stages, each of them on two ranks: vpp = 1"
    if generator.chunks == 1:
        return f"{name} has one stage a rank: vpp = 1"
    return f"{name} has stages r and 2P-1-r on rank r: vpp = {generator.chunks}"


def _fix_chunks(name: str, generator: Generator, chunks: int) -> str:
    fix = f"vpp = {generator.chunks}, or leave it out"
    if chunks == 1 or name == "pipedream":
        return fix
    other = "dualpipev" if name == "dualpipe" and chunks == 2 else "zbh1" if generator.split else "interleaved"
    return f'{fix}; or schedule = "{other}", which takes vpp = {chunks}'


def _from_file(name: str, num_ranks: int, chunks: int | None, num_microbatches: int) -> Schedule:
    path = Path(name.removeprefix(FILE))
    try:
        schedule = parse_schedule(path.read_text(encoding="utf-8"), name)
        check_schedule(schedule)
    except OSError as error:
        fix = f"the path of a text file, one line a rank, or one of {', '.join(GENERATORS)}"
        raise ConfigError.of("layout.schedule", name, f"the file can be read ({error.strerror})", fix) from None
    except (ValueError, BrokenSchedule) as error:
        raise ConfigError.of("layout.schedule", name, str(error), "a step that is complete, see above") from None
    stages = schedule.num_stages if chunks is None else num_ranks * chunks
    found = (schedule.num_ranks, schedule.num_stages, schedule.num_microbatches)
    if found != (num_ranks, stages, num_microbatches):
        here = "{} ranks, {} stages and {} micro-batches"
        rule = f"the file has {here.format(*found)}, the job {here.format(num_ranks, stages, num_microbatches)}"
        raise ConfigError.of("layout.schedule", name, rule, "the same numbers in both")
    return schedule
