"""What routers decided in a step: written down where they ran, judged by itself, and followed on one device. For bf16.

Which experts a token goes to is a step function of its scores: where two are nearly equal, rounding decides, and what
follows (rows, gradients, loads, the sign in a bias's update) differs by far more than rounding. It is no error, and no
bound that is measured elsewhere covers it. So in bf16 choices are an input to one device: it, and each of its reordered
runs, sends tokens where the layout sent them, and all that follows is compared as ever, loads and biases exactly. The
choices themselves are judged router by router, each after the same choices below it (`wrong_of`):

- scores: their distance to one device's, root mean square, is at most twice that of its reordered runs, where one
  rounding to bf16 (2⁻⁸ of them) is granted.
- choices: exactly those that the rule (experts a token, groups, the bias as it should be) makes of the layout's scores;
  what a capacity keeps of them, exactly what it keeps of these on one device.

So a choice that is not one device's own is a near tie: both follow one rule, from scores that differ by no more than
rounding makes them. Anything else is named.

Legend: n real tokens, by their global numbers; E experts, K a token. Read next: `judge.py`, `models/router.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from heptad.models.batch import Batch
from heptad.models.router import Router, Routing, routers
from heptad.precision.policy import Policy


@dataclass(frozen=True, slots=True)
class Decisions:
    """Of one router in a step, tokens in ascending order. index [n] int64: their numbers; scores [n, E], without a
    bias; chosen [n, K] int64: experts; kept [n, K] bool: what no capacity dropped."""

    index: Tensor
    scores: Tensor
    chosen: Tensor
    kept: Tensor

    @classmethod
    def joined(cls, parts: Sequence[Decisions]) -> Decisions:
        """Those of several ranks or micro-batches as one."""
        index = torch.cat([part.index for part in parts])
        order = index.argsort(stable=True)
        scores, chosen, kept = (
            torch.cat([getattr(part, name) for part in parts])[order] for name in ("scores", "chosen", "kept")
        )
        return cls(index[order], scores, chosen, kept)

    def places(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """index [m] -> where these tokens stand here [m] (0 where not), and whether they do [m]."""
        place = torch.searchsorted(self.index, index).clamp(max=max(self.index.numel() - 1, 0))
        there = self.index[place] == index if self.index.numel() else torch.zeros_like(index, dtype=torch.bool)
        return place.where(there, 0), there


class Witness:
    """Writes down what `router` decides, anew where a forward runs again; with `given`, the router decides as that says
    wherever it says something."""

    given: Decisions | None = None
    _index: Tensor
    _scores: Tensor

    def __init__(self, router: Router) -> None:
        self.router, self.rule = router, router.choose
        self.found: dict[int, Decisions] = {}
        self._forward, self._best = router.forward, router.best
        for name in ("forward", "choose", "best"):
            setattr(router, name, getattr(self, f"_seen_{name}"))

    def start(self, given: Decisions | None = None) -> None:
        """Forget what was found; follow `given` from now on."""
        self.found, self.given = {}, given if given is not None and given.index.numel() else None

    def taken(self) -> Decisions | None:
        """All that was found, if this router ran."""
        return Decisions.joined(list(self.found.values())) if self.found else None

    def _seen_forward(self, x: Tensor, batch: Batch) -> Routing:
        own = self.router.rows.own(batch)
        self._index = own.index
        routing = self._forward(x, batch)
        kept = torch.ones_like(routing.experts, dtype=torch.bool) if routing.kept is None else routing.kept
        figures = (own.index, self._scores, routing.experts, kept)
        self.found[id(batch.ids)] = Decisions(*(each if own.real is None else each[own.real] for each in figures))
        return routing

    def _seen_choose(self, scores: Tensor) -> Tensor:
        self._scores = scores.detach()
        return self._as_given(self.rule(scores), None if self.given is None else self.given.chosen)

    def _seen_best(self, scores: Tensor) -> Tensor:
        return self._as_given(self._best(scores), None if self.given is None else self._best(self.given.scores))

    def _as_given(self, own: Tensor, given: Tensor | None) -> Tensor:
        if given is None or self.given is None:
            return own
        place, there = self.given.places(self._index)
        return given[place].where(there.unsqueeze(-1), own)


def witnesses(module: nn.Module, policy: Policy) -> dict[str, Witness]:
    """One for every router of `module`, by its name, in bf16."""
    found = routers(module).items() if policy.params is torch.bfloat16 else ()
    return {name: Witness(router) for name, router in found}


def taken(found: Mapping[str, Witness]) -> dict[str, Decisions]:
    """What routers that ran have decided."""
    return {name: decided for name, witness in found.items() if (decided := witness.taken()) is not None}


@dataclass(frozen=True, slots=True)
class Wrong:
    """A measure of a router's decisions: kind "score" or "choice"; error beyond bound is a difference."""

    kind: str
    error: float
    bound: float


def wrong_of(
    ruled: Tensor, found: Decisions, right: Decisions, others: Sequence[Decisions], factor: float, rounding: float
) -> Iterator[Wrong]:
    """`found` of a layout against `right` of one device that followed it, and `others`, of its reordered runs.

    ruled [n, K]: the experts that the layout's scores give by the rule.
    factor, rounding: how many times their difference is granted, and at least which share of the scores.
    """
    if not torch.equal(found.index, right.index):  # a token was routed nowhere, or twice
        yield Wrong("choice", math.inf, 0.0)
        return
    if not right.index.numel():
        return
    size = max(_rms(right.scores), 1e-30)
    noise = max(_rms(other.scores - right.scores) for other in others) / size
    error = _rms(found.scores - right.scores) / size
    yield Wrong("score", error if math.isfinite(error) else math.inf, factor * max(noise, rounding))
    other = (ruled.sort(1).values != found.chosen.sort(1).values).any(1) | (found.kept != right.kept).any(1)
    yield Wrong("choice", float(other.double().mean()), 0.0)


def _rms(x: Tensor) -> float:
    return math.sqrt(float(x.double().square().mean()))
