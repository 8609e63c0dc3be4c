"""The one-device model of stale weights that an asynchronous pipeline (PipeDream) is compared with: plain autograd.

The rule, written down apart from any schedule: of P stages, stage s runs forward and backward of micro-batch m with its
version max(0, m - (P-1-s)), where version v is what the stage has after v updates of this step; the update from
micro-batch m makes version m+1 from version m. Micro-batches are run in order, since each version that m needs comes
from an earlier one. The pipeline drains between steps, so a step starts with one version everywhere.

Micro-batch m is that of all data ranks: its loss is the mean over its own targets; without a target it updates nothing
(version m+1 is version m). As in `reference.py`, each update is made from the gradient that the layout got, so each
proves two links; the step's gradient, as it is compared, is that of all its updates, stacked and divided by √(their
number): its norm is the one that the step reports, the root mean square. Read next: `compare.py`, `train/stale.py`
(what is compared), `axes/pipeline/generators/pipedream.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from heptad.axes.program import stages_of
from heptad.config.schema import Job
from heptad.loader.prepare import PreparedData
from heptad.models.batch import Batch
from heptad.verify.decisions import Decisions
from heptad.verify.reference import Figures, Grads, Reference, norm_of


def reference_of(job: Job, tokens: PreparedData) -> Reference:
    """What `job` is compared with."""
    reference = Reference(job, tokens)
    stages = stages_of(job, reference.model.unit_specs)
    return StaleReference(job, tokens) if stages is not None and stages.schedule.asynchronous else reference


class StaleReference(Reference):
    """`job` on one device, each stage's weights as stale as the rule says."""

    def __init__(self, job: Job, tokens: PreparedData) -> None:
        super().__init__(job, tokens)
        stages = stages_of(job, self.model.unit_specs)
        assert stages is not None
        specs = self.model.unit_specs
        self.num_stages = len(stages.units)
        self._stage = {
            name: at for at, units in enumerate(stages.units) for unit in units for name in specs[unit].params
        }
        self._seen: list[tuple[Grads, list[Batch]]] = []  # of the step's micro-batches: weights, batches

    def version(self, stage: int, microbatch: int) -> int:
        """Updates of this step in the weights that `stage` uses for `microbatch`."""
        return max(0, microbatch - (self.num_stages - 1 - stage))

    def follow(self, step: int, updates: Sequence[Grads]) -> Figures:
        """Step `step` with the layout's own updates."""
        batches = self.batches(step)
        number = len(batches) // (self.job.layout.dp_replicate * self.job.layout.dp_shard)
        given, history, found = list(updates), [self._copy()], []
        self._seen = []
        with self._counted():
            found += self._run(batches, number, given, history, step)
        if any(figures.num_targets for figures in found):
            self.balance()
        return stacked(found)

    def _run(
        self, batches: list[Batch], number: int, given: list[Grads], history: list[Grads], step: int
    ) -> list[Figures]:
        """The step's micro-batches in order, each followed by its update."""
        found = []
        for index in range(number):
            used = {name: history[self.version(self._stage[name], index)][name] for name in self.values}
            self._seen.append((used, batches[index::number]))
            with self._at(used):
                found.append(self._compute(batches[index::number], flipped=False))
            if found[-1].num_targets and given:
                grads = given.pop(0)
                if all(math.isfinite(float(grad.double().sum())) for grad in grads.values()):
                    self.optimizer.step(step, self.masters, grads)
            history.append(self._copy())
        return found

    def reordered(self, step: int) -> list[Figures]:
        """The step that was followed last, each micro-batch with its weights and its sums in another order."""
        each = []
        for used, batches in self._seen:
            with self._at(used):
                each.append(self._reordered(batches))
        return [stacked(figures) for figures in zip(*each, strict=True)]

    def update(self, step: int, grads: Grads) -> None:
        """Made by `follow`."""

    @contextmanager
    def _at(self, used: Grads) -> Iterator[None]:
        """With these weights; the newest ones after it."""
        newest, self.values = self.values, used
        try:
            yield
        finally:
            self.values = newest

    def _copy(self) -> Grads:
        return {name: value.clone() for name, value in self.values.items()}


def stacked(found: Sequence[Figures]) -> Figures:
    """The micro-batches of one step as one; those without a target have no gradient in it."""
    num_targets = sum(figures.num_targets for figures in found)
    loss = sum(figures.loss * figures.num_targets for figures in found) / max(num_targets, 1)
    grads = stack([figures.grads for figures in found if figures.num_targets] or [found[0].grads])
    outputs = [marks for of_rank in zip(*(figures.outputs for figures in found), strict=True) for marks in of_rank]
    balance, z_loss = (sum(parts) / len(found) for parts in zip(*(figures.added for figures in found), strict=True))
    decided = {name: Decisions.joined([figures.decided[name] for figures in found]) for name in found[0].decided}
    return Figures(loss, grads, norm_of(grads), num_targets, outputs, (balance, z_loss), decided)


def stack(updates: Sequence[Grads]) -> Grads:
    """Gradients [number, ...] whose norm is the root mean square of those of `updates`."""
    scale = len(updates) ** -0.5
    return {name: torch.stack([grads[name] for grads in updates]) * scale for name in updates[0]}
