"""`heptad verify`: shrink the job, run its layout on local ranks and on one device, compare, and say who is guilty.

Read next: `shrink.py` (what is run), `reference.py` (what is right), `ranks.py` (what is tested), `compare.py`
(bounds), `localise.py` (who is guilty), `faults.py` (the proof that this catches something), `report.py`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from heptad.config.context import in_words
from heptad.config.schema import Job
from heptad.launch.forked import RankFailed
from heptad.loader.prepare import PreparedData
from heptad.loader.synthetic import synthetic
from heptad.verify.compare import Comparison, compare
from heptad.verify.fault import Fault
from heptad.verify.faults import parse
from heptad.verify.localise import Blame, first_module, guilty
from heptad.verify.ranks import RankReport, run_layout
from heptad.verify.report import as_json_line, as_text
from heptad.verify.shrink import Shrunk, shrink
from heptad.verify.stale import reference_of

TIMEOUT_S, FULL_TIMEOUT_S = 120.0, 3600.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """What `verify` found. `failure`: a rank raised, so there is nothing to compare (`comparison` is None then)."""

    job: Job
    steps: int
    notes: tuple[str, ...]
    faults: tuple[str, ...]
    comparison: Comparison | None
    failure: str | None
    module: str | None
    blame: Blame | None
    resident_bytes: int
    peak_bytes: int

    @property
    def ok(self) -> bool:
        """Whether the layout computes what one device computes and sends what was predicted."""
        return self.comparison is not None and self.comparison.ok


def verify(job: Job, steps: int = 3, full: bool = False, inject: Sequence[str] = (), as_json: bool = False) -> int:
    """The verb: prints the result on stdout, returns 0 when everything agrees, 1 when not. Raises ConfigError."""
    shrunk = shrink(job, steps, full)
    verdict = examine(shrunk, steps, inject, FULL_TIMEOUT_S if full else TIMEOUT_S, metered=True)
    print(as_json_line(verdict) if as_json else as_text(verdict))
    return 0 if verdict.ok else 1


def examine(
    shrunk: Shrunk,
    steps: int,
    inject: Sequence[str] = (),
    timeout_s: float = TIMEOUT_S,
    localise: bool = True,
    metered: bool = False,
) -> Verdict:
    """Run and compare the job as it is (`shrink` first); on a difference, find the module and the guilty axis.

    localise False: no runs with axes turned off. metered: see `ranks.run_layout`.
    """
    job = shrunk.job
    faults = parse(tuple(inject), job, steps)
    tokens = synthetic(job)
    for note in shrunk.notes:
        print(note, file=sys.stderr)
    start = time.monotonic()
    comparison, reports, failure = attempt(job, tokens, steps, faults, timeout_s, metered)
    print(f"ran {job_line(job)}: {steps} steps in {time.monotonic() - start:.1f} s", file=sys.stderr)
    wrong = comparison is None or bool(comparison.differences)
    blame = None
    if wrong and localise:

        def heals(variant: Job) -> bool:
            other, _, _ = attempt(variant, tokens, steps, faults, timeout_s)
            return other is not None and not other.differences

        blame = guilty(job, heals)
    resident = max((report.resident_bytes for report in reports), default=0)
    peak = max((report.peak_bytes for report in reports), default=0)
    names = tuple(map(str, faults))
    module = None if comparison is None else first_module(comparison)
    return Verdict(job, steps, shrunk.notes, names, comparison, failure, module, blame, resident, peak)


def attempt(
    job: Job,
    tokens: PreparedData,
    steps: int,
    faults: Sequence[Fault] = (),
    timeout_s: float = TIMEOUT_S,
    metered: bool = False,
) -> tuple[Comparison | None, list[RankReport], str | None]:
    """One run of a layout against a fresh reference; without a comparison when a rank failed (then its report).

    Raises ConfigError, before a process starts, for a model class that cannot be used.
    """
    reference = reference_of(job, tokens)
    try:
        reports = run_layout(job, tokens, steps, faults, timeout_s, metered)
    except RankFailed as error:
        return None, [], str(error)
    return compare(job, reference, reports, steps), reports, None


def job_line(job: Job) -> str:
    """The layout and what else of the job is a policy, in a few words."""
    layout, train, model = job.layout, job.train, job.model
    ranks = layout.dp_replicate * layout.dp_shard
    words = [f"zero {layout.zero}", f"dp_replicate {layout.dp_replicate}", f"dp_shard {layout.dp_shard}"]
    cut = ", ".join(name for name in ("sequence_parallel", "keep_gathered") if getattr(layout, name))
    words += [f"cp {layout.cp} ({in_words(layout)})"] if layout.cp > 1 else []
    words += [f"tp {layout.tp}" + (f" ({cut})" if cut else ""), f"engine {layout.engine}"]
    if layout.pp > 1:
        words.append(f"pp {layout.pp} ({layout.schedule}" + (f", vpp {layout.vpp})" if layout.vpp else ")"))
    words += [f"{train.global_batch // (ranks * train.micro_batch)} micro-batches", f"recompute {job.recompute.mode}"]
    words += [f"activations on {job.offload.activations}"] if job.offload.activations != "none" else []
    words += [f"{model.attention} attention"] if model.attention != "auto" else []
    words += ["compiled"] if train.compile else []
    return ", ".join([*words, job.precision.params])
