"""How far a run is, kept in samples: what a checkpoint saves of the loader, and what a resume makes of it.

The state is one small JSON object, the same on every rank: steps done, samples consumed (unique ones, however many
tensor or pipeline peers read the same batch, C-140), samples consumed of each source, and what must not change (seed,
shuffle, number and content of samples). It holds nothing of ranks, workers or the validation set (C-136, C-142).

The global batch may change at a resume (C-116): samples stay, steps are counted anew, and the change is said aloud in
`notes`. Samples that no longer fill a whole step at the end are left out on every rank alike (C-085).
Read next: `loader.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from heptad.errors import ConfigError, Problem
from heptad.loader.order import GlobalOrder, Origin, SourceShare

VERSION = 1


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a (resumed) run starts: `steps_done` and `samples` consumed then; it ends after step `total_steps`.

    `notes` are sentences for the user about what the resume changed.
    """

    steps_done: int
    samples: int
    global_batch: int
    total_steps: int
    origin: Origin
    notes: tuple[str, ...] = ()

    def sequence(self, step: int) -> int:
        """Samples consumed before 0-based step `step`, which is not before the start."""
        assert step >= self.steps_done, f"step {step} lies before this run's start, step {self.steps_done}"
        return self.samples + (step - self.steps_done) * self.global_batch


def fresh(global_batch: int, steps: int) -> Progress:
    """The start of a new run."""
    return Progress(0, 0, global_batch, steps, Origin())


def saved(
    progress: Progress, order: GlobalOrder, steps_done: int, planned_steps: int, digests: Mapping[str, str]
) -> dict[str, Any]:
    """The state after `steps_done` steps as JSON; `planned_steps` is `train.steps`, `digests` sources' content."""
    samples = progress.sequence(steps_done)
    return {
        "version": VERSION,
        "steps_done": steps_done,
        "samples": samples,
        "global_batch": progress.global_batch,
        "total_steps": progress.total_steps,
        "train_steps": planned_steps,
        "seed": order.seed,
        "shuffle": order.shuffle,
        "origin": {"samples": order.origin.samples, "consumed": dict(order.origin.consumed)},
        "consumed": order.consumed(samples),
        "sources": {
            source.name: {
                "num_samples": source.num_samples,
                "weight": source.weight,
                "digest": digests[source.name],
            }
            for source in order.sources
        },
    }


def resumed(
    state: Mapping[str, Any],
    sources: Sequence[SourceShare],
    digests: Mapping[str, str],
    global_batch: int,
    train_steps: int,
    seed: int,
    shuffle: bool,
) -> Progress:
    """The start of a run that goes on from `state`. Raises ConfigError for what would repeat or lose samples."""
    problems = _unlike(state, sources, digests, seed, shuffle)
    if problems:
        raise ConfigError(*problems)
    notes: list[str] = []
    total = _total_steps(state, global_batch, train_steps, notes)
    origin = _origin(state, sources, notes)
    return Progress(int(state["steps_done"]), int(state["samples"]), global_batch, total, origin, tuple(notes))


def _unlike(
    state: Mapping[str, Any], sources: Sequence[SourceShare], digests: Mapping[str, str], seed: int, shuffle: bool
) -> list[Problem]:
    """What differs from the saved run and may not."""
    if state.get("version") != VERSION:
        rule = f"a loader state of version {VERSION} is needed to resume"
        return [Problem("checkpoint", state.get("version"), rule, "resume with the release that wrote it")]
    problems = []
    for field, now in (("seed", seed), ("shuffle", shuffle)):
        if now != state[field]:
            rule = f"a resumed run keeps the order it began with ({field} {state[field]!r}), or samples repeat"
            problems.append(Problem(f"data.{field}", now, rule, f"set data.{field} back, or start a new run"))
    for source in sources:
        before = state["sources"].get(source.name)
        if before is None:
            continue
        found = (source.num_samples, digests[source.name])
        if found != (before["num_samples"], before["digest"]):
            rule = (
                f"source {source.name!r} must be what it was: {before['num_samples']} samples, digest "
                f"{before['digest'][:12]}; now {found[0]} samples, digest {found[1][:12]}"
            )
            fix = "restore the corpus, tokenizer, data.seq_len and data.pack of the saved run, or start a new run"
            problems.append(Problem("data", source.name, rule, fix))
    return problems


def _total_steps(state: Mapping[str, Any], global_batch: int, train_steps: int, notes: list[str]) -> int:
    """Last step of the resumed run. A changed `train.steps` stands as given; otherwise planned *samples* are kept."""
    before, done, samples = int(state["global_batch"]), int(state["steps_done"]), int(state["samples"])
    changed_steps = train_steps != state["train_steps"]
    if global_batch == before:
        return train_steps if changed_steps else int(state["total_steps"])
    if changed_steps:
        total = max(train_steps, done)
        left, over = (total - done) * global_batch, 0
    else:
        planned = samples + (int(state["total_steps"]) - done) * before
        left, over = planned - samples, (planned - samples) % global_batch
        total = done + (left - over) // global_batch
    tail = f"; the last {over} do not fill a step and are left out" if over else ""
    notes.append(
        f"global batch {before} -> {global_batch} after {samples} samples: {left - over} samples remain in "
        f"{total - done} steps, up to step {total}{tail}"
    )
    return total


def _origin(state: Mapping[str, Any], sources: Sequence[SourceShare], notes: list[str]) -> Origin:
    """The mixture's beginning: as saved when sources and weights are the same, here and now when they are not."""
    before = {name: float(source["weight"]) for name, source in state["sources"].items()}
    now = {source.name: source.weight for source in sources}
    if before == now:
        return Origin(int(state["origin"]["samples"]), tuple(state["origin"]["consumed"].items()))
    notes.append(f"mixture {before} -> {now} after {state['samples']} samples; every source goes on where it was")
    return Origin(int(state["samples"]), tuple(state["consumed"].items()))
