"""What ranks send one another in a pipeline schedule, where sends and receives stand, and that blocking ones never
hang.

After F of stage s its output goes to the rank of stage s+1, after B or I its input's gradient to the rank of stage
s-1; stages on one rank send nothing. A send stands right behind the action that makes it, the receive of it at the
same time in the receiver's line, which may be before other actions: it is posted early and the value waits. Times are
those of `Run`, so all lines follow one order of everything that happens (a message at the slot in which its action
ends, an action in the slot in which it starts, messages first). That is why blocking, unbuffered sends cannot hang:
the first thing in that order that has not happened can always happen. And the messages of a channel (a pair of ranks
and a direction) are received in the order in which they are sent. `check_messages` proves both for lines made
anywhere, by running them: the independent proof that tests hold against `heptad/schedule/pipeline_check.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from heptad.schedule.action import Kind
from heptad.schedule.pipeline import Schedule, StageAction, Step, direction_of, placement, singles
from heptad.schedule.slots import Run, slots_of


@dataclass(frozen=True, slots=True)
class Message:
    """What `made_by` makes for the next stage (F) or for the stage below (B, I): one boundary of one micro-batch."""

    made_by: StageAction
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Send:
    """Blocks until the target stands at the receive."""

    message: Message

    def __str__(self) -> str:
        return f"{self.message.made_by}>{self.message.target}"


@dataclass(frozen=True, slots=True)
class Receive:
    """Blocks until the source stands at the send."""

    message: Message

    def __str__(self) -> str:
        return f"{self.message.source}>{self.message.made_by}"


Entry = Step | Send | Receive


def messages(schedule: Schedule) -> tuple[tuple[tuple[Message, ...], ...], ...]:
    """For each rank and each step of its line, what leaves the rank when the step ends."""
    where, top = placement(schedule), schedule.num_stages - 1
    lines = []
    for rank, line in enumerate(schedule.lines):
        row = []
        for step in line:
            sent = []
            for action in singles((step,)):
                to = action.stage + (1 if action.kind is Kind.FORWARD else -1)
                if action.kind is Kind.WEIGHT_GRAD or not 0 <= to <= top:
                    continue
                target = where[direction_of(schedule, where, action.microbatch)][to]
                if target != rank:
                    sent.append(Message(action, rank, target))
            row.append(tuple(sent))
        lines.append(tuple(row))
    return tuple(lines)


def with_messages(schedule: Schedule) -> tuple[tuple[Entry, ...], ...]:
    """The lines of a checked schedule with every send and receive in its place."""
    run = Run(schedule)
    assert not run.waits, "only a checked schedule has an order"
    timed: list[list[tuple[int, int, int, Entry]]] = [[] for _ in schedule.lines]
    for rank, row in enumerate(messages(schedule)):
        for position, (step, sent) in enumerate(zip(schedule.lines[rank], row, strict=True)):
            start = run.starts[rank][position]
            timed[rank].append((start, 1, 0, step))
            for number, message in enumerate(sent):
                at = start + slots_of(step)
                # Messages of one slot in one order everywhere: by source, a pair's output before its gradient.
                timed[rank].append((at, 0, 2 * rank + number, Send(message)))
                timed[message.target].append((at, 0, 2 * rank + number, Receive(message)))
    return tuple(tuple(entry for *_, entry in sorted(line, key=lambda item: item[:3])) for line in timed)


def check_messages(lines: Sequence[Sequence[Entry]]) -> None:
    """Run the lines with blocking, unbuffered sends; AssertionError names what each rank waits for if they hang.

    Also proven: receives of a channel in the order of its sends, each input received before the action that needs it.
    """
    _check_channels(lines)
    at = [0] * len(lines)
    ready = deque(range(len(lines)))
    while ready:
        rank = ready.popleft()
        while at[rank] < len(lines[rank]):
            entry = lines[rank][at[rank]]
            if isinstance(entry, Send | Receive):
                message = entry.message
                peer = message.target if isinstance(entry, Send) else message.source
                wanted = Receive(message) if isinstance(entry, Send) else Send(message)
                if at[peer] == len(lines[peer]) or lines[peer][at[peer]] != wanted:
                    break
                at[peer] += 1
                ready.append(peer)
            at[rank] += 1
    stuck = [f"rank {rank} at {lines[rank][i]}" for rank, i in enumerate(at) if i < len(lines[rank])]
    assert not stuck, f"blocking sends hang: {', '.join(stuck)}"


def _check_channels(lines: Sequence[Sequence[Entry]]) -> None:
    """Sends and receives of each channel are the same messages in the same order; no input comes after its use."""
    sent: dict[tuple[int, int], list[Message]] = {}
    received: dict[tuple[int, int], list[Message]] = {}
    for rank, line in enumerate(lines):
        done: set[StageAction] = set()
        for entry in line:
            if isinstance(entry, Send):
                assert entry.message.made_by in done, f"rank {rank} sends {entry} before it is made"
                sent.setdefault((rank, entry.message.target), []).append(entry.message)
            elif isinstance(entry, Receive):
                used = _users(entry.message) & done
                assert not used, f"rank {rank} receives {entry} after {next(iter(used))}, which needs it"
                received.setdefault((entry.message.source, rank), []).append(entry.message)
            else:
                done.update(singles((entry,)))
    for channel in sent.keys() | received.keys():
        pair = sent.get(channel, []), received.get(channel, [])
        assert pair[0] == pair[1], f"channel {channel[0]} to {channel[1]}: receives are not in the order of the sends"


def _users(message: Message) -> set[StageAction]:
    action = message.made_by
    if action.kind is Kind.FORWARD:
        return {StageAction(action.stage + 1, Kind.FORWARD, action.microbatch)}
    return {StageAction(action.stage - 1, kind, action.microbatch) for kind in (Kind.BACKWARD, Kind.INPUT_GRAD)}
