"""The other extreme of sending: a message starts when its receiver stands before the action that needs it. No torch.

A channel (from one rank to another, activations or gradients) holds one message: a rank that wants to send a second one
before the first has arrived computes nothing until then. So a schedule that passes needs no buffer but one a channel,
and takes its messages in the order in which they are sent; one that does not is a deadlock (interleaved 1F1B is, in
rounds longer than P). A pair waits for both its inputs, and both outputs leave at its end. Read next: `pipeline.py`.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from heptad.schedule.pipeline import Schedule
from heptad.simulate.deadlock import Wait, deadlock
from heptad.simulate.lines import BACKWARD, LETTERS, PAIR_F, B, F, Lines, W
from heptad.simulate.times import Links, Times

Side = tuple[int, bool]
"""(slot, backward): what makes a message."""


@dataclass(slots=True)
class _Channel:
    """`held`: the message posted and not yet arrived; `free_s`: when the one before it arrived."""

    held: Side | None = None
    free_s: float = 0.0


@dataclass(slots=True)
class _Rank:
    """Where a rank stands: its time, its next code, and what it has made but not yet posted."""

    now: float = 0.0
    at: int = 0
    unsent: list[int] = field(default_factory=list)


class Rendezvous:
    """A run; `starts`, `ends` and `sent` are those of a `Simulation`."""

    def __init__(self, schedule: Schedule, lines: Lines, times: Times, links: Links) -> None:
        self.schedule, self.lines, self.times, self.links = schedule, lines, times, links
        self.starts = [array("d") for _ in lines.codes]
        self.ends = [array("d") for _ in lines.codes]
        self.ranks = [_Rank() for _ in lines.codes]
        self.posted: dict[Side, float] = {}
        self.link_free: dict[tuple[int, int], float] = {}
        self.channels: dict[tuple[int, int, bool], _Channel] = {}
        self.waiting: dict[int, tuple[Side, int]] = {}
        """Rank -> (the side that it waits for, the rank that runs or takes it)."""
        self.waiter: dict[tuple[Side, bool], int] = {}
        """(side, taken) -> the rank that waits until it is posted, or taken."""
        self.ready = list(range(len(lines.codes)))[::-1]
        self.sent: list[tuple[int, int, float, float]] = []

    def all(self) -> None:
        """Every rank to its end; ConfigError names a deadlock."""
        while self.ready:
            rank = self.ready.pop()
            while self._post(rank) and self.ranks[rank].at < len(self.lines.codes[rank]) and self._run(rank):
                pass
        if self.waiting:
            raise deadlock(self.schedule, {rank: self._wait(rank, *what) for rank, what in self.waiting.items()})

    def _run(self, rank: int) -> bool:
        """The next step of `rank`, once all its inputs are posted; False when it waits."""
        state, codes = self.ranks[rank], self.lines.codes[rank]
        step = codes[state.at : state.at + (2 if codes[state.at] & 7 == PAIR_F else 1)]
        sources = [source for code in step if code & 7 != W and (source := self._source(code)) is not None]
        for source in sources:
            if source not in self.posted:
                return self._park(rank, source, self.lines.owner[source[0]], taken=False)
        start = state.now
        for source in sources:
            start = max(start, self._take(rank, source))
        state.now = start + sum(self.times.of(LETTERS[code & 7], self._stage(code >> 3)) for code in step)
        state.now -= self.times.hidden_s if len(step) == 2 else 0.0
        self.starts[rank].extend([start] * len(step))
        self.ends[rank].extend([state.now] * len(step))
        state.at += len(step)
        state.unsent = [code for code in step if code & 7 != W]
        return True

    def _take(self, rank: int, source: Side) -> float:
        """When a posted message has arrived at `rank`, which stands there from now on."""
        slot, backward = source
        sender, now = self.lines.owner[slot], self.ranks[rank].now
        if sender == rank:
            return now
        start = max(now, self.posted[source], self.link_free.get((sender, rank), 0.0))
        left = start + self.links.transfer_s[self._stage(slot) - backward]
        self.link_free[sender, rank] = left
        arrived = left + self.links.latency_s
        channel = self.channels[sender, rank, backward]
        channel.held, channel.free_s = None, arrived
        self._free((source, True))
        if not self.links.free:
            self.sent.append((sender, slot * 8 + (B if backward else F), start, arrived))
        return arrived

    def _post(self, rank: int) -> bool:
        """Post what the last step made; False when a channel is full."""
        state = self.ranks[rank]
        while state.unsent:
            side = (state.unsent[0] >> 3, state.unsent[0] & BACKWARD > 0)
            receiver = self._receiver(side)
            if receiver not in (rank, -1):
                channel = self.channels.setdefault((rank, receiver, side[1]), _Channel())
                if channel.held is not None:
                    return self._park(rank, channel.held, receiver, taken=True)
                state.now = max(state.now, channel.free_s)
                channel.held = side
            self.posted[side] = state.now
            self._free((side, False))
            state.unsent.pop(0)
        return True

    def _park(self, rank: int, side: Side, of: int, taken: bool) -> bool:
        self.waiting[rank] = (side, of)
        self.waiter[side, taken] = rank
        return False

    def _free(self, what: tuple[Side, bool]) -> None:
        if (rank := self.waiter.pop(what, None)) is not None:
            del self.waiting[rank]
            self.ready.append(rank)

    def _source(self, code: int) -> Side | None:
        """What an F, B or I needs from another stage."""
        backward = code & BACKWARD > 0
        slot = (code >> 3) + (self.lines.num_microbatches if backward else -self.lines.num_microbatches)
        return (slot, backward) if 0 <= slot < len(self.lines.owner) else None

    def _receiver(self, side: Side) -> int:
        """The rank that needs what `side` makes, -1 for none."""
        slot = side[0] + (-self.lines.num_microbatches if side[1] else self.lines.num_microbatches)
        return self.lines.owner[slot] if 0 <= slot < len(self.lines.owner) else -1

    def _stage(self, slot: int) -> int:
        return slot // self.lines.num_microbatches

    def _wait(self, rank: int, side: Side, of: int) -> Wait:
        state, codes = self.ranks[rank], self.lines.codes[rank]
        if state.unsent:
            return Wait(f"sending {self.lines.name(state.unsent[0])}", f"the receipt of {self.lines.side(*side)}", of)
        return Wait(self.lines.name(codes[state.at]), self.lines.side(*side), of)
