"""Activations and gradients between the stages of a pipeline: sent and received by tag, asynchronously.

One process group a direction: activations go up in one, gradients come down in the other, so neither waits for the
other (and on NCCL neither's order depends on the other's). A message's tag is its unit and micro-batch, so gloo pairs
the two ends whatever was posted first; on NCCL they pair in order, which the schedule's proof makes the same on both
ends. Read next: `schedule/expand.py` (when), `mesh/collectives.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from heptad.mesh.collectives import Group, Work, recv, send
from heptad.models.batch import Batch
from heptad.schedule.action import Action, Kind, UnitUse
from heptad.schedule.compute import Step
from heptad.schedule.expand import Stages


class Transport:
    """Messages of one rank. shape_of: of the stream at a boundary, for a batch."""

    def __init__(
        self,
        up: Group,
        down: Group,
        stages: Stages,
        uses: tuple[UnitUse, ...],
        shape_of: Callable[[Batch], torch.Size],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.up, self.down, self.stages, self.uses = up, down, stages, uses
        self.shape_of, self.dtype, self.device = shape_of, dtype, device
        self._under_way: dict[tuple[Kind, int, int], tuple[Work, Tensor]] = {}

    def act(self, action: Action, at: Step) -> None:
        """Run one action of `schedule.action.TRANSPORT`."""
        unit, microbatch = action.index, action.microbatch
        match action.kind:
            case Kind.SEND:
                self._send(action, at.boundaries.pop((unit, microbatch)), self.up, unit + 1)
            case Kind.SEND_GRAD:
                self._send(action, at.grads.pop((unit - 1, microbatch)), self.down, unit - 1)
            case Kind.RECEIVE:
                self._receive(action, at, self.up, unit - 1)
            case Kind.RECEIVE_GRAD:
                self._receive(action, at, self.down, unit + 1)
            case Kind.WAIT_SEND:
                self._under_way.pop((Kind.SEND, unit, microbatch))[0].wait_sent()
            case Kind.WAIT_SEND_GRAD:
                self._under_way.pop((Kind.SEND_GRAD, unit, microbatch))[0].wait_sent()
            case Kind.WAIT_RECEIVE:
                wants_grad = torch.is_grad_enabled() and self.uses[unit - 1].backward
                at.boundaries[unit - 1, microbatch] = self._arrived(Kind.RECEIVE, action).requires_grad_(wants_grad)
            case Kind.WAIT_RECEIVE_GRAD:
                at.grads[unit, microbatch] = self._arrived(Kind.RECEIVE_GRAD, action)

    def _peer(self, unit: int, microbatch: int) -> int:
        stage = self.stages.stage_of(unit)
        if not torch.is_grad_enabled():  # an evaluation runs in the first direction only
            return self.stages.where[0][stage]
        return self.stages.rank_of(stage, microbatch)

    def _tag(self, unit: int, microbatch: int) -> int:
        """The lower unit of the boundary and the micro-batch, as one number: the same at both ends."""
        return 1 + unit + len(self.uses) * microbatch

    def _send(self, action: Action, tensor: Tensor, group: Group, to_unit: int) -> None:
        peer, tag = self._peer(to_unit, action.microbatch), self._tag(min(action.index, to_unit), action.microbatch)
        tensor = tensor.detach().contiguous()
        work = send(tensor, peer, group, group.ledger.phase, tag)
        self._under_way[action.kind, action.index, action.microbatch] = work, tensor

    def _receive(self, action: Action, at: Step, group: Group, from_unit: int) -> None:
        peer, tag = self._peer(from_unit, action.microbatch), self._tag(min(action.index, from_unit), action.microbatch)
        tensor = torch.empty(self.shape_of(at.batches[action.microbatch]), dtype=self.dtype, device=self.device)
        work = recv(tensor, peer, group, tag)
        self._under_way[action.kind, action.index, action.microbatch] = work, tensor

    def _arrived(self, start: Kind, action: Action) -> Tensor:
        work, tensor = self._under_way.pop((start, action.index, action.microbatch))
        work.wait()
        return tensor
