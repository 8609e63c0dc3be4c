"""What must be equal on ranks is compared once, at the start: the tokens behind the loaders, the replicas' weights,
the step's program.

Replicas that start apart train apart and nobody notices: nothing averages weights (C-024); a node that tokenised other
files reads other samples (C-131). Two all-reduces of one int64 for each of them, phase "check". Read next: `loop.py`.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from heptad.axes.data.stages import replica_axes
from heptad.mesh.collectives import Group, all_reduce
from heptad.schedule.action import format_program
from heptad.train.step import Trainer

CHUNK = 1 << 20


class Disagreement(RuntimeError):
    """Ranks hold different values of what must be one."""


def require_same(what: str, digest: int, group: Group, device: torch.device, hint: str) -> None:
    """Raises Disagreement on every rank of `group` unless all have the same `digest` (below 2^63) of `what`."""
    low, high = torch.tensor(digest, device=device), torch.tensor(digest, device=device)
    all_reduce(low, group, "check", "min").wait()
    all_reduce(high, group, "check", "max").wait()
    if int(low) != int(high):
        raise Disagreement(f"{what} differ between ranks {', '.join(map(str, group.ranks))}: {hint}")


def require_same_replicas(trainer: Trainer) -> None:
    """Every copy of a shard starts with the same bits."""
    group = trainer.mesh.group(*replica_axes(trainer.job.layout.zero))
    digest = 0
    for shard in trainer.engine.shards:
        digest = (digest * 1_000_003 + fingerprint(shard.master)) % (1 << 61)
    require_same("replicas' weights", digest, group, trainer.device, "a copy was changed before the first step")


def require_same_program(trainer: Trainer) -> None:
    """Every rank of the data axis runs the same program: collectives of a group in one order, or values mix (gloo)."""
    digest = digest_of(format_program(trainer.program))
    require_same(
        "the step's programs", digest, trainer.loss_group, trainer.device, "start every rank with the same job"
    )


def digest_of(text: str) -> int:
    """61 bits of a hash of `text`."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 3


def fingerprint(tensor: Tensor) -> int:
    """A number that changes when any bit or the order of the chunks of `tensor` (1-D) does."""
    found = 0
    for chunk in tensor.detach().split(CHUNK) if tensor.numel() else ():
        bits = chunk.contiguous().view(torch.int32 if chunk.element_size() % 4 == 0 else torch.int16).to(torch.int64)
        weights = torch.arange(1, 2 * bits.numel(), 2, device=bits.device)
        found = (found * 1_000_003 + int((bits * weights).sum())) % (1 << 61)
    return found
