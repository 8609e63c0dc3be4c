"""The data axis's engine: all buckets of a model on one rank, for every stage.

The executor calls `act` for G, g, D, R, r, A, a (and K, X, N: `versions.py`) and hands the engine to the weight
gradients as their sink. Which stage it is shows only in `Placement` and in the program that `schedule/lower.py` wrote.
Read next: `bucket.py`, `schedule/executor.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from heptad.axes.data.bucket import Bucket, Placement
from heptad.axes.data.buckets import BucketSpec, part_width, parts_of, plan_buckets, unit_uses
from heptad.axes.data.shard import Holders, Owners, Shard, sum_parts
from heptad.axes.data.versions import Versions
from heptad.mesh.collectives import Group
from heptad.models.build import Model
from heptad.models.grouped import add_outer_
from heptad.models.init import fill
from heptad.precision.policy import Policy
from heptad.schedule.action import VERSIONS, Action, Kind


class DataEngine:
    """Owns every parameter of `model` on this rank: makes the buffers, fills them with keyed initial values.

    Parameters are cut by other axes first (`owners`), and what is left of each by this one.

    uses_taps: weight gradients come through the sink (False: autograd writes `.grad`, see `fsdp2.py`).
    library_communicates: collectives do not pass `mesh/collectives.py`, so the ledger needs `LibraryLedger`.
    """

    uses_taps = True
    library_communicates = False

    def __init__(
        self,
        model: Model,
        zero: int,
        owners: Owners,
        policy: Policy,
        device: torch.device,
        bucket_mb: float,
        seed: int,
    ) -> None:
        self.policy, self.seed, share = policy, seed, owners.share
        places = {family: _placement(zero, holders) for family, holders in owners.families.items()}
        counts = {family: holders.shards.size for family, holders in owners.families.items()}
        local = [owners.own(spec).local for spec in share.specs]
        planned = plan_buckets(model.unit_specs, local, counts, bucket_mb, policy.reduce.itemsize, share)
        self.uses = unit_uses(model.unit_specs, planned, model.specs, share)
        self.buckets = [Bucket(spec, places[spec.family], policy, device) for spec in planned]
        self._home = {name: bucket for bucket in self.buckets for name in bucket.params}
        model.bind({name: bucket.params[name] for name, bucket in self._home.items()})
        self._names = {param: name for name, param in model.params.items()}
        self.shards = [shard for bucket in self.buckets for shard in bucket.shards(owners)]
        self._parts = self._sums(owners, planned)
        self._summed = False
        self.versions = Versions([bucket.full for bucket in self.buckets if bucket.spec.trainable])
        self._acts: dict[Kind, Callable[[Bucket, str], None]] = {
            Kind.GATHER: Bucket.gather,
            Kind.WAIT_GATHER: lambda bucket, _: bucket.wait_gather(),
            Kind.DROP: lambda bucket, _: bucket.drop(),
            Kind.REDUCE: Bucket.reduce,
            Kind.WAIT_REDUCE: lambda bucket, _: bucket.wait_reduce(),
            Kind.ALL_REDUCE: Bucket.all_reduce,
            Kind.WAIT_ALL_REDUCE: lambda bucket, _: bucket.wait_all_reduce(),
        }
        self.initialise()

    def _sums(self, owners: Owners, planned: Sequence[BucketSpec]) -> list[tuple[list[Shard], Group, int]]:
        """Gradients that are only a part after the data axis's reduction, the group of their sum, its width: over
        tensor ranks, then over the ranks of the pipeline that hold the same parameter."""
        dense = owners.families["dense"]
        sums = [(group, parts_of(dense.cuts[dense.index], kind)) for kind, group in owners.sums.items()]
        sums += [(group, owners.share.shared(ranks)) for ranks, group in owners.stages.items()]
        return [
            (
                [shard for shard in self.shards if shard.spec.name in names and shard.spec.trainable],
                group,
                part_width(planned, names),
            )
            for group, names in sums
        ]

    def initialise(self) -> None:
        """Keyed initial values of this rank's ranges: the same whole tensors for any layout."""
        for shard in self.shards:
            if shard.stop > shard.start:
                fill(shard.master, shard.spec, shard.start, shard.stop, self.seed)
        self.refresh()

    def act(self, action: Action, phase: str) -> None:
        """Run one action on a bucket, or on all of a stage's weights; `phase` labels its traffic."""
        if action.kind in VERSIONS:
            self._version(action)
            return
        self._acts[action.kind](self.buckets[action.index], phase)

    def _version(self, action: Action) -> None:
        match action.kind:
            case Kind.KEEP:
                self.versions.keep(action.microbatch)
            case Kind.EXCHANGE:
                self.versions.exchange(action.microbatch)
            case Kind.NEWEST:
                self.versions.newest(action.microbatch)

    def whole(self, unit: nn.Module) -> AbstractContextManager[None]:
        """The program gathers what each of its actions uses."""
        return nullcontext()

    def begin_step(self) -> None:
        """Before the first action of a step that trains; inside an asynchronous one, before each update."""
        self._summed = False
        for bucket in self.buckets:
            bucket.begin_step()

    def finish_grads(self) -> None:
        """After the last reduction: what is still a part is summed over tensor ranks. A second call changes nothing."""
        if not self._summed:
            for members, group, width in self._parts:
                sum_parts(members, group, width)
            self._summed = True

    def refresh(self) -> None:
        """After the masters changed (update, load)."""
        for bucket in self.buckets:
            bucket.refresh()
        self.versions.changed()

    # GradSink

    def add_matmul(self, param: nn.Parameter, a: Tensor, b: Tensor) -> None:
        """See `models.taps.GradSink`."""
        grad, fresh = self._grad(param)
        if grad.dtype != a.dtype:
            product = a @ b
            grad.copy_(product) if fresh else grad.add_(product)
        elif fresh:
            torch.mm(a, b, out=grad)
        else:
            grad.addmm_(a, b)

    def add_rows(self, param: nn.Parameter, rows: Tensor, values: Tensor) -> None:
        """See `models.taps.GradSink`."""
        grad, fresh = self._grad(param)
        if fresh:
            grad.zero_()
        if grad.is_cuda:  # index_add_ adds with atomics there: tensor ranks' copies of a table would part
            grad.index_put_((rows,), values.to(grad.dtype), accumulate=True)
        else:
            grad.index_add_(0, rows, values.to(grad.dtype))

    def add_groups(self, param: nn.Parameter, a: Tensor, b: Tensor, counts: Sequence[int]) -> None:
        """See `models.taps.GradSink`."""
        grad, fresh = self._grad(param)
        add_outer_(grad, a, b, counts, fresh)

    def add(self, param: nn.Parameter, grad: Tensor) -> None:
        """See `models.taps.GradSink`."""
        view, fresh = self._grad(param)
        view.copy_(grad) if fresh else view.add_(grad)

    def _grad(self, param: nn.Parameter) -> tuple[Tensor, bool]:
        name = self._names[param]
        return self._home[name].grad_view(name)


def _placement(zero: int, holders: Holders) -> Placement:
    """What stage `zero` cuts and frees, over the ranks of one family."""
    return Placement(holders.shards, holders.replicas, free_params=zero == 3, free_grads=zero >= 2, sharded=zero > 0)
