"""Muon: momentum, then the nearest (semi-)orthogonal matrix as the update. Whole matrices under every stage.

Momentum is kept as flat shards and costs half of AdamW's state. The update of a matrix needs all of it, so a matrix
that is cut over ranks, whichever axes cut it, is assembled by the all-gathers of `cost.py` (phase "update"), the next
round's under way while this one's matrices are orthogonalised; each rank works only on matrices it holds a part of and
keeps its part of the result. A part that several ranks hold is sent by its owner and updated by all of them, from the
same bits. A matrix that is stored input first is updated as its transpose. Of a stack of experts each is a matrix; they
are updated one after the other, since a batched product rounds otherwise when the batch is another (docs/log.md).
Arithmetic is in the master's dtype, fp32 or fp64, so the update is the single process's bit for bit. Source: Keller
Jordan et al., https://kellerjordan.github.io/posts/muon/ (coefficients, Nesterov, 5 iterations, scale
max(1, rows/columns)^½; torch.optim.Muon's "original"). Decay is decoupled: w ← (1 - lr·decay)·w - lr·scale·O.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from heptad.axes.data.shard import Shard
from heptad.config.schema import OptimizerSection
from heptad.mesh.collectives import Group, Work, all_gather
from heptad.optim.cost import Ranges, experts_of, gather_rounds, matrices

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
NORM_FLOOR = 1e-7


def orthogonalise(matrix: Tensor) -> Tensor:
    """Newton–Schulz quintic iteration on `matrix` [m, n], in its own dtype.

    Singular values end in about [0.7, 1.2]. Cost: 5·(4·m·n·k + 2·k³) FLOPs with k = min(m, n).
    """
    a, b, c = COEFFICIENTS
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / x.norm().clamp(min=NORM_FLOOR)
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if matrix.shape[0] > matrix.shape[1] else x


@dataclass(frozen=True, slots=True)
class _Matrix:
    """A matrix of a parameter, from its element `first` on; elements [start, stop) are here, in the shard at `at`.

    ranges: on every rank of the shard's group, as `cost.matrices` gives them.
    """

    at: int
    first: int
    start: int
    stop: int
    ranges: Ranges


@dataclass(frozen=True, slots=True)
class _Gather:
    """A round of `team`, whose ranks have these places in the shards' group."""

    team: Group
    places: Sequence[int]
    members: tuple[_Matrix, ...]
    width: int


class Muon:
    """Muon over flat shards of 2-D parameters and of stacks of experts; state `muon_momentum`."""

    def __init__(self, shards: Sequence[Shard], section: OptimizerSection, weight_decay: float) -> None:
        self.shards, self.weight_decay, self._momentum = list(shards), weight_decay, section.muon_momentum
        self.state = {"muon_momentum": [torch.zeros_like(shard.master) for shard in self.shards]}
        self._rounds: list[_Gather] = []
        self._whole: list[_Matrix] = []
        for members in self._by_group():
            found = [matrix for own in self._by_parameter(members) for matrix in self._matrices(own)]
            first = self.shards[members[0]]
            rounds = gather_rounds([matrix.ranges for matrix in found], first.teams)
            if rounds:
                assert first.group is not None
                team = first.team or first.group
                places = [first.group.ranks.index(rank) for rank in team.ranks]
                for item in rounds:
                    self._rounds.append(_Gather(team, places, tuple(found[at] for at in item.members), item.width))
            gathered = {at for item in rounds for at in item.members}
            own = [matrix for at, matrix in enumerate(found) if at not in gathered]
            self._whole += [matrix for matrix in own if matrix.start < matrix.stop]

    def _by_group(self) -> list[list[int]]:
        found: dict[int, list[int]] = {}
        for at, shard in enumerate(self.shards):
            found.setdefault(id(shard.group), []).append(at)
        return list(found.values())

    def _by_parameter(self, members: Sequence[int]) -> list[list[int]]:
        found: dict[str, list[int]] = {}
        for at in members:
            found.setdefault(self.shards[at].spec.name, []).append(at)
        return list(found.values())

    def _matrices(self, members: Sequence[int]) -> list[_Matrix]:
        """Of one parameter, whose shards here are `members`: one for each of its runs."""
        shards = [self.shards[at] for at in members]
        spec, group, teams = shards[0].spec, shards[0].group, shards[0].teams
        runs = [((shard.start, shard.stop),) if group is None else shard.ranges for shard in shards]
        found = matrices(spec, runs, teams)
        if len(spec.shape) == 2:
            (ranges,), (shard,) = found, shards  # of a copy, what is here is no one's range
            return [_Matrix(members[0], 0, shard.start, shard.stop, ranges)]
        place = 0 if group is None else group.index
        own = next((team for team, places in enumerate(teams) if place in places), 0)
        first, size, parts = own * experts_of(spec, teams), spec.numel // spec.shape[0], list[_Matrix]()
        for number, ranges in enumerate(found, first):
            start, stop = ranges[place]
            holding = (at for at, shard in zip(members, shards, strict=True) if shard.start <= start < shard.stop)
            parts.append(_Matrix(next(holding, members[0]), number * size, start, stop, ranges))
        return parts

    def update(self, lr: float, num_updates: int) -> None:
        """One update; Muon itself counts nothing."""
        with torch.no_grad():
            under_way = self._start(0)
            for matrix in self._whole:
                self._apply(matrix, self._direction(matrix), lr)
            for number, item in enumerate(self._rounds):
                assert under_way is not None
                (work, full), under_way = under_way, self._start(number + 1)
                work.wait()
                self._apply_round(item, full, lr)
                work.wait_sent()

    def _own(self, matrix: _Matrix) -> slice:
        """Where its elements here lie in their shard."""
        start = self.shards[matrix.at].start
        return slice(matrix.start - start, matrix.stop - start)

    def _direction(self, matrix: _Matrix) -> Tensor:
        """Nesterov direction of the local part; advances the momentum: m ← μ·m + (1-μ)·g, u = (1-μ)·g + μ·m."""
        own = self._own(matrix)
        momentum = self.state["muon_momentum"][matrix.at][own]
        grad = self.shards[matrix.at].gradient()[own].to(momentum.dtype)
        momentum.lerp_(grad, 1 - self._momentum)
        return grad.lerp(momentum, self._momentum)

    def _start(self, number: int) -> tuple[Work, Tensor] | None:
        """Send this rank's parts of a round, packed in order and padded to the round's width."""
        if number >= len(self._rounds):
            return None
        item = self._rounds[number]
        packed = self.shards[item.members[0].at].master.new_zeros(item.width)
        filled = 0
        for matrix in item.members:
            if matrix.start == matrix.stop:
                continue
            part = self._direction(matrix)  # on every holder: replicas keep the same momentum
            if self.shards[matrix.at].owner:
                packed[filled : filled + part.numel()] = part
                filled += part.numel()
        full = packed.new_empty(item.team.size * item.width)
        return all_gather(full, packed, item.team, "update"), full

    def _apply_round(self, item: _Gather, full: Tensor, lr: float) -> None:
        """Assemble each matrix this rank holds a part of, from every rank's packed parts."""
        packed = full.view(-1, item.width)
        filled = [0] * packed.shape[0]
        for matrix in item.members:
            parts = {}
            for rank, place in enumerate(item.places):
                start, stop = matrix.ranges[place]
                if start < stop:
                    parts[start] = packed[rank, filled[rank] : filled[rank] + stop - start]
                    filled[rank] += stop - start
            if matrix.start < matrix.stop:  # ranks of two axes do not lie in the tensor's order
                self._apply(matrix, torch.cat([parts[start] for start in sorted(parts)]), lr)

    def _apply(self, matrix: _Matrix, direction: Tensor, lr: float) -> None:
        """`direction` is the whole flattened matrix; the local part of its orthogonal form moves the master."""
        shard = self.shards[matrix.at]
        stored = direction.view(shard.spec.shape[-2:])
        if shard.spec.input_first:
            rows, columns = stored.T.shape
            whole = orthogonalise(stored.T.contiguous()).T  # the bits of one that is stored (out, in)
        else:
            rows, columns = stored.shape
            whole = orthogonalise(stored)
        update = whole.reshape(-1)[matrix.start - matrix.first : matrix.stop - matrix.first]
        master = shard.master[self._own(matrix)]
        master.mul_(1 - lr * self.weight_decay)
        master.add_(update, alpha=-lr * max(1.0, rows / columns) ** 0.5)
