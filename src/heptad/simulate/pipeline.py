"""A pipeline schedule in time: when each rank runs each action, how long it idles, what is alive. Exact, no torch.

There are no time steps: an action starts at the latest of its rank's last end and its input's arrival, so ranks are
followed one after the other, each as far as its inputs are known, and a rank that waits is taken up again by what it
waits for. If all wait, that is a deadlock, and it is named. A send is posted when its action ends and the rank goes on;
`rendezvous.py` is the other extreme.

A pair starts its forward when the forward's input is there, sends its output, then waits for the gradient. Of the time
that running together hides, it gets the share of its forward that ran after the gradient was there. As one block
(`PairMode.BLOCK`, what the papers' formulas assume) it waits for both, and both outputs leave at its end.
Read next: `times.py`, `lines.py`, `report/pipeline.py`.
"""

from __future__ import annotations

import enum
from array import array
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property

from heptad.schedule.pipeline import Schedule
from heptad.simulate.deadlock import Wait, deadlock
from heptad.simulate.lines import BACKWARD, LETTERS, PAIR_B, PAIR_F, PAIR_I, Lines, encode
from heptad.simulate.rendezvous import Rendezvous
from heptad.simulate.times import Links, Times
from heptad.trace import Event

NOT_YET = -1.0


class PairMode(enum.Enum):
    """When the forward of an overlapped pair starts."""

    EARLY = "early"
    """When its own input is there; the backward follows when the gradient is."""
    BLOCK = "block"
    """When both inputs are there: so the executor runs pairs whose units go in turns (`schedule/expand.py`)."""


class SendMode(enum.Enum):
    """What a send asks of the rank that sends."""

    POSTED = "posted"
    """Nothing: it travels while the rank computes."""
    RENDEZVOUS = "rendezvous"
    """To wait until the receiver stands before the action that needs it."""


@dataclass(frozen=True)
class Simulation:
    """The result; times in the unit of `Times`. `starts[rank]`, `ends[rank]`: of each entry of `lines.codes[rank]`."""

    schedule: Schedule
    lines: Lines
    starts: tuple[array[float], ...]
    ends: tuple[array[float], ...]
    sent: tuple[tuple[int, int, float, float], ...]
    """(rank, code of what made it, start, end) of every message, where messages take time."""

    @cached_property
    def makespan(self) -> float:
        """From 0 to the end of the last action."""
        return max(max(row) for row in self.ends if row)

    @cached_property
    def idle(self) -> tuple[float, ...]:
        """For each rank: the makespan without the time it computes."""
        return tuple(self.makespan - self._busy(rank) for rank in range(self.schedule.num_ranks))

    @property
    def idle_fraction(self) -> float:
        """Idle time of all ranks ÷ (ranks × makespan)."""
        return sum(self.idle) / (len(self.idle) * self.makespan)

    @property
    def peak_live(self) -> tuple[int, ...]:
        """For each rank: most forwards of which B or W is still to come; a chunk counts as one, so it weighs 1/V."""
        return self.lines.peak_live

    def events(self, ranks: Collection[int] | None = None) -> Iterator[Event]:
        """Computation by rank in order (all ranks, or `ranks`), then messages. A pair is one event named as in the text
        form, unless its backward had to wait: then its sides are two."""
        wanted = range(self.schedule.num_ranks) if ranks is None else ranks
        for rank in wanted:
            codes = self.lines.codes[rank]
            starts, ends = self.starts[rank], self.ends[rank]
            for at, code in enumerate(codes):
                if code & 7 == PAIR_F and starts[at + 1] <= ends[at]:
                    name = f"{self.lines.name(code)}&{self.lines.name(codes[at + 1])}"
                    yield Event(rank, "compute", name, starts[at], ends[at + 1])
                elif not (code & 7 in (PAIR_B, PAIR_I) and starts[at] <= ends[at - 1]):
                    yield Event(rank, "compute", self.lines.name(code), starts[at], ends[at])
        for rank, code, start, end in self.sent:
            if rank in wanted:
                yield Event(rank, "send", f"send {self.lines.name(code)}", start, end)

    def _busy(self, rank: int) -> float:
        starts, ends, codes = self.starts[rank], self.ends[rank], self.lines.codes[rank]
        busy = sum(ends) - sum(starts)
        for at, code in enumerate(codes):
            if code & 7 == PAIR_F and starts[at + 1] < ends[at]:  # as one block: both sides have the pair's time
                busy -= ends[at] - starts[at]
        return busy


def simulate(
    schedule: Schedule,
    times: Times,
    links: Links | None = None,
    pairs: PairMode = PairMode.EARLY,
    sends: SendMode = SendMode.POSTED,
) -> Simulation:
    """Run `schedule` in time; messages take none unless `links` says so. ConfigError names a deadlock."""
    links = links or Links.uniform(schedule.num_stages)
    assert times.num_stages == schedule.num_stages == len(links.transfer_s) + 1, "one time for each stage"
    lines = encode(schedule)
    run: _Posted | Rendezvous
    if sends is SendMode.RENDEZVOUS:
        run = Rendezvous(schedule, lines, times, links)
    else:
        run = _Posted(schedule, lines, times, links, block=pairs is PairMode.BLOCK)
    run.all()
    return Simulation(schedule, lines, tuple(run.starts), tuple(run.ends), tuple(run.sent))


class _Posted:
    """The state of a run with posted sends."""

    def __init__(self, schedule: Schedule, lines: Lines, times: Times, links: Links, block: bool) -> None:
        ranks, per_stage = schedule.num_ranks, schedule.num_microbatches
        self.schedule, self.lines, self.times, self.links, self.block = schedule, lines, times, links, block
        slots = schedule.num_stages * per_stage
        self.first = 2 * per_stage
        """What 2 * slot (a forward) and 2 * slot + 1 (a backward) need is found so much further on in `there`: what the
        first stage's backwards and the last one's forwards send falls before and behind, where nobody looks."""
        self.there = array("d", [NOT_YET]) * (2 * slots + 2 * self.first)
        """When the input of a forward, or the gradient of a backward, is on its rank."""
        self.there[self.first : 2 * self.first : 2] = array("d", [0.0]) * per_stage
        self.there[2 * slots + 1 : 2 * slots + self.first : 2] = array("d", [0.0]) * per_stage
        self.receivers = array("i", [-1]) * len(self.there)
        for side in (0, 1):
            self.receivers[self.first + side : self.first + 2 * slots : 2] = lines.owner
        self.starts = [array("d") for _ in range(ranks)]
        self.ends = [array("d") for _ in range(ranks)]
        self.parked = [-1] * ranks
        """By rank: where in `there` it waits for something to come."""
        self.ready = deque(range(ranks))
        self.link_free: dict[int, float] = {}
        self.sent: list[tuple[int, int, float, float]] = []
        stages = range(times.num_stages)
        self.seconds = [[times.of(letter, stage) for stage in stages] for letter in LETTERS]

    def all(self) -> None:
        """Every rank to its end."""
        lines = [self._line(rank) for rank in range(self.schedule.num_ranks)]
        while self.ready:
            next(lines[self.ready.popleft()], None)
        stuck = {rank: self._wait(rank, key) for rank, key in enumerate(self.parked) if key >= 0}
        if stuck:
            raise deadlock(self.schedule, stuck)

    def _line(self, rank: int) -> Iterator[None]:
        """Run the line of `rank`; yields where it waits. The hot loop: once an action."""
        codes, starts, ends = self.lines.codes[rank], self.starts[rank], self.ends[rank]
        there, receivers, parked, ready, seconds = self.there, self.receivers, self.parked, self.ready, self.seconds
        per_stage, first, free = self.lines.num_microbatches, self.first, self.links.free
        now, block = 0.0, self.block
        for at, code in enumerate(codes):
            number = code & 7
            if number == 3:  # W needs nothing from elsewhere
                starts.append(now)
                now += seconds[3][(code >> 3) // per_stage]
                ends.append(now)
                continue
            key = (code >> 2) + first
            arrived = there[key]
            if arrived < 0.0:
                parked[rank] = key
                yield
                arrived = there[key]
            start = arrived if arrived > now else now
            if number == 1 and block:
                other = (codes[at + 1] >> 2) + first
                if there[other] < 0.0:
                    parked[rank] = other
                    yield
                start = max(start, there[other])
                now = start + self._block(code, codes[at + 1])
            elif number & 2 and block:
                start = starts[-1]
            else:
                now = start + seconds[number][(code >> 3) // per_stage]
                if number & 2:
                    now -= self._hidden(starts[-1], ends[-1], arrived)
            starts.append(start)
            ends.append(now)
            target = key - first if number & 4 else key + first
            receiver = receivers[target]
            there[target] = now if free or receiver == rank or receiver < 0 else self._send(rank, receiver, code, now)
            if parked[receiver] == target:
                parked[receiver] = -1
                ready.append(receiver)

    def _block(self, forward: int, backward: int) -> float:
        """Seconds of a pair whose sides run together from its start."""
        sides = (self.seconds[code & 7][(code >> 3) // self.lines.num_microbatches] for code in (forward, backward))
        return sum(sides) - self.times.hidden_s

    def _hidden(self, start: float, end: float, gradient: float) -> float:
        """What a pair saves: all, times the share of its forward (`start` to `end`) that ran beside its backward."""
        share = min(1.0, max(0.0, (end - gradient) / (end - start))) if end > start else 0.0
        return share * self.times.hidden_s

    def _send(self, rank: int, receiver: int, code: int, now: float) -> float:
        """Arrival of what `code` made, sent at `now` over the link from `rank` to `receiver`."""
        stage = (code >> 3) // self.lines.num_microbatches
        key = rank * self.schedule.num_ranks + receiver
        start = max(now, self.link_free.get(key, 0.0))
        left = start + self.links.transfer_s[stage - 1 if code & BACKWARD else stage]
        self.link_free[key] = left
        self.sent.append((rank, code, start, left + self.links.latency_s))
        return left + self.links.latency_s

    def _wait(self, rank: int, at: int) -> Wait:
        slot, backward = divmod(at - self.first, 2)
        source = slot + (self.lines.num_microbatches if backward else -self.lines.num_microbatches)
        action = self.lines.name(self.lines.codes[rank][len(self.starts[rank])])
        return Wait(action, self.lines.side(source, bool(backward)), self.lines.owner[source])
