"""The one-device model of stale weights that PipeDream's whole runs are compared with: plain autograd.

The rule, written down apart from any schedule: of P stages, stage s runs forward and backward of micro-batch m with its
version max(0, m - (P-1-s)), where version v is what the stage has after v updates of this step; the update from
micro-batch m makes version m+1 from version m. Micro-batches are run in order, since each version that m needs comes
from an earlier one. The pipeline drains between steps, so a step starts with one version everywhere.

Micro-batch m is that of all data ranks: its loss is the mean over its own targets; without a target it updates nothing
(version m+1 is version m). Gradients are reported in the order of the updates.
Unlike `verify`, it goes on from its own gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from heptad.config.schema import Job
from heptad.models.batch import Batch
from heptad.models.build import Model
from heptad.verify.update import WholeOptimizer

Values = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class StaleStep:
    """One step. grads: of each micro-batch that updates, in order; norm: root mean square of these gradients' norms;
    params: after the step.
    """

    loss: float
    grads: tuple[Values, ...]
    norm: float
    params: Values


class StaleReference:
    """`model` (materialised, fp64) trained on one device as P stages would, each with stale weights.

    stages: the units of each stage, lowest first; no parameter is on two of them.
    """

    def __init__(self, job: Job, model: Model, stages: Sequence[Sequence[int]]) -> None:
        self.model, self.num_stages = model, len(stages)
        self.stage_of: dict[str, int] = {}
        for stage, units in enumerate(stages):
            for name in (name for unit in units for name in model.unit_specs[unit].params):
                assert name not in self.stage_of, f"{name} is on two stages"
                self.stage_of[name] = stage
        trainable = [spec.name for spec in model.specs if spec.trainable]
        self.newest = {name: model.params[name].detach().clone() for name in trainable}
        self.optimizer = WholeOptimizer(job.optimizer, model.specs, job.train.steps)

    def version(self, stage: int, microbatch: int) -> int:
        """Updates of this step in the weights that `stage` uses for `microbatch`."""
        return max(0, microbatch - (self.num_stages - 1 - stage))

    def step(self, step: int, microbatches: Sequence[Sequence[Batch]]) -> StaleStep:
        """Step `step` (from 1). microbatches[m]: the batches of all data ranks."""
        history: list[Values] = [_copy(self.newest)]
        grads: list[Values] = []
        total, num_targets = 0.0, 0
        for index, batches in enumerate(microbatches):
            used = {name: history[self.version(self.stage_of[name], index)][name] for name in self.newest}
            loss, found = self._gradient(used, batches)
            targets = sum(batch.num_targets() for batch in batches)
            if targets:
                grads.append({name: grad / targets for name, grad in found.items()})
                self.optimizer.step(step, self.newest, grads[-1])
            history.append(_copy(self.newest))
            total, num_targets = total + loss, num_targets + targets
        squares = [float(sum(grad.square().sum() for grad in grad_of.values())) for grad_of in grads]
        norm = (sum(squares) / max(len(squares), 1)) ** 0.5
        return StaleStep(total / max(num_targets, 1), tuple(grads), norm, _copy(self.newest))

    def _gradient(self, values: Mapping[str, Tensor], batches: Sequence[Batch]) -> tuple[float, Values]:
        """Sum of the losses at `values`, and its gradients."""
        wanted = [self.model.params[name] for name in values]
        for param, value in zip(wanted, values.values(), strict=True):
            param.data.copy_(value)
        loss = torch.stack([self.model.loss(batch) for batch in batches]).sum()
        found = torch.autograd.grad(loss, wanted, allow_unused=True)
        pairs = zip(values, wanted, found, strict=True)
        return loss.item(), {n: torch.zeros_like(p) if grad is None else grad for n, p, grad in pairs}


def _copy(values: Mapping[str, Tensor]) -> Values:
    return {name: value.clone() for name, value in values.items()}
