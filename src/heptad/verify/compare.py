"""A layout against one device, step by step: loss, every gradient, gradient norm, parameters, replicas, traffic.

Gradients and parameters are put together from the ranks' pieces: they must cover every element exactly once per
replica, and replicas must agree bit for bit. Read next: `judge.py` (which difference is too large).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from heptad.account.traffic import step_traffic
from heptad.axes.expert.flow import Routed
from heptad.axes.program import microbatches_of, recomputed, stages_of
from heptad.config.schema import Job
from heptad.mesh.layout import BLOCK, Layout
from heptad.mesh.piece import Piece
from heptad.trace import total
from heptad.verify.decisions import Decisions
from heptad.verify.judge import Difference, Judge
from heptad.verify.ranks import RankReport, pieces_of
from heptad.verify.reference import Reference
from heptad.verify.stale import stack


@dataclass(frozen=True, slots=True)
class Comparison:
    """`differences` in program order within a step.

    relative_error: by parameter, the worst of its gradients' and its values'. reorder_ratio: bf16 only, distance of all
    gradients to the reference over the reordered runs' own (else None).
    predicted, counted: one entry a kind, of one rank's applied step; traffic_matches: on every rank and step.
    """

    differences: list[Difference]
    relative_error: dict[str, float]
    loss_error: float
    norm_error: float
    predicted: Counts
    counted: Counts
    traffic_matches: bool
    losses: list[float]
    reorder_ratio: float | None

    @property
    def ok(self) -> bool:
        """Whether everything agrees."""
        return not self.differences and self.traffic_matches

    @property
    def worst(self) -> tuple[str, float]:
        """The parameter with the largest relative error."""
        return max(self.relative_error.items(), key=lambda item: item[1])


def compare(job: Job, reference: Reference, reports: Sequence[RankReport], steps: int) -> Comparison:
    """Run `reference` (fresh) beside the recorded steps of a layout of the same job."""
    found: list[Difference] = []
    errors: dict[str, float] = {}
    losses, loss_error, norm_error, ratio = [], 0.0, 0.0, None
    for step in range(1, steps + 1):
        grads, split, updates = _gradients(reports, step)
        reference.take(_decided(reports, step))
        judge = Judge(step, reference, reference.follow(step, updates))
        judge.outputs(reports)
        judge.loads(reports)
        judge.decisions()
        loss_error = max(loss_error, judge.loss(reports))
        judge.gradients(grads)
        judge.replicas(split, "gradient")
        norm_error = max(norm_error, judge.norm(reports, grads))
        params, split = assemble(pieces_of(reports, step, "params"))
        if judge.right.num_targets and all(math.isfinite(float(grad.double().sum())) for grad in grads.values()):
            reference.update(step, grads)
        judge.parameters(params)
        judge.replicas(split, "parameter")
        if judge.bf16 and not any(item.kind == "parameter" for item in judge.found):
            reference.adopt(params)
        found += judge.found
        losses.append(judge.right.loss)
        ratio = judge.ratio if ratio is None else max(ratio, judge.ratio or 0.0)
        for name, error in judge.errors.items():
            errors[name] = max(errors.get(name, 0.0), error)
    predicted, counted, matches = _traffic(job, reference, reports)
    return Comparison(found, errors, loss_error, norm_error, predicted, counted, matches, losses, ratio)


def _gradients(
    reports: Sequence[RankReport], step: int
) -> tuple[dict[str, Tensor], list[str], list[dict[str, Tensor]]]:
    """The step's gradients, names whose replicas differ, and the gradients of each update inside the step, if any: then
    those of the step are all of these (`stale.py`)."""
    numbers = {len(report.steps[step - 1].updates) for report in reports}
    assert len(numbers) == 1, "some stage was updated more often than another"
    number = numbers.pop()
    if not number:
        return *assemble(pieces_of(reports, step, "grads")), []
    each = [assemble([report.steps[step - 1].updates[at] for report in reports]) for at in range(number)]
    updates = [grads for grads, _ in each]
    return stack(updates), sorted({name for _, split in each for name in split}), updates


def _decided(reports: Sequence[RankReport], step: int) -> dict[str, Decisions]:
    """What the layout's routers decided, of all tokens; in bf16."""
    parts: dict[str, list[Decisions]] = {}
    for report in reports:
        for name, found in report.steps[step - 1].decided.items():
            parts.setdefault(name, []).append(found)
    return {name: Decisions.joined(found) for name, found in parts.items()}


Counts = dict[tuple[str, str, str], tuple[int, int]]
"""(axis, op, phase) -> (count, bytes)."""


def predicted_traffic(
    job: Job, reference: Reference, place: int = 0, without_target: int = 0, routed: Routed | None = None
) -> Counts:
    """What one rank at `place` along the pipeline sends in one step; without_target, routed: see `step_traffic`."""
    units = reference.model.unit_specs
    again = recomputed(job, units, stages_of(job, units))
    found = step_traffic(job, units, reference.specs, again, place=place, without_target=without_target, routed=routed)
    return total(found)


def _traffic(job: Job, reference: Reference, reports: Sequence[RankReport]) -> tuple[Counts, Counts, bool]:
    """Predicted and counted of one rank and step, and whether they are the same on all: the first that differs is
    shown, else the last rank's last step."""

    layout, spread = Layout.of(job.layout), job.layout.ep * job.layout.etp > 1

    @cache
    def at(place: int, updates: int, rank: int, step: int) -> Counts:
        routed = None
        if spread:
            block = sorted(layout.group_of(rank, BLOCK))
            routed = Routed(block.index(rank), [reports[other].steps[step].calls for other in block])
        return predicted_traffic(job, reference, place, microbatches_of(job) - updates if updates else 0, routed)

    both = [
        (at(report.coords["pp"], len(step.updates), *((rank, number) if spread else (0, 0))), total(step.transfers))
        for rank, report in enumerate(reports)
        for number, step in enumerate(report.steps)
    ]
    differ = [pair for pair in both if pair[0] != pair[1]]
    return *(differ or both[-1:])[0], not differ


def assemble(ranks: Sequence[Sequence[Piece]]) -> tuple[dict[str, Tensor], list[str]]:
    """Whole tensors from every rank's pieces, and the names whose replicas differ in some bit (the first is taken).

    Asserts that the distinct ranges of each name tile it, each held by as many ranks as the others.
    """
    copies: dict[str, dict[tuple[int, int], list[Tensor]]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for pieces in ranks:
        for piece in pieces:
            shapes[piece.name] = piece.shape
            held = copies.setdefault(piece.name, {})
            if piece.start < piece.stop:
                held.setdefault((piece.start, piece.stop), []).append(piece.tensor)
    whole, split = {}, []
    for name, held in copies.items():
        at = 0
        for start, stop in sorted(held):
            assert start == at, f"{name}: elements [{at}, {start}) are held by no rank or by two"
            at = stop
        assert at == math.prod(shapes[name]), f"{name}: elements from {at} on are held by no rank"
        assert len({len(tensors) for tensors in held.values()}) == 1, f"{name}: some ranges have more replicas"
        if any(not _same_bits(tensors[0], other) for tensors in held.values() for other in tensors[1:]):
            split.append(name)
        whole[name] = torch.cat([held[key][0] for key in sorted(held)]).view(shapes[name])
    return whole, split


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))
