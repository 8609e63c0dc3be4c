"""The bias of a router's choice, moved after each step by the load of the whole global batch; what routers add to the
loss.

Each training forward writes down how many tokens chose each expert (`models/router.py`); after the step's update these
counts are summed over all ranks (one all-reduce, phase "router", of an int64 for each expert of each block with a bias,
of the whole model: ranks of a pipeline add zeros for blocks that run elsewhere, and each token is routed by one rank),
and the bias of an expert above the mean falls, below it rises, by `bias_update_speed`: DeepSeek-V3, arXiv 2412.19437,
§2.1.2. A step that makes no update moves none. The bias is state, not a parameter: fp32 (fp64 in a float64 run), whole
on every rank that runs its block, saved with the weights.

The losses that routers add are summed with the main one, in the same all-reduce (two fp64 more), and reported beside
it. Read next: `step.py`, `state.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from heptad.mesh.collectives import Group, all_reduce
from heptad.mesh.piece import Piece
from heptad.models.build import Model
from heptad.models.router import Router, routers


def biased(model: Model) -> dict[str, Router]:
    """Name of the bias -> router, of every router of the model that has one."""
    return {f"{name}.bias": router for name, router in routers(model.module).items() if router.bias is not None}


def moved(bias: Tensor, counts: Tensor, speed: float) -> Tensor:
    """bias [E] after a step whose global batch sent counts [E] tokens to each expert."""
    return bias + speed * (counts.sum() - counts * counts.shape[0]).sign().to(bias.dtype)


class Balance:
    """The biases of one rank. here: units that it runs."""

    def __init__(self, model: Model, units: frozenset[int], group: Group) -> None:
        self.routers, self.group = biased(model), group
        self.adding = [router for router in routers(model.module).values() if router.balance or router.z_loss]
        own = {id(module) for unit in units for module in model.units[unit].modules()}
        self.here = {name: router for name, router in self.routers.items() if id(router) in own}

    def begin(self) -> None:
        """Before a step that trains: no load yet."""
        for router in self.routers.values():
            router.loads = {}
        for router in self.adding:
            router.added = {}

    @property
    def coefficients(self) -> tuple[float, float]:
        """Of both losses of the routers, 0 where there is none."""
        return (self.adding[0].balance, self.adding[0].z_loss) if self.adding else (0.0, 0.0)

    def added(self, device: torch.device) -> Tensor:
        """What this rank's tokens add to both losses of the routers, of all micro-batches that ran here: [2] fp64."""
        parts = [part.double() for router in self.adding for part in (router.added or {}).values()]
        return torch.stack([torch.zeros(2, dtype=torch.float64, device=device), *parts]).sum(0)

    def end(self, updated: bool) -> None:
        """After the step's update, if it made one. Collective."""
        if updated and self.routers:
            loads = torch.stack([summed(router) for router in self.routers.values()])  # [routers, E]
            all_reduce(loads.view(-1), self.group, "router").wait()
            for router, counts in zip(self.routers.values(), loads, strict=True):
                assert router.bias is not None
                router.bias = moved(router.bias, counts, router.speed)
        for router in self.routers.values():
            router.loads = None
        for router in self.adding:
            router.added = None

    def pieces(self) -> list[Piece]:
        """The biases of blocks that run here, whole."""
        found = []
        for name, router in self.here.items():
            assert router.bias is not None
            found.append(Piece(name, tuple(router.bias.shape), 0, router.bias.numel(), router.bias))
        return found


def summed(router: Router) -> Tensor:
    """Of the step's micro-batches that ran here: int64 [E]."""
    assert router.loads is not None and router.bias is not None
    zeros = torch.zeros(router.bias.shape, dtype=torch.int64, device=router.bias.device)
    return torch.stack([zeros, *router.loads.values()]).sum(0)


def shapes(model: Model) -> Mapping[str, tuple[int, ...]]:
    """Every bias of the model and its shape, also of blocks that run elsewhere."""
    return {
        f"{name}.bias": (router.gate.weight.shape[0],) for name, router in routers(model.module).items() if router.speed
    }
