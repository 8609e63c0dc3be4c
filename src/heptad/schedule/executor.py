"""The executor: a loop over a checked program. No hooks, no schedule-specific code.

Compute actions run units (`compute.py`). Communication actions go to the engine, which starts or waits. The sides of an
overlapped pair run in turns, handed over inside of units (`mesh/turns.py`). Every action can be recorded as an `Event`;
of a pair's, each stretch between two turns. Read next: `action.py`, `compute.py`, `axes/data/engine.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from heptad.mesh.ledger import Ledger
from heptad.models.batch import Batch
from heptad.models.build import Model
from heptad.schedule.action import COMPUTE, MOVES, TRANSPORT, VERSIONS, Action, Kind, Program, Segments
from heptad.schedule.compute import Engine, Mover, Step, Units
from heptad.schedule.in_turns import Sides, planned, run_in_turns
from heptad.trace import Event

_COMPUTES = COMPUTE | VERSIONS | {Kind.UPDATE, Kind.UPDATE_STAGE}


class Transport(Protocol):
    """Who sends and receives what lies between two stages of a pipeline (`axes/pipeline/transport.py`)."""

    def act(self, action: Action, at: Step) -> None:
        """Run S to h: outputs from and inputs into `at.boundaries`, gradients from and into `at.grads`."""


class Executor(Units):
    """Runs programs on one rank. ledger: told the phase of each action, for collectives inside of it."""

    def __init__(
        self,
        model: Model,
        engine: Engine,
        backward_from: int,
        rank: int,
        ledger: Ledger,
        recompute: Segments = (),
        mover: Mover | None = None,
        transport: Transport | None = None,
    ) -> None:
        super().__init__(model, engine, backward_from, recompute, mover)
        self.rank, self.ledger, self.transport = rank, ledger, transport
        self.phase = "forward"  # of the action under way
        self._plan: tuple[Program, list[Sides]] = (), []  # of the program that ran last

    def run(
        self,
        program: Program,
        batches: Sequence[Batch],
        scale: Callable[[int], float] = lambda _: 1.0,
        update: Callable[[list[Tensor]], None] | None = None,
        record: list[Event] | None = None,
        logits: bool = False,
        outputs_ready: Callable[[list[Tensor]], None] | None = None,
        update_stage: Callable[[int], None] | None = None,
    ) -> list[Tensor]:
        """Run `program`; returns the output of the last unit (detached) for each micro-batch that it runs on here.

        scale: gradient of the last unit's output on a micro-batch (one over a count of targets), asked for when its
        backward runs. outputs_ready: called with those outputs after the last forward; update: what U does, given them;
        update_stage: what V does, given the micro-batch. logits: the last unit gives its logits [B, L, V] instead of
        the sum of losses (no backward then).
        """
        step = Step(self, program, batches, scale, logits, outputs_ready)
        if self._plan[0] is not program:
            self._plan = program, planned(program)
        for sides in self._plan[1]:
            if len(sides) == 2:
                spans = run_in_turns(sides, step.compute, self._enter)
                if record is not None:
                    record += [Event(self.rank, "compute", *span) for span in spans]
                continue
            ((action, phase),) = sides[0]
            start = time.perf_counter()
            self._enter(phase)
            if action.kind in COMPUTE:
                step.compute(action)
            elif action.kind is Kind.UPDATE:
                assert update is not None
                update(step.outputs)
            elif action.kind is Kind.UPDATE_STAGE:
                assert update_stage is not None
                update_stage(action.microbatch)
            elif action.kind in MOVES:
                assert self.mover is not None
                self.mover.act(action)
            elif action.kind in TRANSPORT:
                assert self.transport is not None
                self.transport.act(action, step)
            else:
                self.engine.act(action, self.phase)
            if record is not None:
                lane = "move" if action.kind in MOVES else "comm"
                lane = "compute" if action.kind in _COMPUTES else lane
                end = time.perf_counter()
                record.append(Event(self.rank, lane, str(action), start, end))
        assert not step.runs and not step.grads, "a program left work undone"
        return step.outputs

    def _enter(self, phase: str) -> None:
        self.phase = self.ledger.phase = phase
