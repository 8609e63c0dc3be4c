"""The one file that talks to torch.distributed: collectives of a group, asynchronous, counted on the ledger.

Each call starts the communication, records its logical bytes and returns a `Work`; `wait()` makes the result valid.
A group of one rank takes the same path without communication. On gloo, gathers and reduce-scatters are point to point:
a gather receives into slices of the full buffer and sends the shard (no staging copy, 3× faster than gloo's own here),
a reduce-scatter is an all-to-all and a sum in rank order in at least fp32 (gloo's own sends all-reduce's bytes, and
this one has the same bits on every run); a small all-reduce of two ranks is one exchange. A point-to-point message
carries the collective's number in its group as tag, so two ranks that disagree on the order time out instead of mixing
values. On NCCL the library's collectives are used. A send's buffer must stay untouched until `wait_sent()`. Formulas of
what is sent: `units.sent_bytes`. Read next: `ledger.py`, `axes/data/engine.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from heptad.mesh.ledger import Ledger
from heptad.units import sent_bytes

ReduceOp = Literal["sum", "max", "min"]
_COMBINE: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "sum": Tensor.add_,
    "max": lambda mine, theirs: torch.maximum(mine, theirs, out=mine),
    "min": lambda mine, theirs: torch.minimum(mine, theirs, out=mine),
}
EXCHANGE_BYTES = 2**21
"""Up to here an exchange of two ranks takes half to two thirds of gloo's ring; above, no less (docs/log.md)."""
_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


@dataclass(eq=False, slots=True)
class Group:
    """Ranks along one axis (or several, joined by '*'); `index` is this rank's place; `pg` is None for one rank.

    numbers: of the collectives of `pg`, which other axes with the same ranks may share.
    """

    axis: str
    ranks: tuple[int, ...]
    index: int
    pg: dist.ProcessGroup | None
    ledger: Ledger
    point_to_point: bool = True
    numbers: Iterator[int] = field(default_factory=lambda: count(1))

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    def tag(self) -> int:
        """The number of the next collective of these ranks: the same on every rank when the order is the same."""
        return next(self.numbers)


class Work:
    """Communication under way. `wait` once for the result; `wait_sent` before a sent buffer changes or is freed."""

    def __init__(
        self,
        receives: Sequence[Any] = (),
        sends: Sequence[Any] = (),
        finish: Callable[[], None] | None = None,
        keep: Any = None,
    ) -> None:
        self._receives, self._sends, self._finish, self._keep = receives, sends, finish, keep

    def wait(self) -> None:
        """Block until the result is valid on this rank."""
        for handle in self._receives:
            handle.wait()
        if self._finish is not None:
            self._finish()
        self._receives, self._finish = (), None

    def wait_sent(self) -> None:
        """Block until peers have what this rank sent (implies nothing about what it receives)."""
        for handle in self._sends:
            handle.wait()
        self._sends, self._keep = (), None

    def complete(self) -> None:
        """Both."""
        self.wait()
        self.wait_sent()


def _record(op: str, group: Group, phase: str, full_bytes: int) -> None:
    if group.size > 1:
        group.ledger.record(op, group.axis, phase, sent_bytes(op, full_bytes, group.size))


def _record_sent(op: str, group: Group, phase: str, num_bytes: int) -> None:
    """Of a collective whose ranks differ in what they send."""
    if group.size > 1:
        group.ledger.record(op, group.axis, phase, num_bytes)


def _peers(group: Group) -> list[int]:
    """Other ranks of the group, nearest first, so that not all ranks write to the same one at once."""
    return [(group.index + hop) % group.size for hop in range(1, group.size)]


def all_gather(full: Tensor, shard: Tensor, group: Group, phase: str) -> Work:
    """`full` [N·s] gets every rank's `shard` [s], in rank order; 1-D, contiguous, one dtype. Sends (N-1)/N·S.

    `shard` may be this rank's slice of `full` (same storage): then nothing is copied.
    """
    assert full.ndim == shard.ndim == 1 and full.numel() == group.size * shard.numel(), (full.shape, shard.shape)
    _record("all_gather", group, phase, full.nbytes)
    if group.pg is not None and not group.point_to_point:
        return Work([dist.all_gather_single(full, shard, group=group.pg, async_op=True)], keep=shard)
    slices = full.view(group.size, -1).unbind()
    if full.untyped_storage()._cdata != shard.untyped_storage()._cdata:
        slices[group.index].copy_(shard)
    return _pairs(slices, [shard] * group.size, group)


def reduce_scatter(shard: Tensor, full: Tensor, group: Group, phase: str, accumulate: bool = False) -> Work:
    """`shard` [s] gets (or adds, `accumulate`) the sum over ranks of slice `index` of `full` [N·s]. Sends (N-1)/N·S.

    The sum runs in rank order, in the wider of fp32 and the dtypes given, and is rounded once.
    """
    assert full.ndim == shard.ndim == 1 and full.numel() == group.size * shard.numel(), (full.shape, shard.shape)
    _record("reduce_scatter", group, phase, full.nbytes)
    slices = full.view(group.size, -1).unbind()
    if group.pg is not None and not group.point_to_point:
        out = torch.empty_like(slices[0])
        handle = dist.reduce_scatter_single(out, full, group=group.pg, async_op=True)
        return Work([handle], [handle], lambda: _ordered_sum(shard, [out], accumulate), keep=full)
    parts = list(full.new_empty(group.size - 1, shard.numel()).unbind())
    parts.insert(group.index, slices[group.index])
    return _pairs(parts, slices, group, lambda: _ordered_sum(shard, parts, accumulate))


def _ordered_sum(out: Tensor, parts: Sequence[Tensor], accumulate: bool) -> None:
    """out (+)= parts[0] + parts[1] + …, left to right; parts[0] is overwritten; `out` may be one of the parts."""
    wide = torch.promote_types(torch.promote_types(out.dtype, parts[0].dtype), torch.float32)
    partial = parts[0].to(wide)
    for part in parts[1:-1]:
        partial.add_(part)
    if accumulate:
        out.add_(partial.add_(parts[-1]) if len(parts) > 1 else partial)
    elif len(parts) > 1 and out.dtype == wide:
        torch.add(partial, parts[-1], out=out)
    else:
        out.copy_(partial.add_(parts[-1]) if len(parts) > 1 else partial)


def all_reduce(tensor: Tensor, group: Group, phase: str, op: ReduceOp = "sum") -> Work:
    """`tensor` becomes the sum (max, min) over the group's ranks, in place. Sends 2(N-1)/N·S."""
    _record("all_reduce", group, phase, tensor.nbytes)
    if group.pg is None:
        return Work()
    if group.point_to_point and group.size == 2 and tensor.nbytes <= EXCHANGE_BYTES:
        return _exchange(tensor, group, op)
    handle = dist.all_reduce(tensor, _OPS[op], group=group.pg, async_op=True)
    return Work([handle], keep=tensor)


def _exchange(tensor: Tensor, group: Group, op: ReduceOp) -> Work:
    """All-reduce of two ranks: each sends all it has, S bytes as in a ring, and combines: the same bits on both."""
    tag, peer, theirs = group.tag(), 1 - group.index, torch.empty_like(tensor)
    assert group.pg is not None
    handles = [group.pg.recv([theirs], peer, tag), group.pg.send([tensor], peer, tag)]
    return Work(handles, finish=lambda: _COMBINE[op](tensor, theirs))  # sent before it is overwritten


def broadcast(tensor: Tensor, source: int, group: Group, phase: str) -> Work:
    """Every rank's `tensor` becomes that of the rank at `source` (an index in the group). Sends at most S."""
    _record("broadcast", group, phase, tensor.nbytes)
    if group.pg is None:
        return Work()
    return Work([dist.broadcast(tensor, group.ranks[source], group=group.pg, async_op=True)], keep=tensor)


def all_to_all(out: Tensor, inp: Tensor, group: Group, phase: str) -> Work:
    """Slice i of `inp` [N·s] goes to rank i; slice i of `out` comes from rank i. Sends (N-1)/N·S."""
    assert out.shape == inp.shape and out.numel() % group.size == 0, (out.shape, inp.shape)
    _record("all_to_all", group, phase, inp.nbytes)
    if group.pg is None:
        out.copy_(inp)
        return Work()
    return Work([dist.all_to_all_single(out, inp, group=group.pg, async_op=True)], keep=inp)


def all_to_all_rows(
    out: Tensor, inp: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int], group: Group, phase: str
) -> Work:
    """The next send_counts[i] rows of `inp` go to rank i, the next recv_counts[i] of `out` come from it. Sends the rows
    that leave, S bytes in all; nothing to or from a rank whose count is zero.

    Rows are of dim 0; both tensors are contiguous, of one dtype. `wait_sent` as for `send`.
    """
    assert inp.shape[0] == sum(send_counts) and out.shape[0] == sum(recv_counts), (inp.shape, out.shape)
    assert inp.is_contiguous() and out.is_contiguous() and inp.dtype == out.dtype and inp.shape[1:] == out.shape[1:]
    assert send_counts[group.index] == recv_counts[group.index]
    sends, receives = list(inp.split(list(send_counts))), list(out.split(list(recv_counts)))
    _record_sent("all_to_all", group, phase, inp.nbytes - sends[group.index].nbytes)
    if group.pg is not None and not group.point_to_point:
        counts = list(recv_counts), list(send_counts)
        handle = dist.all_to_all_single(out, inp, *counts, group=group.pg, async_op=True)
        return Work([handle], [handle], keep=inp)
    receives[group.index].copy_(sends[group.index])
    return _pairs(receives, sends, group)


def all_gather_rows(out: Tensor, inp: Tensor, counts: Sequence[int], group: Group, phase: str) -> Work:
    """`out` [Σ counts, …] gets rank i's counts[i] rows, in rank order; `inp` are this rank's. Sends (N-1)·S of own S.

    As `all_to_all_rows`, of which it is the one where each rank sends the same rows to all.
    """
    assert out.shape[0] == sum(counts) and inp.shape[0] == counts[group.index] and inp.is_contiguous()
    _record_sent("all_gather", group, phase, (group.size - 1) * inp.nbytes)
    receives = list(out.split(list(counts)))
    if group.pg is not None and not group.point_to_point:
        handle = dist.all_to_all(receives, [inp] * group.size, group=group.pg, async_op=True)
        return Work([handle], [handle], keep=inp)
    receives[group.index].copy_(inp)
    return _pairs(receives, [inp] * group.size, group)


def reduce_scatter_rows(out: Tensor, inp: Tensor, counts: Sequence[int], group: Group, phase: str) -> Work:
    """`out` [counts[index], …] gets the sum over ranks of their slice `index` of `inp` [Σ counts, …], as
    `reduce_scatter` sums; `inp` is this call's to overwrite. Sends what is not this rank's of it.
    """
    assert inp.shape[0] == sum(counts) and out.shape[0] == counts[group.index] and inp.is_contiguous()
    sends = list(inp.split(list(counts)))
    _record_sent("reduce_scatter", group, phase, inp.nbytes - sends[group.index].nbytes)
    parts = [torch.empty_like(out) if at != group.index else sends[at] for at in range(group.size)]
    if group.pg is not None and not group.point_to_point:
        parts[group.index] = torch.empty_like(out)
        handle = dist.all_to_all(parts, sends, group=group.pg, async_op=True)
        return Work([handle], [handle], lambda: _ordered_sum(out, parts, accumulate=False), keep=inp)
    return _pairs(parts, sends, group, lambda: _ordered_sum(out, parts, accumulate=False))


def _pairs(
    receives: Sequence[Tensor], sends: Sequence[Tensor], group: Group, finish: Callable[[], None] | None = None
) -> Work:
    """sends[i] to rank i, receives[i] from rank i, point to point, own ones left out; empty ones do not travel."""
    if group.pg is None:
        return Work(finish=finish)
    tag, peers = group.tag(), _peers(group)
    coming = [group.pg.recv([receives[peer]], peer, tag) for peer in reversed(peers) if receives[peer].numel()]
    going = [group.pg.send([sends[peer]], peer, tag) for peer in peers if sends[peer].numel()]
    return Work(coming, going, finish, keep=sends)


def send(tensor: Tensor, peer: int, group: Group, phase: str, tag: int) -> Work:
    """`tensor` to the rank at index `peer`; sends S once. `tag` pairs it with the `recv`."""
    assert group.pg is not None
    group.ledger.record("send", group.axis, phase, tensor.nbytes)
    return Work(sends=[group.pg.send([tensor], peer, tag)], keep=tensor)


def recv(tensor: Tensor, peer: int, group: Group, tag: int) -> Work:
    """Fill `tensor` with what the rank at index `peer` sends under `tag`; counted by the sender."""
    assert group.pg is not None
    return Work([group.pg.recv([tensor], peer, tag)], keep=tensor)


def shift(out: Tensor, inp: Tensor, group: Group, phase: str) -> Work:
    """A hop of a ring: `inp` to the next rank, `out` from the previous one; sends S. `wait_sent` as for `send`.

    Both directions start together: of a library whose sends wait for their receiver, no rank waits for another.
    """
    assert group.pg is not None and out.shape == inp.shape and out.is_contiguous() and inp.is_contiguous()
    _record("send", group, phase, inp.nbytes)
    up, down = (group.index + 1) % group.size, (group.index - 1) % group.size
    if group.point_to_point:
        tag = group.tag()
        return Work([group.pg.recv([out], down, tag)], [group.pg.send([inp], up, tag)], keep=inp)
    pairs = [(dist.isend, inp, up), (dist.irecv, out, down)]
    handles = dist.batch_isend_irecv([dist.P2POp(op, x, group.ranks[at], group.pg) for op, x, at in pairs])
    return Work(handles, handles, keep=inp)


def barrier(group: Group, timeout_s: float) -> None:
    """Wait for every rank of the group; on gloo a late rank is named in the error."""
    if group.pg is None:
        return
    if group.point_to_point:
        dist.monitored_barrier(group.pg, timedelta(seconds=timeout_s), wait_all_ranks=True)
    else:
        dist.barrier(group.pg)
