"""`make bench`: measure every line of the tables on this machine and write docs/benchmarks.md, a table for each part.

    python -m benchmarks.run                   all parts (half an hour on 2 cores)
    python -m benchmarks.run --part pipeline   one part in one run; the page's other tables stay
    python -m benchmarks.run --only stage3     one line, printed, nothing written; may be given more than once
    python -m benchmarks.run --quick           fewer repetitions: does it run, not how fast it is; nothing written

Lines that need root (a cluster in a box) or a GPU are reported as not measured without it. Exit code 1 when a target is
missed.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path

import torch
from benchmarks.lines import Effort, Row

from benchmarks import context, expert, lines, link, netbox, overlap, pipeline, ringlink, tensor, turns, waits

Lines = dict[str, Callable[[Effort], list[Row]]]
PARTS: dict[str, Lines] = {
    "data": {
        "stage0": lines.stage0,
        "stage3": lines.stage3,
        "slow-link": link.slow_link,
        "hsdp": link.hybrid,
        "memory": lines.memory,
        "wire": link.wire,
    },
    "tensor": {
        "tensor": tensor.against_dtensor,
        "tensor-one-core": tensor.against_one_core,
        "tensor-overlap": overlap.hidden,
        "tensor-memory": tensor.memory,
        "loss-memory": tensor.loss_memory,
    },
    "context": {
        "context-length": context.length,
        "context-order": context.splits,
        "context-balance": context.balance,
        "context-torch": context.against_torch,
        "context-ways": context.ways,
        "context-link": ringlink.over_link,
    },
    "expert": {
        "expert-levels": expert.two_levels,
        "expert-overlap": turns.overlapped,
        "expert-dense": expert.against_dense,
        "expert-grouped": expert.grouped_products,
    },
    "pipeline": {
        "pipeline": pipeline.against_torch,
        "pipeline-idle": waits.idle_time,
        "pipeline-overlap": waits.overlap,
    },
    "step": {
        "whole-step": lines.whole_step,
        "compile": lines.compilation,
        "executor": lines.executor,
        "start-up": lines.start_up,
    },
}
"""A part of the page -> its lines, which are measured together."""
LINES: Lines = {name: measure for part in PARTS.values() for name, measure in part.items()}
NEED_BOX = ("slow-link", "hsdp", "wire", "tensor-overlap", "context-link", "expert-levels", "expert-overlap")
NEED_GPU = ("expert-grouped",)
CAUSES = {
    "stage 0 ÷ torch DDP": (
        "both send the same bytes; a tapped layer costs about 70 µs of Python a step more than a plain one, 3 ms a "
        "rank with this model, and two ranks share a core at 4 ranks"
    ),
    "stage 3 ÷ torch FSDP2, 2 nodes × 2": (
        "the bound two lines below is itself 0.66 of FSDP2's step: with communication half of compute, a step that "
        "hides all of it could not reach 0.65"
    ),
}
"""Beginning of a row's `what` -> why its target is missed where it is, as found by profiling."""
PAGE = Path(__file__).resolve().parent.parent / "docs" / "benchmarks.md"
HEADER = """# Benchmarks

Written by `make bench` (`benchmarks/run.py`); each table is one run, of the day and on the machine named above it.
Contenders run inside the same processes in short turns (A B B A …); a
figure is the median of the turns' ratios over all launches, its bound the upper end of a 95 % bootstrap interval
(`benchmarks/measure.py`). Peers are tuned as their users run them and checked to train the same model
(`benchmarks/peers.py`, `dtensor.py`, `torchpp.py`, `torchcp.py`). Smaller is better everywhere. Heptad runs with its
defaults but for `bucket_mb`: 5 against DDP, 0 (one block a bucket) and `prefetch` 2 over the slow link. These and the
sizes were chosen while looking at results.
Every process keeps the memory it frees, as `heptad train` does on CPU ranks (`launch/ranks.py`): the peers profit too.
"""


def machine() -> str:
    """What the figures were measured on."""
    cpu = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            cpu = line.split(":", 1)[1].strip()
            break
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    system = f"{platform.system()} {platform.release().split('-')[0]}, Python {platform.python_version()}"
    return (
        f"{os.cpu_count()} cores ({cpu}), {system}, torch {torch.__version__}, gloo, fp32, one thread a rank; "
        f"load average at the start {load}."
    )


def cells(row: Row) -> list[str]:
    """A row as the table's cells."""
    holds = {True: "yes", False: "**no**", None: "stated"}[row.holds]
    target = "" if row.limit is None else f"≤ {row.limit:g}{row.unit}"
    if row.upper_limit is not None:
        target += f", bound ≤ {row.upper_limit:g}"
    cause = next((text for start, text in CAUSES.items() if row.what.startswith(start)), "")
    note = f"{row.note}. {cause}" if row.holds is False and cause else row.note
    upper = "" if row.upper is None else f"{row.upper:.3f}"
    return [row.what, f"{row.value:.3f}{row.unit}", upper, target, holds, note]


def table(rows: Sequence[Row]) -> str:
    """Markdown."""
    head = ["what", "figure", "95 % bound", "target", "holds", "behind it"]
    every = [head, ["---"] * len(head), *(cells(row) for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in every)


def measured(names: Sequence[str], effort: Effort) -> tuple[list[Row], str]:
    """Rows of these lines, printed as they come, and what to say about those that cannot be measured here."""
    rows, unmeasured, no_box, no_gpu = [], defaultdict[str, list[str]](list), netbox.missing(), expert.no_gpu()
    for name in names:
        problem = no_box if name in NEED_BOX else no_gpu if name in NEED_GPU else None
        if problem is not None:
            print(f"{name}: not measured: {problem}", file=sys.stderr)
            unmeasured[problem].append(name)
            continue
        start = time.monotonic()
        found = LINES[name](effort)
        print(f"{name}: {time.monotonic() - start:.0f} s", file=sys.stderr)
        for row in found:
            print(" | ".join(cells(row)), flush=True)
        rows += found
    return rows, "".join(f"\nNot measured ({problem}): {', '.join(found)}.\n" for problem, found in unmeasured.items())


def page(before: str, sections: dict[str, str]) -> str:
    """The page with these sections new; those of other parts as they stand in `before`."""
    found = re.split(r"^## (\w+)$\n", before, flags=re.MULTILINE)
    old = dict(zip(found[1::2], found[2::2], strict=True))
    every = {part: sections.get(part, old.get(part)) for part in PARTS}
    return HEADER + "".join(f"\n## {part}\n{text.rstrip()}\n" for part, text in every.items() if text is not None)


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, measure, write; a part is written as soon as it is measured."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", choices=list(LINES), help="measure this line only")
    parser.add_argument("--part", action="append", choices=list(PARTS), help="measure this part of the page only")
    parser.add_argument("--quick", action="store_true", help="few repetitions")
    asked = parser.parse_args(argv)
    effort = Effort(1, 3, 1) if asked.quick else Effort()
    if asked.only:
        rows, _ = measured(asked.only, effort)
        return 1 if any(row.holds is False for row in rows) else 0
    missed = False
    for part in asked.part or PARTS:
        described, began = machine(), time.monotonic()
        rows, missing = measured(list(PARTS[part]), effort)
        missed |= any(row.holds is False for row in rows)
        if asked.quick:
            continue
        minutes = (time.monotonic() - began) / 60
        text = f"\n{date.today()}, {minutes:.0f} minutes; {described}\n\n{table(rows)}\n{missing}"
        PAGE.parent.mkdir(exist_ok=True)
        PAGE.write_text(page(PAGE.read_text(encoding="utf-8") if PAGE.exists() else "", {part: text}), encoding="utf-8")
        print(f"written: {part} in {PAGE}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
