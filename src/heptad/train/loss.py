"""The loss of a step: a sum over all ranks, and what travels with it.

One all-reduce of fp64, phase "loss": the sum of the token losses, whether a rank asks to stop, and both losses of the
routers where they add some. Read next: `step.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from heptad.mesh.collectives import Group, Work, all_reduce
from heptad.mesh.host import host_value


class LossSum:
    """Sum of the step's losses and of the wishes to stop over all ranks, hidden under the backward where it can be.

    counts: whether this rank's loss is part of the sum; its wish to stop always is, and what its routers add (`added`:
    [2] fp64; None: they add nothing).
    """

    def __init__(
        self,
        group: Group,
        stop: bool,
        device: torch.device,
        counts: bool = True,
        added: Callable[[torch.device], Tensor] | None = None,
    ) -> None:
        self.group, self.stop, self.device, self.counts, self.added = group, stop, device, counts, added
        self._work: Work | None = None

    def start(self, losses: list[Tensor]) -> None:
        """After the last forward; a second call changes nothing."""
        if self._work is None:
            zero = torch.zeros((), dtype=torch.float64, device=self.device)
            self.local = torch.stack(losses).double().sum() if losses else zero  # none but on a last stage
            counted = self.local if self.counts else torch.zeros_like(self.local)
            self._figures = torch.stack([counted, torch.full_like(self.local, float(self.stop))])
            if self.added is not None:
                self._figures = torch.cat([self._figures, self.added(self.device)])
            self._work = all_reduce(self._figures, self.group, "loss")

    def wait(self) -> tuple[float, bool]:
        """(sum of the losses, whether some rank asked to stop), equal on all ranks."""
        assert self._work is not None
        self._work.wait()
        return host_value(self._figures[0], expected=0.0), host_value(self._figures[1], expected=0.0) > 0

    def of_routers(self) -> tuple[float, ...]:
        """After `wait`: the sums of both losses of the routers; nothing where they add none."""
        return tuple(host_value(figure, expected=0.0) for figure in self._figures[2:])
