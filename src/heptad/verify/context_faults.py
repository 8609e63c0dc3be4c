"""Faults of the context axis, after bugs that were made in the field.

Labels, positions and padding that do not follow the one permutation; merging that counts what was never seen; hops and
gradients of hops that are left out; a loss that is scaled by the number of ranks. Read next: `fault.py` (what a fault
is), `faults.py` (all of them), `axes/context/take.py`, `axes/context/ring.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from heptad.axes.context import apply as context
from heptad.axes.context import gather, ring, ulysses
from heptad.axes.context.blocks import Block
from heptad.axes.context.local import Local
from heptad.axes.context.merge import Partial
from heptad.axes.context.take import PADDING
from heptad.config.context import cuts_for_balance, degrees, sent_kv_heads
from heptad.config.schema import Job, LayoutSection
from heptad.mesh.collectives import Group
from heptad.models.batch import IGNORED, Batch
from heptad.train import step as step_module
from heptad.train.step import Trainer
from heptad.verify.fault import Fault, FaultKind

# Where faults live


def _where(rule: Callable[[Job], bool], why: str) -> Callable[[Job], tuple[str, ...] | str]:
    """On the context axis, where `rule` holds of the job; else `why` not."""

    def home(job: Job) -> tuple[str, ...] | str:
        if job.layout.cp == 1:
            return "the sequence is whole (layout.cp = 1)"
        return ("cp",) if rule(job) else why

    return home


def _permuted(job: Job) -> bool:
    return cuts_for_balance(job.layout) and job.layout.context_split == "zigzag"


def _hops(job: Job) -> bool:
    return job.layout.context != "gather" and degrees(job.layout)[0] > 1


def _copies(job: Job) -> bool:
    """Kv heads are sent to several ranks that deal heads."""
    assert job.model.kv_heads is not None, "the job is resolved"
    tp, dealt = job.layout.tp, degrees(job.layout)[1]
    own = max(job.model.kv_heads // tp, 1)
    return sent_kv_heads(job.model.heads // tp, own, dealt) > own


_NO_HOPS = "no keys go round (layout.context, layout.cp_ulysses)"


# What they do


def _take_otherwise(change: Callable[[Batch, Batch, int], dict[str, Tensor]]) -> None:
    """The part of a batch that a rank takes, with what `change` (whole, part, rank) gives in place of its own."""
    right = vars(step_module)["take"]  # maybe wrong already: two faults

    def wrong(batch: Batch, layout: LayoutSection, rank: int, depths: int = 0) -> Batch:
        part: Batch = right(batch, layout, rank, depths)
        return part if part is batch else replace(part, **change(batch, part, rank))  # type: ignore[arg-type]

    setattr(step_module, "take", wrong)  # noqa: B010


def _shifted_late(fault: Fault, trainer: Trainer) -> None:
    def change(whole: Batch, part: Batch, rank: int) -> dict[str, Tensor]:
        following = torch.cat([part.ids[:, 1:], part.ids.new_full((len(part.ids), 1), IGNORED)], dim=1)
        return {"labels": torch.where(part.labels == IGNORED, IGNORED, following)}

    _take_otherwise(change)


def _plain_positions(fault: Fault, trainer: Trainer) -> None:
    def change(whole: Batch, part: Batch, rank: int) -> dict[str, Tensor]:
        size = part.ids.shape[1]
        found = whole.positions[:, rank * size : (rank + 1) * size]
        missing = torch.arange(size - found.shape[1]).expand(len(found), -1)
        return {"positions": torch.cat([found, missing], dim=1)}

    _take_otherwise(change)


def _padding_counts(fault: Fault, trainer: Trainer) -> None:
    _take_otherwise(lambda whole, part, rank: {"labels": part.labels.masked_fill(part.index == PADDING, 0)})


class _Unseen(Partial):
    """Over no keys the log-sum-exp is 0, as torch's kernel says, not -inf."""

    def __init__(self, q: Tensor) -> None:
        super().__init__(q)
        self.lse.zero_()


def _unseen_counts(fault: Fault, trainer: Trainer) -> None:
    for module in (ring, gather):
        setattr(module, "Partial", _Unseen)  # noqa: B010


class _Forgetful(Local):
    """Leaves out the keys of the first hop."""

    def forward(self, q: Tensor, kv: Tensor, source: int, total: Partial) -> None:
        """See `Local.forward`."""
        if source != _first_hop(self):
            super().forward(q, kv, source, total)


class _Losing(Local):
    """Leaves out what the keys and values of the first hop are to get as a gradient."""

    def backward(
        self, saved: Sequence[Tensor], kv: Tensor, source: int, blocks: Sequence[Block], dq: Tensor, dkv: Tensor
    ) -> None:
        """See `Local.backward`."""
        lost = torch.zeros_like(dkv) if source == _first_hop(self) else dkv
        super().backward(saved, kv, source, blocks, dq, lost)


def _first_hop(local: Local) -> int:
    """Whose keys come first, besides one's own."""
    return (local.rank - 1) % local.placement.ring


def _around(kind: type[Local]) -> None:
    """The ring, of ranks that compute as `kind` does."""
    right = vars(context)["ring_attention"]

    def wrong(q: Tensor, kv: Tensor, local: Local, group: Group) -> Tensor:
        parts = (getattr(local, item.name) for item in fields(Local))
        out: Tensor = right(q, kv, kind(*parts) if group.size > 1 else local, group)
        return out

    setattr(context, "ring_attention", wrong)  # noqa: B010


def _hop_forgotten(fault: Fault, trainer: Trainer) -> None:
    _around(_Forgetful)


def _kv_gradient_lost(fault: Fault, trainer: Trainer) -> None:
    _around(_Losing)


def _times_ranks(fault: Fault, trainer: Trainer) -> None:
    executor, number = trainer.parallel.executor, trainer.job.layout.cp
    right = executor.run

    def run(program: Any, batches: Any, scale: Callable[[int], float] = lambda _: 1.0, *args: Any, **named: Any) -> Any:
        return right(program, batches, lambda microbatch: number * scale(microbatch), *args, **named)

    setattr(executor, "run", run)  # noqa: B010


def _copies_not_summed(fault: Fault, trainer: Trainer) -> None:
    def first_copy(grad: Tensor, dealt: tuple[int, ...], kv_heads: int) -> Tensor:
        return grad[:, [dealt.index(head) for head in range(kv_heads)]]

    setattr(ulysses, "_summed", first_copy)  # noqa: B010


CONTEXT: dict[str, FaultKind] = {
    "shifted_late": FaultKind(
        "labels are shifted after the split: a target across an edge is lost or another token",
        _where(lambda job: True, ""),
        _shifted_late,
    ),
    "plain_positions": FaultKind(
        "positions are cut in plain order, tokens in zigzag",
        _where(_permuted, "tokens lie in plain order (layout.context, layout.context_split)"),
        _plain_positions,
    ),
    "padding_counts": FaultKind(
        "what fills up a row to a multiple of the ranks is a target",
        _where(
            lambda job: job.data.seq_len % job.layout.cp > 0, "no row is filled up (layout.cp divides data.seq_len)"
        ),
        _padding_counts,
    ),
    "unseen_counts": FaultKind(
        "a query that saw no key yet has log-sum-exp 0, not -inf",
        _where(lambda job: True, ""),
        _unseen_counts,
    ),
    "hop_forgotten": FaultKind(
        "the keys of the first hop are not attended to", _where(_hops, _NO_HOPS), _hop_forgotten
    ),
    "kv_gradient_lost": FaultKind(
        "the gradient of the keys and values of the first hop does not come home",
        _where(_hops, _NO_HOPS),
        _kv_gradient_lost,
    ),
    "dealt_kv_not_summed": FaultKind(
        "of a kv head that several ranks got, one copy's gradient is kept",
        _where(_copies, "no kv head is sent twice (layout.context, model.kv_heads)"),
        _copies_not_summed,
    ),
    "times_context_ranks": FaultKind(
        "the gradient of the loss is multiplied by the number of context ranks",
        _where(lambda job: True, ""),
        _times_ranks,
    ),
}
