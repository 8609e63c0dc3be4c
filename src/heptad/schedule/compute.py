"""What F, C, I and W do: the forward of a unit on one micro-batch, and its backward in two parts.

Units have detached boundaries: F runs a unit on a detached input and keeps its graph; I asks autograd for the
gradients of that input, of the taps' probes and of parameters no tap covers; W turns taps into weight gradients,
straight into the engine's buffers; B is both. Of a segment of recomputed units F keeps the first one's input, and C
makes their graphs. Read next: `executor.py` (the loop), `models/taps.py`, `recompute/policy.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from heptad.models.batch import Batch
from heptad.models.build import Model, loose_params, tapped_modules
from heptad.models.decoder import Head
from heptad.models.taps import GradSink, Tape, write_weight_grads
from heptad.schedule.action import Action, Kind, Program, Segments


class Engine(GradSink, Protocol):
    """What the executor needs of a data axis."""

    uses_taps: bool

    def act(self, action: Action, phase: str) -> None:
        """Run a communication action."""

    def whole(self, unit: nn.Module) -> AbstractContextManager[None]:
        """Around a use of a unit's weights that is not its forward."""


class Mover(Protocol):
    """Who moves what units keep for their backward to the host and back (`recompute/offload.py`)."""

    def packing(self, key: tuple[int, int], inputs: Tensor | None, batch: Batch) -> AbstractContextManager[object]:
        """Around a forward that keeps its graph: what it saves belongs to `key`, a unit and a micro-batch."""

    def stow(self, key: tuple[int, int], tape: Tape) -> None:
        """After that forward: what its taps hold for W moves with the rest."""

    def keep(self, key: tuple[int, int], inputs: Tensor, batch: Batch) -> None:
        """All that `key` keeps is its input."""

    def act(self, action: Action) -> None:
        """Run O, o, P or p."""

    def forget(self, key: tuple[int, int]) -> None:
        """The backward of `key` has read it all; its taps hold what W reads."""


def set_tape(module: nn.Module, tape: Tape | None) -> None:
    """`module.tape = tape` past nn.Module's search for parameters, which takes 20 times as long, twice a module."""
    object.__setattr__(module, "tape", tape)


@dataclass(slots=True)
class Run:
    """One unit's forward on one micro-batch: what its backward needs. Of the output that is its place in the graph."""

    inputs: Tensor | None
    output: Tensor | GradientEdge
    tape: Tape
    dys: list[Tensor | None]


class Units:
    """The units of a model as one rank computes them. recompute: those whose forward keeps no graph (a C in the program
    makes it), in segments."""

    def __init__(
        self, model: Model, engine: Engine, backward_from: int, recompute: Segments = (), mover: Mover | None = None
    ) -> None:
        self.model, self.engine, self.mover = model, engine, mover
        self.backward_from = backward_from  # first unit that has a backward
        self.segments = {unit: segment for segment in self._with_backward(recompute) for unit in segment}
        self._tapped = [tapped_modules(unit) for unit in model.units]
        self._loose = [
            loose_params(unit) if engine.uses_taps else [p for p in unit.parameters() if p.requires_grad]
            for unit in model.units
        ]

    def _with_backward(self, recompute: Segments) -> Segments:
        kept = (tuple(unit for unit in segment if unit >= self.backward_from) for segment in recompute)
        return tuple(segment for segment in kept if segment)

    def sink(self, unit: int, microbatch: int) -> GradSink:
        """Where the weight gradients of `unit` on `microbatch` go."""
        return self.engine

    def forward(
        self, unit: int, inputs: Tensor | None, batch: Batch, taped: bool, sink: GradSink | None = None
    ) -> tuple[Tensor, Tape]:
        """One unit's forward, with a tape where the engine wants taps; `sink`: its backward will not be split."""
        tape = Tape(sink)
        for module in self._tapped[unit]:
            set_tape(module, tape if taped and self.engine.uses_taps else None)
        output = self.model.units[unit](inputs, batch)
        for module in self._tapped[unit]:
            set_tape(module, None)
        if not isinstance(output, Tensor):
            raise TypeError(f"{self._named(unit)} returned {type(output).__name__}: a unit returns one tensor")
        if unit == len(self.model.units) - 1 and output.dim():
            shape = list(output.shape)
            raise TypeError(f"{self._named(unit)} is the last one and returned {shape}: it returns the sum of losses")
        return output, tape

    def _named(self, unit: int) -> str:
        return f"unit {unit} ({self.model.unit_specs[unit].name})"

    def loose(self, unit: int) -> list[nn.Parameter]:
        """Parameters whose gradients autograd computes in I."""
        return self._loose[unit]


class Step:
    """One run of a program: the tensors alive in it, by (unit, micro-batch), and what compute actions do to them."""

    def __init__(
        self,
        units: Units,
        program: Program,
        batches: Sequence[Batch],
        scale: Callable[[int], float],
        logits: bool,
        outputs_ready: Callable[[list[Tensor]], None] | None,
    ) -> None:
        self.units, self.batches, self.scale, self.logits = units, batches, scale, logits
        self.split = any(action.kind is Kind.INPUT_GRAD for action in program)
        self.moved = {(action.index, action.microbatch) for action in program if action.kind is Kind.OUT}
        self.outputs_ready = outputs_ready
        self.runs: dict[tuple[int, int], Run] = {}
        self.boundaries: dict[tuple[int, int], Tensor] = {}  # output of a unit, detached: the next one's input
        self.grads: dict[tuple[int, int], Tensor] = {}  # gradient of a unit's output
        self.outputs: list[Tensor] = []
        self.last = len(units.model.units) - 1
        self.num_outputs = sum(a.kind is Kind.FORWARD and a.index == self.last for a in program)

    def compute(self, action: Action) -> None:
        """Run one compute action."""
        unit, microbatch = action.index, action.microbatch
        match action.kind:
            case Kind.FORWARD:
                self._forward(unit, microbatch)
            case Kind.RECOMPUTE:
                self._recompute(unit, microbatch)
            case Kind.BACKWARD:
                self._input_grad(unit, microbatch)
                self._weight_grad(unit, microbatch)
            case Kind.INPUT_GRAD:
                self._input_grad(unit, microbatch)
            case Kind.WEIGHT_GRAD:
                self._weight_grad(unit, microbatch)

    def _input(self, unit: int, microbatch: int, keep: bool) -> Tensor | None:
        if unit == 0:
            return None
        return self.boundaries[unit - 1, microbatch] if keep else self.boundaries.pop((unit - 1, microbatch))

    def _forward(self, unit: int, microbatch: int) -> None:
        units, batch = self.units, self.batches[microbatch]
        grad = torch.is_grad_enabled() and unit >= units.backward_from
        recompute = grad and unit in units.segments
        inputs = self._input(unit, microbatch, keep=recompute and unit == units.segments[unit][0])
        with torch.set_grad_enabled(grad and not recompute):
            if self.logits and unit == self.last:
                last: Any = units.model.units[unit]
                with units.engine.whole(last):
                    args = (inputs, batch) if isinstance(last, Head) else (inputs,)
                    output, tape = last.logits(*args), Tape()
            else:
                sink = self._sink(unit, microbatch) if grad and not recompute else None
                with self._packing(unit, microbatch, inputs) if grad and not recompute else nullcontext():
                    output, tape = units.forward(unit, inputs, batch, grad and not recompute, sink)
        if grad and not recompute:
            self.runs[unit, microbatch] = self._run(unit, microbatch, inputs, output, tape)
        elif recompute and inputs is not None and (mover := self._mover(unit, microbatch)) is not None:
            mover.keep((unit, microbatch), inputs, batch)
        if unit == self.last:
            self.outputs.append(output.detach())
            if self.outputs_ready is not None and len(self.outputs) == self.num_outputs:
                self.outputs_ready(self.outputs)
        else:
            self.boundaries[unit, microbatch] = output.detach().requires_grad_(grad)

    def _sink(self, unit: int, microbatch: int) -> GradSink | None:
        """For a backward in one piece (B): weight gradients are written while it runs, nothing waits for a W."""
        return self.units.sink(unit, microbatch) if self.units.engine.uses_taps and not self.split else None

    def _recompute(self, unit: int, microbatch: int) -> None:
        inputs = self._input(unit, microbatch, keep=False)
        sink = self._sink(unit, microbatch)
        with self._packing(unit, microbatch, inputs):
            output, tape = self.units.forward(unit, inputs, self.batches[microbatch], taped=True, sink=sink)
        self.runs[unit, microbatch] = self._run(unit, microbatch, inputs, output, tape)
        if unit != self.units.segments[unit][-1]:
            self.boundaries[unit, microbatch] = output.detach().requires_grad_()

    def _mover(self, unit: int, microbatch: int) -> Mover | None:
        return self.units.mover if (unit, microbatch) in self.moved else None

    def _packing(self, unit: int, microbatch: int, inputs: Tensor | None) -> AbstractContextManager[object]:
        mover = self._mover(unit, microbatch)
        return nullcontext() if mover is None else mover.packing((unit, microbatch), inputs, self.batches[microbatch])

    def _run(self, unit: int, microbatch: int, inputs: Tensor | None, output: Tensor, tape: Tape) -> Run:
        """Only the last unit's output is needed as a value; what others hold of theirs is the next one's input."""
        if (mover := self._mover(unit, microbatch)) is not None:
            mover.stow((unit, microbatch), tape)
        place = output.requires_grad and unit != self.last and self.units.engine.uses_taps
        return Run(inputs, get_gradient_edge(output) if place else output, tape, [])

    def _input_grad(self, unit: int, microbatch: int) -> None:
        run = self.runs[unit, microbatch]
        wants = [run.inputs] if run.inputs is not None and unit > self.units.backward_from else []
        probes, loose = run.tape.probes(), self.units.loose(unit)
        leaves = run.tape.leaves()
        if unit == self.last:
            assert isinstance(run.output, Tensor)
            dy = torch.full_like(run.output, self.scale(microbatch))
        else:
            dy = self.grads.pop((unit, microbatch))
        if not self.units.engine.uses_taps:
            torch.autograd.backward(run.output, dy)
            grads: Sequence[Tensor | None] = [x.grad for x in wants]
        else:
            grads = torch.autograd.grad(run.output, [*wants, *leaves, *loose], dy, allow_unused=True)
        if wants:
            dx = grads[0]
            self.grads[unit - 1, microbatch] = torch.zeros_like(wants[0]) if dx is None else dx
        if self.units.engine.uses_taps:
            run.dys = list(grads[len(wants) : len(wants) + len(probes)])
            for param, grad in zip(loose, grads[len(wants) + len(leaves) :], strict=True):
                if grad is not None:
                    self.units.sink(unit, microbatch).add(param, grad)
        del run.output  # the graph is spent
        if (mover := self._mover(unit, microbatch)) is not None:
            mover.forget((unit, microbatch))

    def _weight_grad(self, unit: int, microbatch: int) -> None:
        run = self.runs.pop((unit, microbatch))
        write_weight_grads(run.tape, run.dys, self.units.sink(unit, microbatch))
