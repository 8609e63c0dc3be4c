"""A schedule's lines as integers, the form in which the simulator can afford millions of actions. Pure, no torch.

An action is `slot * 8 + number`, slot = stage * M + micro-batch. The number's third bit says backward, so code >> 2 is
2 * slot for what a forward needs and 2 * slot + 1 for what a B or an I does. A pair is two entries in a row, its
forward first.
What a line must hold by itself (a backward after its own forward, on the rank that ran it) is checked here, since the
simulator relies on it; the whole proof is `schedule/check.py`'s. Read next: `pipeline.py`.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from heptad.errors import ConfigError
from heptad.schedule.action import Kind
from heptad.schedule.pipeline import Pair, Schedule, StageAction

F, PAIR_F, W, B, I, PAIR_B, PAIR_I = 0, 1, 3, 4, 5, 6, 7  # noqa: E741
BACKWARD = 4
"""The bit that B, I and their paired forms have."""
LETTERS = "FFWWBIBI"
NEVER, RUN, INPUT_DONE, DONE = range(4)


@dataclass(frozen=True, slots=True)
class Lines:
    """`codes[rank]`: its actions; `owner[slot]`: the rank that runs stage and micro-batch, -1 for none."""

    num_microbatches: int
    codes: tuple[array[int], ...]
    owner: array[int]
    peak_live: tuple[int, ...]
    """Most forwards of which B, or W, has not run yet on the rank: an I still holds what its W needs."""

    def name(self, code: int) -> str:
        """The text form of one action."""
        stage, microbatch = divmod(code >> 3, self.num_microbatches)
        return f"{stage}{LETTERS[code & 7]}{microbatch}"

    def side(self, slot: int, backward: bool) -> str:
        """Words for a forward or a backward, whether that is a B or an I."""
        stage, microbatch = divmod(slot, self.num_microbatches)
        return f"the {'backward' if backward else 'forward'} of stage {stage} on micro-batch {microbatch}"


def encode(schedule: Schedule) -> Lines:
    """ConfigError names the first action that its own line rules out."""
    slots = schedule.num_stages * schedule.num_microbatches
    owner, state = array("i", [-1]) * slots, bytearray(slots)
    rows, live = [], []
    for rank in range(schedule.num_ranks):
        codes, most_live = _line(schedule, rank, owner, state)
        rows.append(codes)
        live.append(most_live)
    return Lines(schedule.num_microbatches, tuple(rows), owner, tuple(live))


def _line(schedule: Schedule, rank: int, owner: array[int], state: bytearray) -> tuple[array[int], int]:
    """Codes of a line and the peak of what is live; fills `owner` and `state`."""
    per_stage, forward, backward, input_grad = (
        schedule.num_microbatches, Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRAD,
    )  # fmt: skip
    codes = array("q")
    live = most_live = 0
    for step in schedule.lines[rank]:
        paired = type(step) is Pair
        for action in (step.forward, step.backward) if isinstance(step, Pair) else (step,):
            kind, slot = action.kind, action.stage * per_stage + action.microbatch
            if kind is forward:
                if owner[slot] != -1:
                    raise _broken(schedule, rank, action, f"it runs a second time (first on rank {owner[slot]})")
                owner[slot], state[slot] = rank, RUN
                codes.append(slot * 8 + (PAIR_F if paired else F))
                live += 1
                if live > most_live:
                    most_live = live
                continue
            whole = kind is backward
            if owner[slot] != rank or state[slot] != (RUN if whole or kind is input_grad else INPUT_DONE):
                raise _broken(schedule, rank, action, _why(action, owner[slot] == rank, state[slot]))
            if whole or kind is input_grad:
                codes.append(slot * 8 + ((PAIR_B if paired else B) if whole else PAIR_I if paired else I))
            else:
                codes.append(slot * 8 + W)
            if kind is not input_grad:
                live -= 1
            state[slot] = INPUT_DONE if kind is input_grad else DONE
    return codes, most_live


def _why(action: StageAction, here: bool, state: int) -> str:
    stage, microbatch = action.stage, action.microbatch
    if not here or state == NEVER:
        return f"{stage}F{microbatch} has not run on this rank before it"
    if action.kind is Kind.WEIGHT_GRAD and state == RUN:
        return f"{stage}I{microbatch} has not run before it"
    return f"the backward of stage {stage} on micro-batch {microbatch} has already run"


def _broken(schedule: Schedule, rank: int, action: StageAction, why: str) -> ConfigError:
    rule = f"rank {rank} cannot run {action}: {why}"
    return ConfigError.of("schedule", schedule.name, rule, f"correct rank {rank}'s line (heptad timeline --actions)")
