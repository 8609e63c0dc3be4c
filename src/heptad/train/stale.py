"""Updates inside a step: what V does, for a pipeline that is not flushed between micro-batches (PipeDream).

Each micro-batch of all data ranks is a mini-batch: its loss is the mean over its own targets, so its gradient is
scaled by one over these (all counts are one all-reduce of M integers, under the first forward), and each stage updates
from it alone, with the learning rate of the job's step. What one decision for all stages would need is not known
without a flush, so it is not one: each stage leaves out an update whose gradient is not finite on one of its own
ranks. A micro-batch without a target updates nothing; every other one counts as an update (AdamW's bias correction), on
every stage alike. The norm that a step reports is the root mean square of its updates' norms, each of the whole
gradient: stages add theirs up when the pipeline has drained. Read next: `step.py`, `schedule/versions.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from heptad.axes.apply import Parallel
from heptad.axes.data.stages import LOSS_AXES
from heptad.errors import ConfigError
from heptad.mesh.collectives import all_reduce
from heptad.mesh.host import host_value
from heptad.models.batch import Batch
from heptad.models.share import shares
from heptad.optim.build import Optimizer
from heptad.optim.norm import total_norm


class StageUpdates:
    """The updates of this rank's stage in one step.

    counts: whether this rank's targets are part of the sum over the loss's group.
    """

    def __init__(self, parallel: Parallel, optimizer: Optimizer, counts: bool) -> None:
        self.engine, self.optimizer, self.counts = parallel.engine, optimizer, counts
        self.pipeline, self.loss_group = parallel.mesh.group("pp"), parallel.mesh.group(*LOSS_AXES)
        assert optimizer.section.clip_norm is None, "configuration refuses it: no stage knows the whole norm"
        _refuse_shared(parallel)

    def begin(self, step: int, batches: Sequence[Batch]) -> None:
        """Starts the count of each micro-batch's targets; the first backward waits for it."""
        self.step, self._squares, self._num_updates = step, 0.0, 0
        self._targets = self._count(batches)

    def _count(self, batches: Sequence[Batch]) -> Callable[[], list[int]]:
        counts = torch.stack([(batch.labels >= 0).sum() for batch in batches])
        counts = counts if self.counts else torch.zeros_like(counts)
        work = all_reduce(counts, self.loss_group, "count")

        def wait() -> list[int]:
            work.wait()
            return [int(host_value(count, expected=batches[0].labels.numel())) for count in counts]

        return cache(wait)

    def scale(self, microbatch: int) -> float:
        """Gradient of the sum of losses of a micro-batch: one over its targets, on all data ranks together."""
        return 1.0 / max(self._targets()[microbatch], 1)

    def num_targets(self) -> int:
        """Of the whole step."""
        return sum(self._targets())

    @property
    def without_target(self) -> int:
        """Micro-batches of the last step that made no update, since no data rank had a target in them."""
        return sum(not count for count in self._targets())

    def update(self, microbatch: int) -> None:
        """V: the stage's gradient is that of `microbatch`, reduced over the data ranks."""
        self.engine.begin_step()
        self.engine.finish_grads()
        trains = any(shard.spec.trainable for shard in self.engine.shards)
        self._norm = host_value(total_norm(self.engine.shards), expected=0.0) if trains else 0.0
        if self._targets()[microbatch]:
            self.apply()

    def apply(self) -> None:
        """The update from the gradient that is there."""
        self._squares += self._norm * self._norm
        self._num_updates += 1
        if math.isfinite(self._norm):
            self.optimizer.step(self.step)
            self.engine.refresh()
        else:
            self.optimizer.updates += 1

    def drained(self) -> Tensor:
        """Root mean square of the updates' norms, 0-d fp64, equal on all ranks; not finite if one was not."""
        squares = torch.tensor(self._squares, dtype=torch.float64, device=self.engine.shards[0].master.device)
        all_reduce(squares, self.pipeline, "norm").wait()
        return (squares / max(self._num_updates, 1)).sqrt()


def _refuse_shared(parallel: Parallel) -> None:
    """On every rank alike; of a model of the job's own, configuration has refused `tied`."""
    stages, model = parallel.stages, parallel.model
    assert stages is not None
    if any(share.groups() for share in shares(stages.held_by_all(), model.unit_specs, model.specs)):
        rule = "a parameter on two stages has a copy on each, and the stages would update them at different times"
        raise ConfigError.of("layout.schedule", stages.schedule.name, rule, 'share none, or schedule = "1f1b"')
