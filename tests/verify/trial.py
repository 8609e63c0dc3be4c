"""Items of `everything.py` run against one device: several of as many ranks one after the other in the same processes.

    python -m tests.verify.trial pp=2 schedule=zbv zero=3 ...    # one item, from the line that a failing test prints

prints what differs, and the same job as a call of `heptad verify`.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import count

import numpy as np
import torch
from tests.verify.everything import item_of, job_of, line_of, ranks_of
from tests.verify.several import Case, Item, _several

from heptad.config.schema import Job
from heptad.config.write import toml_value
from heptad.launch.forked import RankFailed, forked
from heptad.loader.loader import Loader
from heptad.loader.prepare import PreparedData
from heptad.loader.store import Tokens
from heptad.loader.synthetic import synthetic
from heptad.verify.compare import compare
from heptad.verify.ranks import RankReport
from heptad.verify.stale import reference_of

STEPS, TIMEOUT_S = 2, 300.0


def one_document(data: PreparedData) -> PreparedData:
    """Every row is a piece of one long document."""
    (source,) = data.sources
    number = source.train.num_tokens
    ids, targets = source.train.ids(0, number), source.train.may_be_target(0, number)
    whole = Tokens.from_arrays(ids, np.array([number]), targets)
    return replace(data, sources=(replace(source, train=whole),))


def case_of(item: Item, params: str = "fp64") -> Case:
    """The job and its tokens, of the first data seed with which each step has a target (a step without is skipped)."""
    job = job_of(item)
    job = job.model_copy(update={"precision": job.precision.model_copy(update={"params": params})})
    for seed in count():
        job = job.model_copy(update={"data": job.data.model_copy(update={"seed": seed})})
        data = synthetic(job)
        data = one_document(data) if item["sight"] in ("causal", "window") else data
        loader = Loader(job, 0, 1, data)
        if all(any(batch.num_targets() for batch in loader.step(step)) for step in range(STEPS)):
            break
    return job, data


def outcomes(items: Sequence[Item], seconds: list[float] | None = None, params: str = "fp64") -> dict[str, str]:
    """Line of each item -> what is wrong, "" where everything is right. All of as many ranks.

    If a rank fails, the items are run one by one, so that the others are known too. seconds: of each item, appended.
    """
    torch.set_num_threads(1)  # ranks share the cores, and so does whoever compares
    cases = [case_of(item, params) for item in items]
    if any(item["recompute"] == "selective" for item in items):
        importlib.import_module("torch._dynamo")  # once here, or for two seconds on each rank
    start = time.monotonic()
    try:
        ranks = forked(ranks_of(items[0]), _several, cases, STEPS, timeout_s=TIMEOUT_S)
        failure = ""
    except RankFailed as error:
        failure = str(error)
    if failure and len(items) == 1:
        return {line_of(items[0]): failure}
    if failure:
        return {line: wrong for item in items for line, wrong in outcomes([item], seconds, params).items()}
    found = {}
    for at, (item, case) in enumerate(zip(items, cases, strict=True)):
        found[line_of(item)] = wrong_of(case, [reports[at] for reports in ranks])
    if seconds is not None:
        seconds += [(time.monotonic() - start) / len(items)] * len(items)
    return found


def wrong_of(case: Case, reports: Sequence[RankReport]) -> str:
    """What of a job's run differs from one device, or from the predicted traffic."""
    job, tokens = case
    try:
        found = compare(job, reference_of(job, tokens), reports, STEPS)
    except AssertionError as error:  # pieces that do not make wholes
        return f"assertion: {error}"
    if found.differences:
        return f"{len(found.differences)} differences: " + "; ".join(map(str, found.differences[:3]))
    if not found.traffic_matches:
        keys = sorted(found.predicted.keys() | found.counted.keys())
        pairs = {key: (found.predicted.get(key), found.counted.get(key)) for key in keys}
        return "traffic (predicted, counted): " + str({k: pair for k, pair in pairs.items() if pair[0] != pair[1]})
    return ""


def assert_right(items: Sequence[Item], params: str = "fp64") -> None:
    """All of them, or a message that has the line of each that is not."""
    wrong = {line: text for line, text in outcomes(items, params=params).items() if text}
    said = "" if params == "fp64" else f"--params={params} "
    assert not wrong, "\n".join(
        f"python -m tests.verify.trial {said}{line}\n    {text}" for line, text in wrong.items()
    )


def as_verify(job: Job) -> str:
    """A call of `heptad verify` that runs the job (on `synthetic`'s tokens)."""
    empty, words = Job(), ["heptad", "verify", "/dev/null", "--full", f"--steps={STEPS}"]
    for section in Job.model_fields:
        for name in type(getattr(job, section)).model_fields:
            value, default = getattr(getattr(job, section), name), getattr(getattr(empty, section), name)
            if value != default:
                words.append(f"--set '{section}.{name}={toml_value(value)}'")
    return " ".join(words)


def main(words: Sequence[str]) -> int:
    """Run one item; 1 where something is wrong. A word --params=bf16 runs it in that precision."""
    said = [word for word in words if word.startswith("--params=")]
    item, params = item_of(" ".join(word for word in words if word not in said)), "".join(said)[9:] or "fp64"
    print(as_verify(case_of(item, params)[0]))
    ((_, wrong),) = outcomes([item], params=params).items()
    print(wrong or "right")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
