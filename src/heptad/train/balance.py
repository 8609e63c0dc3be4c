"""How tokens spread over experts: the load of the whole global batch, the bias of a router's choice that it moves, what
a run shows of it; and what routers add to the loss.

Each training forward writes down how many tokens chose each expert, and how many of these choices were dropped
(`models/router.py`). After the step's last forward the counts are summed over all ranks: one all-reduce, phase
"router", of E + 1 int64 for each block with experts, of the whole model (ranks of a pipeline add zeros for blocks that
run elsewhere, and each token is routed by one rank). It runs under the backward, in a pipeline under the update.

Then the bias of an expert above the mean falls, below it rises, by `bias_update_speed`: DeepSeek-V3, arXiv 2412.19437,
§2.1.2. A step that makes no update moves none. The bias is state, not a parameter: fp32 (fp64 in a float64 run), whole
on every rank that runs its block, saved with the weights, and kept by a run that goes on with a speed of 0.

The losses that routers add are summed with the main one, in the same all-reduce (two fp64 more), and reported beside
it. Read next: `step.py`, `state.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from heptad.mesh.collectives import Group, Work, all_reduce
from heptad.mesh.host import host_value
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
    """The experts' loads and the biases of one rank. units: that it runs; group: all ranks.

    counts: of the last step, int64 [routers, E + 1]: tokens that chose each expert, and choices that were dropped.
    """

    def __init__(self, model: Model, units: frozenset[int], group: Group, device: torch.device) -> None:
        self.routers, self.group, self.device = routers(model.module), group, device
        self.adding = [router for router in self.routers.values() if router.balance or router.z_loss]
        self.drops = any(router.capacity_factor is not None for router in self.routers.values())
        own = {id(module) for unit in units for module in model.units[unit].modules()}
        self.here = {name: router for name, router in biased(model).items() if id(router) in own}
        self._work: Work | None = None

    def begin(self) -> None:
        """Before a step that trains: no load yet."""
        self._work = None
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

    def start(self) -> None:
        """After the step's last forward; a second call changes nothing. Collective."""
        if self.routers and self._work is None:
            self.counts = torch.stack([summed(router, self.device) for router in self.routers.values()])
            self._work = all_reduce(self.counts.view(-1), self.group, "router")

    def end(self, updated: bool) -> tuple[float | None, float | None]:
        """After the step's update, if it made one: moves the biases. What `figures` says."""
        if self._work is None:
            return None, None
        self._work.wait()
        for router, counts in zip(self.routers.values(), self.counts, strict=True):
            if updated and router.bias is not None:
                router.bias = moved(router.bias, counts[:-1], router.speed)
            router.loads = None
        for router in self.adding:
            router.added = None
        return figures(self.counts, self.drops)

    def pieces(self) -> list[Piece]:
        """The biases of blocks that run here, whole."""
        found = []
        for name, router in self.here.items():
            assert router.bias is not None
            found.append(Piece(name, tuple(router.bias.shape), 0, router.bias.numel(), router.bias))
        return found


def summed(router: Router, device: torch.device) -> Tensor:
    """Of the step's micro-batches that ran here: int64 [E + 1], as a router writes them."""
    assert router.loads is not None
    zeros = torch.zeros(router.gate.weight.shape[0] + 1, dtype=torch.int64, device=device)
    return torch.stack([zeros, *router.loads.values()]).sum(0)


def figures(counts: Tensor, drops: bool) -> tuple[float | None, float | None]:
    """counts [routers, E + 1] of a step -> the load of the busiest expert over the mean, of the block where it is
    largest; the share of all choices that were dropped, if routers drop some. None where no token was routed."""
    loads = counts[:, :-1].double()
    busiest = host_value((loads.amax(1) / loads.mean(1)).amax(), expected=1.0)
    dropped = host_value(counts[:, -1].sum() / loads.sum(), expected=0.0) if drops else math.nan
    return busiest if math.isfinite(busiest) else None, dropped if math.isfinite(dropped) else None


def shapes(model: Model) -> Mapping[str, tuple[int, ...]]:
    """Every bias of the model and its shape, also of blocks that run elsewhere."""
    found = routers(model.module).items()
    return {f"{name}.bias": (router.gate.weight.shape[0],) for name, router in found if router.sigmoid}
