"""What must be equal on ranks is compared: the tokens behind the loaders, the step's program, the replicas' values.

Replicas that part train apart and nobody notices: nothing averages weights (C-024), and a tensor rank that lacks a
part of a norm's gradient moves only its own copy (C-036); a node that tokenised other files reads other samples
(C-131). Tokens and program are compared once, at the start; replicas then and before every checkpoint, weights and
optimizer state. All in phase "check": two all-reduces of one int64; for replicas two all-reduces of one int64 a tensor
over the ranks that hold the same shard, a gather of three over the tensor axis (which part, and what is there), one of
four along the pipeline, whose ranks may hold the same parameter (a tied head, DualPipe's twins), and one int64 over all
ranks. Where there is one copy nothing is sent and no bit is read. Read next: `loop.py`, `state.py`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from heptad.axes.data.stages import replica_axes
from heptad.mesh.collectives import Group, all_gather, all_reduce
from heptad.mesh.piece import Piece
from heptad.models.cut import family_of
from heptad.schedule.action import format_program
from heptad.train.step import Trainer

CHUNK = 1 << 20
NOTHING = 1 << 62
"""More than any code of a difference."""


class Disagreement(RuntimeError):
    """Ranks hold different values of what must be one."""


def require_same(what: str, digest: int, group: Group, device: torch.device, hint: str) -> None:
    """Raises Disagreement on every rank of `group` unless all have the same `digest` (below 2^63) of `what`."""
    if _differ([digest], group, device):
        raise Disagreement(f"{what} differ between ranks {', '.join(map(str, group.ranks))}: {hint}")


def require_same_replicas(trainer: Trainer) -> None:
    """Every copy of a part of a parameter, and of its optimizer state, has the same bits; else Disagreement on every
    rank, naming the tensor. Collective over all ranks; at the start and between any two steps.

    Copies are what the ranks of the replica axes hold, and what several tensor ranks hold of the same elements: norms,
    biases behind a sum, kv heads that are fewer than ranks; and what two stages of a pipeline hold.
    """
    layout, device = trainer.mesh.layout, trainer.device
    tensor = trainer.mesh.group("tp")
    if layout.degree(*replica_axes(trainer.job.layout.zero), "tp", "pp") == 1:
        return
    pieces = trainer.pieces()
    prints = [fingerprint(piece.tensor) for piece in pieces]
    apart = _copies(trainer, pieces, prints)
    held = [(piece.start, piece.stop, value) for piece, value in zip(pieces, prints, strict=True)]
    apart += [(at, tensor.ranks[index]) for at, index in _parted(_gathered(held, tensor, device))]
    pipeline, place = trainer.mesh.group("pp"), layout.coords(trainer.rank)["pp"]
    named = [(digest_of(piece.name), *rest) for piece, rest in zip(pieces, held, strict=True)]
    apart += [(at, pipeline.ranks[index]) for at, index in _parted_along(named, pipeline, device)]
    codes = [(at * layout.world + rank) * pipeline.size + place for at, rank in apart]
    first = torch.tensor(min(codes, default=NOTHING), device=device)
    all_reduce(first, trainer.loss_group, "check", "min").wait()
    if int(first) < NOTHING:
        code, found_at = divmod(int(first), pipeline.size)
        at, rank = divmod(code, layout.world)
        name = pieces[at].name if found_at == place else f"a tensor at place {found_at} of the pipeline"
        raise Disagreement(
            f"replicas of {name} differ between rank {rank} and others that hold the same part of it: a "
            "copy was changed alone, by other code, by memory, or by a gradient that was not summed over all of them"
        )


def _copies(trainer: Trainer, pieces: Sequence[Piece], prints: Sequence[int]) -> list[tuple[int, int]]:
    """(place in `pieces`, a rank) for each that differs between the ranks that hold copies of its family's shards."""
    family = {spec.name: family_of(spec) for spec in trainer.parallel.model.specs}
    kinds = [family.get(piece.name.rpartition("/")[2], "dense") for piece in pieces]
    found = []
    for kind in dict.fromkeys(kinds):
        group = trainer.mesh.group(*replica_axes(trainer.job.layout.zero, kind))
        own = [at for at, other in enumerate(kinds) if other == kind]
        found += [(own[at], group.ranks[0]) for at in _differ([prints[at] for at in own], group, trainer.device)]
    return found


def _differ(digests: Sequence[int], group: Group, device: torch.device) -> list[int]:
    """Places at which the ranks of `group` have different numbers: equal on all of them."""
    if group.size == 1 or not digests:
        return []
    low, high = (torch.tensor(digests, dtype=torch.int64, device=device) for _ in range(2))
    all_reduce(low, group, "check", "min").wait()
    all_reduce(high, group, "check", "max").wait()
    return (low != high).nonzero().flatten().tolist()


Held = tuple[int, int, int]
"""Range [start, stop) of a tensor that a rank holds, and the fingerprint of what it has there."""


def _gathered(mine: Sequence[Held], group: Group, device: torch.device) -> list[list[Held]]:
    """Every rank's list, in rank order."""
    own = torch.tensor(mine, dtype=torch.int64, device=device).flatten()
    full = own.new_empty(group.size * own.numel())
    work = all_gather(full, own, group, "check")
    work.complete()
    return [[tuple(held) for held in rank] for rank in full.view(group.size, -1, 3).tolist()]


def _parted(held: Sequence[Sequence[Held]]) -> list[tuple[int, int]]:
    """(place of a tensor, the first of the ranks that hold one range of it with different bits) for each such range."""
    found = []
    for at, holders in enumerate(zip(*held, strict=True)):
        by_range: dict[tuple[int, int], list[int]] = {}
        for rank, (start, stop, _) in enumerate(holders):
            by_range.setdefault((start, stop), []).append(rank)
        found += [(at, same[0]) for same in by_range.values() if len({holders[rank][2] for rank in same}) > 1]
    return found


def _parted_along(mine: Sequence[tuple[int, ...]], group: Group, device: torch.device) -> list[tuple[int, int]]:
    """(place in `mine`, index of a rank of `group` that holds the same with other bits) for each such tensor.

    mine: (name, start, stop, print). Ranks hold different numbers of tensors: shorter lists are filled up.
    """
    if group.size == 1:
        return []
    longest = torch.tensor(len(mine), device=device)
    all_reduce(longest, group, "check", "max").wait()
    own = torch.full((int(longest), 4), -1, dtype=torch.int64, device=device)
    own[: len(mine)] = torch.tensor(mine, dtype=torch.int64, device=device).view(-1, 4)
    full = own.new_empty(group.size * own.numel())
    work = all_gather(full, own.flatten(), group, "check")
    work.complete()
    found = []
    at_of = {key[:3]: (at, key[3]) for at, key in enumerate(mine)}
    for index, rows in enumerate(full.view(group.size, -1, 4).tolist()):
        for *key, value in rows:
            at, own_value = at_of.get(tuple(key), (0, value))
            if own_value != value:
                found.append((at, index))
    return found


def require_same_program(trainer: Trainer) -> None:
    """Every rank runs the program of its place along the pipeline: collectives of a group in one order, or values mix
    (gloo). So ranks of one place have one text."""
    layout = trainer.mesh.layout
    own = torch.tensor(digest_of(format_program(trainer.program)))
    low, high = (torch.full((layout.degree("pp"),), fill, dtype=torch.int64) for fill in (NOTHING, -1))
    low[layout.coords(trainer.rank)["pp"]] = high[layout.coords(trainer.rank)["pp"]] = own
    low, high = low.to(trainer.device), high.to(trainer.device)
    all_reduce(low, trainer.loss_group, "check", "min").wait()
    all_reduce(high, trainer.loss_group, "check", "max").wait()
    wrong = (low != high).nonzero().flatten().tolist()
    if wrong:
        ranks = trainer.loss_group.ranks
        parted = ", ".join(str(rank) for rank in ranks if layout.coords(rank)["pp"] == wrong[0])
        hint = "start every rank with the same job"
        raise Disagreement(f"the step's programs differ between ranks {parted}: {hint}")


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
