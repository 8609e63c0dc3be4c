"""One bucket at run time: the state machine of its parameters and of its gradient.

Full parameters and full gradients are views into flat buffers that are made once; dropping frees the buffer's storage
and gathering fills the same storage again, so a view saved by autograd sees the new values. The gather writes through
`.data` (its own version counter): autograd's check that saved tensors did not change must not fire, and preserving
the counter around an asynchronous write cannot work. Read next: `engine.py`, `mesh/collectives.py`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from heptad.axes.data.buckets import BucketSpec, Slot, ranges_of
from heptad.axes.data.shard import Owners, Shard
from heptad.mesh import collectives
from heptad.mesh.collectives import Group, Work
from heptad.precision.policy import Policy


class ParamState(enum.Enum):
    """Where the full parameters are."""

    SHARDED = "sharded"
    """Held: the shard. The full buffer's storage is empty (stage 3), or there with last step's values (1, 2)."""
    GATHERING = "gathering"
    """Held: shard and full buffer, which the network is filling."""
    GATHERED = "gathered"
    """Held: shard and full buffer, valid."""


class GradState(enum.Enum):
    """Where the gradient is."""

    SHARDED = "sharded"
    """Held: the shard's sum so far. The full buffer is empty (2, 3) or idle (0, 1)."""
    OPEN = "open"
    """Held: the full buffer too; weight gradients are added to it."""
    REDUCING = "reducing"
    """Held: the full buffer and, on gloo, as much staging for what peers send."""


@dataclass(frozen=True, slots=True)
class Placement:
    """How one stage holds a bucket: the groups, and whether full parameters and gradients are freed between uses."""

    shard_group: Group
    replica_group: Group
    free_params: bool
    free_grads: bool
    sharded: bool


class Bucket:
    """Buffers, states and communication of one bucket; the executor's G, g, D, R, r, A, a end here."""

    def __init__(self, spec: BucketSpec, place: Placement, policy: Policy, device: torch.device) -> None:
        self.spec, self.place, self.policy = spec, place, policy
        ranks, index = place.shard_group.size, place.shard_group.index
        self.shard_numel = spec.numel // ranks
        self.first = index * self.shard_numel
        self.full = torch.zeros(spec.numel, dtype=policy.params, device=device)
        self.own = self.full[self.first : self.first + self.shard_numel].detach()
        stored = policy.master if spec.trainable else policy.params
        self.shared = stored == policy.params and not place.free_params  # the master is the full buffer's own slice
        self.master = self.own if self.shared else torch.zeros(self.shard_numel, dtype=stored, device=device)
        self.params = {slot.spec.name: self._param(slot) for slot in spec.slots}
        self.param_state = ParamState.SHARDED if place.sharded else ParamState.GATHERED
        self.grad_state = GradState.SHARDED
        self.accumulated = False
        self._work: dict[str, Work] = {}
        if place.free_params:
            self.full.untyped_storage().resize_(0)
        if spec.trainable:
            self._make_grads(device)

    def _param(self, slot: Slot) -> nn.Parameter:
        view = self.full.data[slot.offset : slot.offset + slot.spec.numel].view(slot.spec.shape)
        return nn.Parameter(view, requires_grad=slot.spec.trainable)

    def _make_grads(self, device: torch.device) -> None:
        dtype = self.policy.reduce
        self.grad_full = torch.zeros(self.spec.numel, dtype=dtype, device=device)
        self.grad_views = {
            slot.spec.name: self.grad_full[slot.offset : slot.offset + slot.spec.numel].view(slot.spec.shape)
            for slot in self.spec.slots
        }
        own = self.grad_full[self.first : self.first + self.shard_numel]
        self.grad_shard = torch.zeros_like(own) if self.place.free_grads else own
        self._unwritten: set[str] = set()
        if self.place.free_grads:
            self.grad_full.untyped_storage().resize_(0)

    # Parameters

    def gather(self, phase: str) -> None:
        """G: SHARDED -> GATHERING. Own shard into its slice (cast to the computing dtype), peers' from the network."""
        assert self.param_state is ParamState.SHARDED, self.param_state
        if self.place.free_params:
            _allocate(self.full)
        if not self.shared:
            self.own.data.copy_(self.master)
        self._work["gather"] = collectives.all_gather(self.full.data, self.own.data, self.place.shard_group, phase)
        self.param_state = ParamState.GATHERING

    def wait_gather(self) -> None:
        """g: GATHERING -> GATHERED."""
        assert self.param_state is ParamState.GATHERING, self.param_state
        self._work["gather"].wait()
        self.param_state = ParamState.GATHERED

    def drop(self) -> None:
        """D: GATHERED -> SHARDED, once peers have this rank's shard."""
        assert self.param_state is ParamState.GATHERED, self.param_state
        self._work.pop("gather").wait_sent()
        if self.place.free_params:
            self.full.untyped_storage().resize_(0)
        self.param_state = ParamState.SHARDED

    def refresh(self) -> None:
        """After an update, where nothing is gathered (stage 0): the computing copy follows the master."""
        if not self.place.sharded and not self.shared:
            self.own.data.copy_(self.master)

    # Gradients

    def grad_view(self, name: str) -> tuple[Tensor, bool]:
        """Where the gradient of parameter `name` goes, and whether it holds nothing yet (write) or some (add)."""
        if self.grad_state is GradState.SHARDED:
            if self.place.free_grads:
                _allocate(self.grad_full)
            self._unwritten = set(self.grad_views)
            self.grad_state = GradState.OPEN
        assert self.grad_state is GradState.OPEN, self.grad_state
        fresh = name in self._unwritten
        self._unwritten.discard(name)
        return self.grad_views[name], fresh

    def reduce(self, phase: str) -> None:
        """R: OPEN -> REDUCING. A parameter that got no gradient counts as zero; padding is never read."""
        for name in list(self._unwritten if self.grad_state is GradState.OPEN else self.grad_views):
            self.grad_view(name)[0].zero_()
        if self.place.sharded:
            work = collectives.reduce_scatter(
                self.grad_shard, self.grad_full, self.place.shard_group, phase, self.accumulated
            )
        else:
            work = collectives.all_reduce(self.grad_full, self.place.replica_group, phase)
        self._work["reduce"] = work
        self.grad_state = GradState.REDUCING

    def wait_reduce(self) -> None:
        """r: REDUCING -> SHARDED; the full gradient's memory is free (2, 3)."""
        assert self.grad_state is GradState.REDUCING, self.grad_state
        work = self._work.pop("reduce")
        if self.place.free_grads and not self.accumulated:
            _allocate(self.grad_shard)
        work.complete()
        if self.place.free_grads:
            self.grad_full.untyped_storage().resize_(0)
            self.accumulated = True
        self.grad_state = GradState.SHARDED

    def all_reduce(self, phase: str) -> None:
        """A: sum of the shard's gradient over the replicas of the shard."""
        self._work["replicas"] = collectives.all_reduce(self.grad_shard, self.place.replica_group, phase)

    def wait_all_reduce(self) -> None:
        """a: the sum is there."""
        self._work.pop("replicas").wait()

    def begin_step(self) -> None:
        """Forget the last step's sums, and free them where gradients are cut: few exist at a step's peak."""
        self.accumulated = False
        if self.spec.trainable and self.place.free_grads:
            self.grad_shard.untyped_storage().resize_(0)

    def shards(self, owners: Owners) -> list[Shard]:
        """This rank's flat ranges of every parameter of the bucket."""
        return [shard for slot in self.spec.slots for shard in self._shards(slot, owners)]

    def _shards(self, slot: Slot, owners: Owners) -> list[Shard]:
        ranges, at = ranges_of(self.spec, slot), self.place.shard_group.index
        start, stop = ranges[at]
        here = slice(slot.offset + start - self.first, slot.offset + stop - self.first) if stop > start else slice(0, 0)
        grad = self.grad_shard[here] if self.spec.trainable else None
        return owners.shards(slot.spec.name, self.spec.family, ranges, at, self.master.data[here], grad)


def _allocate(tensor: Tensor) -> None:
    """Memory for a tensor that is the whole of its storage; the values are whatever lay there."""
    tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())
