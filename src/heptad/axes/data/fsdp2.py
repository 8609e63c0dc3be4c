"""`engine = "fsdp2"`: torch's `fully_shard` behind the interface of `DataEngine`. The reference to be equal to, and
ahead of.

Its hooks gather and reduce, so the program has no G, D, R; weight gradients come from autograd (no taps). Each unit
is a root of its own, since units have detached boundaries, so FSDP2 cannot prefetch across them here (the benchmarks
compare with FSDP2 as its users run it, not with this). It cuts dim 0 of every parameter: a rank's share is one flat
range.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from heptad.axes.data.buckets import plan_buckets, unit_uses
from heptad.axes.data.cost import fsdp2_ranges
from heptad.axes.data.shard import Shard
from heptad.errors import ConfigError
from heptad.mesh.device import Mesh
from heptad.models.build import Model
from heptad.models.cut import FAMILIES
from heptad.models.init import fill
from heptad.models.spec import ParamSpec
from heptad.precision.policy import Policy
from heptad.schedule.action import Action

REPLICAS, SHARDS = ("dp_replicate",), ("dp_shard", "cp")


class Fsdp2Engine:
    """Same parameters, same initial values, same gradients as `DataEngine` at stage 3 (and HSDP)."""

    uses_taps = False
    library_communicates = True

    def __init__(self, model: Model, mesh: Mesh, policy: Policy, seed: int) -> None:
        self.model, self.mesh, self.seed = model, mesh, seed
        _check_unshared(model)
        one = dict.fromkeys(FAMILIES, 1)
        self.uses = unit_uses(model.unit_specs, plan_buckets(model.unit_specs, model.specs, one, 0.0, 1))
        hybrid = mesh.layout.degree(*REPLICAS) > 1
        device_mesh = mesh.device_mesh(REPLICAS, SHARDS) if hybrid else mesh.device_mesh(SHARDS)
        precision = MixedPrecisionPolicy(policy.params, policy.reduce, cast_forward_inputs=False)
        model.module.to(policy.master)
        for unit in dict.fromkeys(model.units):
            wrapped = fully_shard(unit, mesh=device_mesh, mp_policy=precision, reshard_after_forward=True)
            wrapped.set_gradient_divide_factor(1.0)  # the loss is divided once, gradients are summed
            wrapped.set_force_sum_reduction_for_comms(True)
        model.module.to_empty(device=mesh.device)
        model.params.update({spec.name: model.module.get_parameter(spec.name) for spec in model.specs})
        self.shards = [self._shard(spec) for spec in model.specs]
        self.initialise()

    def initialise(self) -> None:
        """Keyed initial values of this rank's rows."""
        for shard in self.shards:
            if shard.stop > shard.start:
                fill(shard.master, shard.spec, shard.start, shard.stop, self.seed)

    def _shard(self, spec: ParamSpec) -> Shard:
        param = self.model.params[spec.name]
        assert isinstance(param, DTensor)
        group = self.mesh.group(*SHARDS)
        ranges = fsdp2_ranges(spec, group.size)
        local = param.to_local().detach().view(-1)
        grad = torch.zeros_like(local) if spec.trainable else None
        return Shard(spec, *ranges[group.index], local, grad, group, ranges)

    @contextmanager
    def whole(self, unit: nn.Module) -> Iterator[None]:
        """FSDP2 gathers in a unit's forward only: any other use of its weights gathers and drops them here."""
        assert isinstance(unit, FSDPModule)
        unit.unshard()
        try:
            yield
        finally:
            unit.reshard()

    def begin_step(self) -> None:
        """Gradients start at nothing."""
        for param in self.model.params.values():
            param.grad = None

    def finish_grads(self) -> None:
        """Show the reduced gradients as shards; a parameter that got none has zero."""
        for shard in self.shards:
            grad = self.model.params[shard.spec.name].grad
            if shard.grad is not None:
                shard.grad = torch.zeros_like(shard.grad) if grad is None else _local(grad)

    def refresh(self) -> None:
        """Nothing to do: FSDP2 casts at each gather."""

    def act(self, action: Action, phase: str) -> None:
        """Never called: the program has no communication."""
        raise AssertionError(f"{action} in a program for fsdp2")

    def add_matmul(self, param: nn.Parameter, a: Tensor, b: Tensor) -> None:
        """Never called: there are no taps."""
        raise AssertionError("fsdp2 uses no taps")

    def add_rows(self, param: nn.Parameter, rows: Tensor, values: Tensor) -> None:
        """Never called either."""
        raise AssertionError("fsdp2 uses no taps")

    def add_groups(self, param: nn.Parameter, a: Tensor, b: Tensor, counts: Sequence[int]) -> None:
        """Never called either."""
        raise AssertionError("fsdp2 uses no taps")

    def add(self, param: nn.Parameter, grad: Tensor) -> None:
        """Never called either."""
        raise AssertionError("fsdp2 uses no taps")


def _check_unshared(model: Model) -> None:
    """A unit may run twice, but units that share a parameter would each wrap it and keep a gradient of their own."""
    names = {param: name for name, param in model.params.items()}
    owners: dict[nn.Parameter, nn.Module] = {}
    for unit in model.units:
        for param in unit.parameters():
            if owners.setdefault(param, unit) is not unit:
                rule = f"fsdp2 wraps each unit by itself, and {names[param]!r} belongs to two of them"
                raise ConfigError.of("layout.engine", "fsdp2", rule, 'engine = "heptad"')


def _local(grad: Tensor) -> Tensor:
    assert isinstance(grad, DTensor)
    return grad.to_local().view(-1)
