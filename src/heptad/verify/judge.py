"""One step of a layout beside the same step on one device: which difference is too large, and why it is.

Relative error of a tensor: max|a - b| over its scale, max|b|.

Bounds. fp64: 1e-10, fp32: 1e-5. A gradient that is zero by nature (a key's bias; a query whose only target is the
first position) is rounding noise in both, so a scale is never less than 8 ε/bound of the largest in the model (2e-5;
0.1): what eight roundings of the largest gradient can do is no error. Noise is below one, planted faults above 10⁴.

bf16 has no such constant: its errors depend on the model. The bound is measured: the same step on one device with the
same parameters, its sums only reordered (`Reference.reordered`), gives figures that are as right as the reference's.
Sharding reorders sums and does nothing else, so its distance to the reference must be of the size of theirs: at most
twice, root mean square over all gradients together, where a distance of one rounding to bf16 (2⁻⁸ of a tensor) is
granted since every gradient is rounded at least once. Of one tensor, and of the norm, at most three times: some ten
runs are a small sample, and of theirs 0.65 % are beyond twice all the others (99 of 15,280 tensors of mixtures), while
of the right layouts' tensors some 0.05 % were, none beyond 2.8. The update is not excused: it starts from the same
gradients in fp32, so parameters and norm of the update keep fp32's bound.

A gradient that is zero by nature is noise in bf16 too, and known by its size: no larger than twice the distance of the
reordered runs, or than one rounding of the model's largest gradient (2⁻⁸, root mean square). Their distance is one draw
of that noise, or none where reordering changes no bit, and no measure of the layout's, which rounds elsewhere. There,
and nowhere else, one rounding of the largest is granted: keys' biases are up to 0.6 of one from each other.

The tensor axis does more than reorder: a region's sum over T ranks is T partial sums, each rounded to bf16, and one
device's matmul, which adds in fp32, rounds once. So the runs that set the bound round there too (`PartialSums`): as
right as a figure in bf16 with T parts can be, without any of the code under test. With them the distance of all
gradients is 0.9 to 1.3 of the largest of theirs (T = 2, 4; without them it is 3 to 4 times the reordered runs').

So does the context axis: what a query gets is merged of the parts that ranks computed, each rounded. Those runs attend
in as many parts (`partial_keys.py`); with them the distance is 0.5 to 1.0 of theirs (C = 2, 4; without 1.2 to 5.4).

And expert axes, where ranks hold parts of an expert or tokens cross to nodes once: `partial_experts.py`.

Where routers send tokens is judged by itself, and then followed on one device: `decisions.py` argues it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from heptad.verify.decisions import wrong_of
from heptad.verify.ranks import RankReport
from heptad.verify.reference import Figures, Reference

BOUNDS = {torch.float64: 1e-10, torch.float32: 1e-5}
BF16_ROUNDING = 2.0**-8
BF16_FACTOR = 2.0
BF16_SINGLE = 3.0
"""Of one gradient, and of the norm."""
ROUNDINGS = 8
"""Roundings of the model's largest gradient that are never an error of a small one."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Something beyond its bound. kind: output, score, choice, load, loss, gradient, norm, parameter, replicas."""

    step: int
    kind: str
    name: str
    error: float
    bound: float


class Judge:
    """One step's figures against the reference's, in the order the step makes them."""

    def __init__(self, step: int, reference: Reference, right: Figures) -> None:
        self.step, self.reference, self.right = step, reference, right
        self.found: list[Difference] = []
        self.errors: dict[str, float] = {}
        self.bf16 = reference.policy.params is torch.bfloat16
        narrow = reference.policy.reduce is torch.bfloat16  # sums and clipping themselves are rounded to bf16 then
        self.bound = BF16_FACTOR * BF16_ROUNDING if narrow else BOUNDS[reference.policy.master]
        self.others = reference.reordered(step) if self.bf16 else []
        self.ratio: float | None = None

    def _add(self, kind: str, name: str, error: float, bound: float) -> float:
        if not error <= bound:  # nan is beyond every bound
            self.found.append(Difference(self.step, kind, name, error, bound))
        return error

    def _number_bound(self, right: float, others: Sequence[float], factor: float = BF16_FACTOR) -> float:
        """Bound of the relative error of one number."""
        if not self.bf16:
            return self.bound
        spread = max(abs(other - right) for other in others) / max(abs(right), 1e-30)
        return factor * max(spread, BF16_ROUNDING)

    def outputs(self, reports: Sequence[RankReport]) -> None:
        """Fingerprints of the units' outputs, micro-batch by micro-batch, in the global order."""
        names = [unit.name for unit in self.reference.model.unit_specs]
        worst = [0.0] * len(names)
        seen: set[tuple[int, int]] = set()
        for data_rank, marks in _whole_marks(reports, self.step, self.reference.job.layout.sequence_parallel):
            for at, units in enumerate(marks, data_rank * len(marks)):
                seen |= {(at, unit) for unit in units}
                for unit, mark in units.items():
                    worst[unit] = max(worst[unit], _relative(mark, self.right.outputs[at][unit]))
        assert len(seen) == len(names) * len(self.right.outputs), "some unit ran on some micro-batch nowhere"
        for unit, (name, error) in enumerate(zip(names, worst, strict=True)):
            self._add("output", name, error, self._output_bound(unit))

    def _output_bound(self, unit: int) -> float:
        """A square doubles an error, so in bf16 two roundings are granted where gradients get one."""
        if not self.bf16:
            return self.bound
        right = self.right.outputs
        same = [other.outputs for other in self.others if len(other.outputs) == len(right)]
        spread = max(_relative(a[unit], b[unit]) for other in same for a, b in zip(other, right, strict=True))
        return BF16_FACTOR * max(spread, 2 * BF16_ROUNDING)

    def decisions(self) -> None:
        """In bf16, the scores and choices of every router, by themselves; `right` has followed them."""
        for name, right in self.right.decided.items():
            found, others = self.reference.given.get(name), [other.decided[name] for other in self.others]
            if found is None:
                self._add("choice", name, math.inf, 0.0)
                continue
            ruled = self.reference.ruled[name]
            for wrong in wrong_of(ruled, found, right, others, BF16_FACTOR, BF16_ROUNDING):
                self._add(wrong.kind, name, wrong.error, wrong.bound)

    def loads(self, reports: Sequence[RankReport]) -> None:
        """How many tokens each expert was chosen by and how many choices were dropped: whole numbers, the same ones in
        float64, and in bf16 where one device follows the layout's choices."""
        if self.reference.policy.params is torch.float32:
            return
        for name, counts in self.reference.loads.items():
            wrong = any(report.steps[self.step - 1].loads[name] != counts.tolist() for report in reports)
            self._add("load", name, math.inf if wrong else 0.0, 0.0)

    def loss(self, reports: Sequence[RankReport]) -> float:
        """The loss every rank reports, and those of its routers."""
        for at, name in enumerate(("balance_loss", "z_loss")):
            told = [getattr(report.steps[self.step - 1].result, name) or 0.0 for report in reports]
            wanted = self.right.added[at]
            bound = self._number_bound(wanted, [other.added[at] for other in self.others])
            self._add("loss", name, max(_relative(value, wanted) for value in told), bound)
        right = self.right.loss
        error = max(_relative(report.steps[self.step - 1].result.loss, right) for report in reports)
        return self._add("loss", "", error, self._number_bound(right, [other.loss for other in self.others]))

    def gradients(self, grads: dict[str, Tensor]) -> None:
        """Every gradient, in the backward's order: last parameter first."""
        assert set(grads) == set(self.right.grads), sorted(set(grads) ^ set(self.right.grads))
        if self.bf16:
            self._bf16_gradients(grads)
            return
        self._exact("gradient", grads, self.right.grads, reversed(list(self.right.grads)))

    def _exact(self, kind: str, found: dict[str, Tensor], right: dict[str, Tensor], names: Iterable[str]) -> None:
        sizes = {name: float(tensor.abs().max()) for name, tensor in right.items()}
        floor = torch.finfo(self.reference.policy.master).eps / self.bound * ROUNDINGS * max(sizes.values())
        for name in names:
            scale = max(sizes[name], floor, 1e-300)
            error = float((found[name].double() - right[name].double()).abs().max()) / scale
            error = error if math.isfinite(error) else math.inf
            self.errors[name] = max(self.errors.get(name, 0.0), error)
            self._add(kind, name, error, self.bound)

    def _bf16_gradients(self, grads: dict[str, Tensor]) -> None:
        mine, theirs, allowed = 0.0, 0.0, 0.0
        sizes = {name: _rms(grad.double()) for name, grad in self.right.grads.items()}
        largest = max(sizes.values())
        for name in reversed(list(self.right.grads)):
            right = self.right.grads[name].double()
            noise = max(_rms(other.grads[name].double() - right) for other in self.others)
            distance = _rms(grads[name].double() - right)
            distance = distance if math.isfinite(distance) else math.inf
            mine += distance**2 * right.numel()
            theirs += noise**2 * right.numel()
            allowed += max(noise, BF16_ROUNDING * sizes[name]) ** 2 * right.numel()
            scale, bound = granted(sizes[name], noise, largest)
            self.errors[name] = distance / scale
            self._add("gradient", name, distance / scale, bound)
        self.ratio = math.sqrt(mine / theirs) if theirs else 0.0
        self._add("gradient", "all together", math.sqrt(mine / allowed) if allowed else 0.0, BF16_FACTOR)

    def norm(self, reports: Sequence[RankReport], grads: dict[str, Tensor]) -> float:
        """The norm every rank reports, against the reference's and against that of the layout's own gradients."""
        own = math.sqrt(sum(float(grad.double().square().sum()) for grad in grads.values()))
        told = [report.steps[self.step - 1].result.grad_norm for report in reports]
        error = max(_relative(norm, self.right.norm) for norm in told)
        bound = self._number_bound(self.right.norm, [other.norm for other in self.others], BF16_SINGLE)
        self._add("norm", "", error, bound)
        self._add("norm", "of the same gradients", max(_relative(norm, own) for norm in told), self.bound)
        return error

    def parameters(self, params: dict[str, Tensor]) -> None:
        """Every parameter after the update from the same gradients, and the biases of routers after the same loads;
        frozen ones must not have moved."""
        right = self.reference.state()
        assert set(params) == set(right), sorted(set(params) ^ set(right))
        self._exact("parameter", params, right, right)

    def replicas(self, split: Sequence[str], what: str) -> None:
        """Ranks that hold the same elements hold the same bits."""
        for name in split:
            self._add("replicas", f"{what} of {name}", math.inf, 0.0)


def granted(size: float, noise: float, largest: float) -> tuple[float, float]:
    """Scale of a gradient in bf16, and the bound of its distance over it. size, largest: root mean square of it and of
    the model's largest one; noise: distance of the reordered runs."""
    rounding = BF16_ROUNDING * largest
    floor = rounding if size <= max(BF16_FACTOR * noise, rounding) else 0.0
    scale = max(size, floor, 1e-30)
    return scale, max(BF16_SINGLE * max(noise / scale, BF16_ROUNDING), floor / scale)


Marks = list[dict[int, float]]
"""[micro-batch][unit]: a fingerprint, of the units that ran there."""


def _whole_marks(reports: Sequence[RankReport], step: int, sequence: bool) -> list[tuple[int, Marks]]:
    """Each rank's data rank and fingerprints of whole outputs.

    Context ranks have rows of each, with `sequence` tensor ranks too: theirs are added up. The last unit's output is
    the loss of own tokens: context ranks' are added up, tensor ranks all have it.
    """
    found = [(_place(report), report.steps[step - 1].outputs) for report in reports]
    last = max(unit for _, marks in found for units in marks for unit in units)

    def whole(place: tuple[int, int, int], at: int, unit: int) -> float:
        data_rank, pp, tp = place
        same = [
            marks[at][unit]
            for other, marks in found
            if other[:2] == (data_rank, pp) and (other[2] == tp or (sequence and unit != last))
        ]
        return sum(same) ** 2 if unit == last else sum(same)

    return [
        (place[0], [{unit: whole(place, at, unit) for unit in units} for at, units in enumerate(marks)])
        for place, marks in found
    ]


def _place(report: RankReport) -> tuple[int, int, int]:
    return report.data_rank, report.coords["pp"], report.coords["tp"]


def _relative(value: float, right: float) -> float:
    error = abs(value - right) / max(abs(right), 1e-30)
    return error if math.isfinite(error) else math.inf


def _rms(tensor: Tensor) -> float:
    return math.sqrt(float(tensor.square().mean()))
