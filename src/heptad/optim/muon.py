"""Muon: momentum, then the nearest (semi-)orthogonal matrix as the update. Whole matrices under every stage.

Momentum is kept as flat shards and costs half of AdamW's state. The update of a matrix needs all of it, so a matrix
that is cut over ranks, whichever axes cut it, is assembled by the all-gathers of `cost.py` (phase "update"), the next
round's under way while this one's matrices are orthogonalised; each rank works only on matrices it holds a part of and
keeps its part of the result. A part that several ranks hold is sent by its owner and updated by all of them, from the
same bits. A matrix that is stored input first is updated as its transpose. Arithmetic is in the master's dtype, fp32 or
fp64, so the update is the single process's bit for bit. Source: Keller Jordan et al.,
https://kellerjordan.github.io/posts/muon/ (coefficients, Nesterov, 5 iterations, scale max(1, rows/columns)^½;
torch.optim.Muon's "original"). Decay is decoupled: w ← (1 - lr·decay)·w - lr·scale·O.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from heptad.axes.data.shard import Shard
from heptad.config.schema import OptimizerSection
from heptad.mesh.collectives import Group, Work, all_gather
from heptad.optim.cost import Round, gather_rounds

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


class Muon:
    """Muon over flat shards of 2-D parameters; state `muon_momentum`."""

    def __init__(self, shards: Sequence[Shard], section: OptimizerSection, weight_decay: float) -> None:
        assert all(len(shard.spec.shape) == 2 for shard in shards), "Muon updates matrices"
        self.shards, self.weight_decay, self._momentum = list(shards), weight_decay, section.muon_momentum
        self.state = {"muon_momentum": [torch.zeros_like(shard.master) for shard in self.shards]}
        self._rounds: list[tuple[Group, Round]] = []
        for group, members in self._by_group():
            for item in gather_rounds([self.shards[at].ranges for at in members]):
                self._rounds.append((group, Round(tuple(members[at] for at in item.members), item.width)))
        gathered = {at for _, item in self._rounds for at in item.members}
        self._whole = [at for at, shard in enumerate(self.shards) if at not in gathered and shard.start < shard.stop]

    def _by_group(self) -> list[tuple[Group, list[int]]]:
        found: dict[int, tuple[Group, list[int]]] = {}
        for at, shard in enumerate(self.shards):
            if shard.group is not None:
                found.setdefault(id(shard.group), (shard.group, []))[1].append(at)
        return list(found.values())

    def update(self, lr: float, num_updates: int) -> None:
        """One update; Muon itself counts nothing."""
        with torch.no_grad():
            under_way = self._start(0)
            for at in self._whole:
                self._apply(at, self._direction(at), lr)
            for number, (_, item) in enumerate(self._rounds):
                assert under_way is not None
                (work, full), under_way = under_way, self._start(number + 1)
                work.wait()
                self._apply_round(item, full, lr)
                work.wait_sent()

    def _direction(self, at: int) -> Tensor:
        """Nesterov direction of the local part; advances the momentum: m ← μ·m + (1-μ)·g, u = (1-μ)·g + μ·m."""
        momentum = self.state["muon_momentum"][at]
        grad = self.shards[at].gradient().to(momentum.dtype)
        momentum.lerp_(grad, 1 - self._momentum)
        return grad.lerp(momentum, self._momentum)

    def _start(self, number: int) -> tuple[Work, Tensor] | None:
        """Send this rank's parts of a round, packed in order and padded to the round's width."""
        if number >= len(self._rounds):
            return None
        group, item = self._rounds[number]
        packed = self.shards[item.members[0]].master.new_zeros(item.width)
        filled = 0
        for at in item.members:
            part = self._direction(at)  # on every holder: replicas keep the same momentum
            if self.shards[at].owner:
                packed[filled : filled + part.numel()] = part
                filled += part.numel()
        full = packed.new_empty(group.size * item.width)
        return all_gather(full, packed, group, "update"), full

    def _apply_round(self, item: Round, full: Tensor, lr: float) -> None:
        """Assemble each matrix this rank holds a part of, from every rank's packed parts."""
        packed = full.view(-1, item.width)
        filled = [0] * packed.shape[0]
        for at in item.members:
            parts = {}
            for rank, (start, stop) in enumerate(self.shards[at].ranges):
                if start < stop:
                    parts[start] = packed[rank, filled[rank] : filled[rank] + stop - start]
                    filled[rank] += stop - start
            if self.shards[at].start < self.shards[at].stop:  # ranks of two axes do not lie in the tensor's order
                self._apply(at, torch.cat([parts[start] for start in sorted(parts)]), lr)

    def _apply(self, at: int, direction: Tensor, lr: float) -> None:
        """`direction` is the whole flattened matrix; the local part of its orthogonal form moves the master."""
        shard = self.shards[at]
        matrix = direction.view(shard.spec.shape)
        if shard.spec.input_first:
            rows, columns = matrix.T.shape
            whole = orthogonalise(matrix.T.contiguous()).T  # the bits of one that is stored (out, in)
        else:
            rows, columns = matrix.shape
            whole = orthogonalise(matrix)
        update = whole.reshape(-1)[shard.start : shard.stop]
        shard.master.mul_(1 - lr * self.weight_decay)
        shard.master.add_(update, alpha=-lr * max(1.0, rows / columns) ** 0.5)
