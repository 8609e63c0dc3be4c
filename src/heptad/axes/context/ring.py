"""Ring attention: queries stay, keys and values go once round, and each block is computed while the next one travels.

| | hops | what travels | meanwhile |
|---|---|---|---|
| forward | R-1 | [2, B, K, n, d] keys and values | the block of the keys at hand |
| backward | R-1 | the same again | the same |
| | R-1 | their gradients, at least fp32 | the next block; at the end, half of a rank's own |

Gradients of a rank's keys start at its successor, gather a term on each rank and come home; the owner adds its own
term. Saved for the backward: q, keys and values of this rank, the output and its log-sum-exp: O(L/R). Buffers: two for
keys and values, four for gradients in the backward, one each for out and dq. A hop whose keys no local query sees is
passed on without computing.

Legend: R ring ranks, B rows, H query and K kv heads here, n tokens of a ring rank, d head_dim. Sent per rank:
(R-1)·2·B·n·K·d elements forward, twice that backward. Sources: ring attention, arXiv 2310.01889; zigzag
and the three verbs, ring-flash-attention. Read next: `local.py`, `merge.py`, `apply.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from heptad.axes.context.local import Local
from heptad.axes.context.merge import Partial, wide
from heptad.mesh.collectives import Group, Work, shift


class Ring:
    """Three verbs over one kind of message: `send_recv` says what goes on, `commit` starts it, `wait` ends it."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._free: list[Tensor] = []
        self._sent: Tensor | None = None
        self._under_way: list[Work] = []
        self._next: tuple[Tensor, Tensor] | None = None

    def buffer(self, like: Tensor) -> Tensor:
        """A buffer that no message is using, of `like`'s shape and type; its values are anything."""
        return self._free.pop() if self._free else torch.empty_like(like)

    def give_back(self, buffer: Tensor) -> None:
        """The caller is done with a `buffer`."""
        self._free.append(buffer)

    def send_recv(self, out: Tensor) -> Tensor:
        """`out` goes to the next rank; returns where the previous rank's will be, valid after `wait`."""
        arriving = self.buffer(out)
        self._next = out, arriving
        return arriving

    def commit(self) -> None:
        """Start; until `wait`, neither tensor may change."""
        assert self._next is not None and not self._under_way
        out, arriving = self._next
        self._under_way, self._next = [shift(arriving, out, self._group, self._group.ledger.phase)], None

    def wait(self) -> None:
        """Block until the message is here and the one sent has left; nothing under way: at once."""
        for work in self._under_way:
            work.complete()
        self._under_way = []


class _RingAttention(torch.autograd.Function):
    """Saves q, kv, out and lse."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, kv: Tensor, local: Local, group: Group) -> Tensor:
        total, keys, at_hand = Partial(q), Ring(group), kv
        for hop in range(group.size):
            arriving = _pass_on(keys, at_hand, hop, group)
            local.forward(q, at_hand, _source(group, hop), total)
            keys.wait()
            at_hand = _received(keys, at_hand, arriving, kv)
        out = total.out.to(q.dtype)
        ctx.local, ctx.group = local, group
        ctx.save_for_backward(q, kv, out, total.lse)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor, None, None]:
        q, kv, out, lse = ctx.saved_tensors
        local, group = ctx.local, ctx.group
        saved, at_hand = (dout, q, out, lse), kv
        dq = torch.zeros_like(q, dtype=wide(q.dtype), memory_format=torch.contiguous_format)
        own = torch.zeros_like(kv, dtype=wide(kv.dtype))
        keys, grads, sent, coming = Ring(group), Ring(group), None, None
        now, later = local.own_halves()
        for hop in range(group.size):
            arriving, source = _pass_on(keys, at_hand, hop, group), _source(group, hop)
            if hop == 0:
                local.backward(saved, at_hand, source, now, dq, own)
            else:
                term = grads.buffer(own).zero_()
                local.backward(saved, at_hand, source, local.blocks(source), dq, term)
                grads.wait()
                if sent is not None and coming is not None:
                    term.add_(coming)
                    grads.give_back(sent)
                    grads.give_back(coming)
                sent, coming = term, grads.send_recv(term)
                grads.commit()
            keys.wait()
            at_hand = _received(keys, at_hand, arriving, kv)
        local.backward(saved, kv, group.index, later, dq, own)
        grads.wait()
        if coming is not None:
            own.add_(coming)
        return dq.to(q.dtype), own.to(kv.dtype), None, None


def _source(group: Group, hop: int) -> int:
    """Whose keys are at hand."""
    return (group.index - hop) % group.size


def _pass_on(keys: Ring, at_hand: Tensor, hop: int, group: Group) -> Tensor | None:
    """Start the next hop, unless this is the last; where its keys will be."""
    if hop + 1 == group.size:
        return None
    arriving = keys.send_recv(at_hand)
    keys.commit()
    return arriving


def _received(keys: Ring, sent: Tensor, arriving: Tensor | None, own: Tensor) -> Tensor:
    """What is at hand after a hop; the buffer that was sent from is free, this rank's own keys are none."""
    if sent is not own:
        keys.give_back(sent)
    return own if arriving is None else arriving


def ring_attention(q: Tensor, kv: Tensor, local: Local, group: Group) -> Tensor:
    """q [B, H, n, d], kv [2, B, K, n, d] contiguous -> [B, H, n, d], softmax over the keys of all ranks of `group`."""
    out: Tensor = _RingAttention.apply(q, kv, local, group)
    return out
