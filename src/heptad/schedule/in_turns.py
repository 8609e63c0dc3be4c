"""An overlapped pair as the executor runs it: the actions of two micro-batches in turns, handed over inside of them.

Either side computes as if it were alone. Where one waits for what it has sent (experts on other ranks), the other goes
on from where it was; so of the two units `2B1 & 4F5`, each with a transfer to its experts and one back, the stretches
are: 2B1 up to its first wait, 4F5 up to its first, 2B1 up to its second, ... What belongs to a side while it runs, the
phase its traffic counts in and the name of its stretch, changes with the turns. No schedule is known here.
Read next: `mesh/turns.py` (the turns), `expand.py` (what is paired), `executor.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import groupby

from heptad.mesh.turns import together
from heptad.schedule.action import Action, Program, steps_of
from heptad.schedule.lower import phases

Side = tuple[tuple[Action, str], ...]
"""Actions of one micro-batch, each with the phase its traffic counts in."""
Sides = tuple[Side, ...]
"""A step: one action, or the two sides of a pair, of which the first has the first turn."""
Span = tuple[str, float, float]
"""A stretch between two turns: the action, start and end on `time.perf_counter`."""


def planned(program: Program) -> list[Sides]:
    """The steps of a checked program."""
    named = list(zip(program, phases(program), strict=True))
    steps = ([named[at] for at in positions[::2]] for positions in steps_of(program))
    return [tuple(tuple(side) for _, side in groupby(step, lambda item: item[0].microbatch)) for step in steps]


def run_in_turns(sides: Sides, compute: Callable[[Action], None], enter: Callable[[str], None]) -> list[Span]:
    """Both sides of a pair to their ends. compute: runs an action; enter: told the phase whenever it may change."""
    pair = _Pair(sides, compute, enter)
    together(lambda: pair.side(0), lambda: pair.side(1), pair.turn)
    pair.note()
    return pair.spans


class _Pair:
    def __init__(self, sides: Sides, compute: Callable[[Action], None], enter: Callable[[str], None]) -> None:
        self.sides, self.compute, self.enter = sides, compute, enter
        self.at = [0, 0]  # the action of each side that is under way
        self.spans: list[Span] = []
        self.under_way: tuple[str, float] | None = None

    def side(self, which: int) -> None:
        """Run the actions of one side."""
        for number, (action, _) in enumerate(self.sides[which]):
            self.at[which] = number
            if number:
                self.turn(which)
            self.compute(action)

    def turn(self, which: int) -> None:
        """From here on it is this side's action that runs."""
        action, phase = self.sides[which][self.at[which]]
        self.enter(phase)
        self.note(str(action))

    def note(self, follows: str | None = None) -> None:
        """A stretch has ended, and another one begins."""
        now = time.perf_counter()
        if self.under_way is not None:
            self.spans.append((*self.under_way, now))
        self.under_way = None if follows is None else (follows, now)
