"""The one-device run that a layout is compared with: plain autograd, no taps, no engine, no executor.

Each step: the global batch in its micro-batches; loss = Σ token losses / Σ targets; every gradient by autograd, summed
in the job's reduction dtype; the norm over all of them. Then the update, by optimizers of its own (`update.py`), *from
the gradients the layout got*: they have been compared already, and an optimizer that divides by a gradient's size
(Adam where the true gradient is zero, as for a key's bias) would turn two roundings into two updates. So each step
proves two links: same parameters -> same gradients; same gradients -> same parameters. No drift builds up. In bf16 the
next step starts from the layout's own parameters, once they are within fp32's bound (`adopt`): where the last bit of a
master differs its cast may differ by a bit of bf16, 2⁻⁸, which every gradient below then feels, and no reordered run.

`reordered` runs the same step with its sums in another order, for the bound of bf16 (`judge.py` argues it).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from heptad.config.context import degrees
from heptad.config.schema import Job
from heptad.loader.loader import Loader
from heptad.loader.prepare import PreparedData
from heptad.models.batch import Batch
from heptad.models.build import build
from heptad.models.init import fill
from heptad.models.router import routers
from heptad.models.spec import ParamSpec
from heptad.precision.policy import Policy
from heptad.train.balance import biased, summed
from heptad.verify.decisions import Decisions, taken, witnesses
from heptad.verify.partial_experts import partial_experts, rounds
from heptad.verify.partial_keys import partial_keys
from heptad.verify.update import WholeOptimizer

Grads = dict[str, Tensor]
DRAWS = 8
"""Runs with partial sums: of one run a small tensor's distance is a matter of luck (4 in 100 are twice another's)."""


@dataclass(frozen=True, slots=True)
class Figures:
    """One device's step before its update. outputs[micro-batch][unit]: Σ x² of the unit's output, a fingerprint.
    added: both losses of routers. decided: in bf16, what each router decided."""

    loss: float
    grads: Grads
    norm: float
    num_targets: int
    outputs: list[list[float]] = field(default_factory=list)
    added: tuple[float, float] = (0.0, 0.0)
    decided: dict[str, Decisions] = field(default_factory=dict)


class Reference:
    """`job` on one device.

    values: every parameter whole, by name, trainable ones (`masters`) in the dtype the optimizer updates.
    given: in bf16, what the layout's routers decided in the step at hand, which every run of it follows (`take`);
    ruled: what should be chosen by their scores.
    """

    def __init__(self, job: Job, tokens: PreparedData) -> None:
        self.job, self.policy = job, Policy.of(job.precision, "cpu")
        self.model = build(job)
        self.model.materialise(job.train.seed, torch.device("cpu"), self.policy.params)
        self.model.place(torch.device("cpu"), self.policy.master)
        self.model.module.train()
        self.specs = self.model.specs
        self.values = {spec.name: self._initial(spec) for spec in self.specs}
        self.masters = {spec.name: self.values[spec.name] for spec in self.specs if spec.trainable}
        self.optimizer = WholeOptimizer(job.optimizer, self.specs, job.train.steps)
        self.loader = Loader(job, 0, 1, tokens)
        self.loads: dict[str, Tensor] = {}
        self.witnesses = witnesses(self.model.module, self.policy)
        self.given: dict[str, Decisions] = {}
        self.ruled: Grads = {}

    def _initial(self, spec: ParamSpec) -> Tensor:
        values = torch.empty(spec.shape, dtype=self.policy.master if spec.trainable else self.policy.params)
        fill(values.view(-1), spec, 0, spec.numel, self.job.train.seed)
        return values

    def batches(self, step: int) -> list[Batch]:
        """The micro-batches of step `step` (from 1) of all ranks, in the global order."""
        return self.loader.step(step - 1)

    def compute(self, step: int) -> Figures:
        """Loss, gradients and norm of step `step` at the present parameters."""
        with self._counted():
            return self._compute(self.batches(step), flipped=False)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Inside, every forward's load of the experts is added to `loads`, which is empty before."""
        chosen = routers(self.model.module)
        for router in chosen.values():
            router.loads = {}
        try:
            yield
        finally:
            self.loads = {name: summed(router, torch.device("cpu")) for name, router in chosen.items()}
            for router in chosen.values():
                router.loads = None

    def state(self) -> Grads:
        """Every parameter, and the bias of every router that has one, whole."""
        biases = {name: router.bias for name, router in biased(self.model).items()}
        return self.values | {name: bias for name, bias in biases.items() if bias is not None}

    def balance(self) -> None:
        """The biases of routers after the step that `loads` is of."""
        for name, router in biased(self.model).items():
            assert router.bias is not None
            load = self.loads[name.removesuffix(".bias")][:-1].double()
            router.bias = router.bias + router.speed * (load.mean() - load).sign().to(router.bias)

    def take(self, given: dict[str, Decisions]) -> None:
        """What the layout's routers decided in the step that comes."""
        self.given = given
        self.ruled = {name: self.witnesses[name].rule(found.scores) for name, found in given.items()}

    def follow(self, step: int, updates: Sequence[Grads]) -> Figures:
        """What `compute` gives; `updates`: the gradients of each update inside the step, of which there are none."""
        assert not updates
        return self.compute(step)

    def reordered(self, step: int) -> list[Figures]:
        """The same step with sums in another order: sequences reversed and in one batch; features reversed as well.

        Reversing a logical dim ("width", "mlp", "expert_mlp") of every parameter that has it is the same function of
        the batch. Dropout and jitter are keyed by feature, so with them the width stays as it is. Under the tensor axis
        also `DRAWS` runs that form the sums it cuts as partial sums, as many as ranks, each rounded; under the context
        axis attention in parts; under expert axes that round where one device does not, mixtures in parts; every run
        cuts elsewhere.
        """
        return self._reordered(self.batches(step))

    def _reordered(self, batches: list[Batch]) -> list[Figures]:
        tp, cp, (ring, _) = self.job.layout.tp, self.job.layout.cp, degrees(self.job.layout)
        backwards = [joined(list(reversed(batches)))]
        found = [self._compute(backwards, flipped=False), self._compute(batches, flipped=True)]
        for offset in range(DRAWS if tp * cp > 1 or rounds(self.job.layout) else 0):
            sums: AbstractContextManager[object] = PartialSums(tp, offset) if tp > 1 else nullcontext()
            fewer = offset // 2 if self.job.data.seq_len <= ring else 0  # cuts between all tokens cannot move
            parts = max(ring - fewer, min(ring, 2))
            keys: AbstractContextManager[object] = (
                partial_keys(self.model, parts, offset, self.job.model) if cp > 1 else nullcontext()
            )
            experts: AbstractContextManager[object] = nullcontext()
            if rounds(self.job.layout):
                experts = partial_experts(self.model, self.job.layout, offset)
            with sums, keys, experts:
                found.append(self._compute(batches, flipped=False))
        return found

    def update(self, step: int, grads: Grads) -> None:
        """Clip `grads` (unclipped, whole) by their own norm and apply the optimizer."""
        norm, limit = norm_of(grads), self.job.optimizer.clip_norm
        factor = limit / norm if limit is not None and norm > limit else 1.0
        self.optimizer.step(step, self.masters, {name: grad * factor for name, grad in grads.items()})
        self.balance()

    def adopt(self, params: Grads) -> None:
        """Go on from the layout's parameters; `params`: all, whole, and biases of routers."""
        for name, master in self.masters.items():
            master.copy_(params[name])

    def _compute(self, batches: Sequence[Batch], flipped: bool) -> Figures:
        by_name = {spec.name: spec for spec in self.specs}
        for name, values in self.values.items():
            self.model.params[name].data.copy_(self._flip(values, by_name[name]) if flipped else values)
        num_targets = sum(batch.num_targets() for batch in batches)
        grads = {name: torch.zeros(master.shape, dtype=self.policy.reduce) for name, master in self.masters.items()}
        wanted = [self.model.params[name] for name in grads]
        losses, outputs, adding = [], [], list(routers(self.model.module).values())
        for router in adding:
            router.added = {}
        for name, witness in self.witnesses.items():
            witness.start(self.given.get(name))
        for batch in batches:
            loss, marks = self._forward(batch)
            found = torch.autograd.grad(loss / max(num_targets, 1), wanted, allow_unused=True)
            for total, grad in zip(grads.values(), found, strict=True):
                if grad is not None:
                    total.add_(grad.to(total.dtype))
            losses.append(loss.item())
            outputs.append(marks)
        if flipped:
            grads = {name: self._flip(grad, by_name[name]) for name, grad in grads.items()}
        parts = [part.double() for router in adding for part in (router.added or {}).values()]
        balance, z_loss = torch.stack([torch.zeros(2, dtype=torch.float64), *parts]).sum(0).tolist()
        mean = sum(losses) / max(num_targets, 1)
        decided = taken(self.witnesses)
        return Figures(mean, grads, norm_of(grads), num_targets, outputs, (balance, z_loss), decided)

    def _forward(self, batch: Batch) -> tuple[Tensor, list[float]]:
        x: Tensor | None = None
        marks = []
        for unit in self.model.units:
            x = unit(x, batch)
            marks.append(fingerprint(x))
        assert x is not None
        return x, marks

    def _flip(self, tensor: Tensor, spec: ParamSpec) -> Tensor:
        inner, width = ("mlp", "expert_mlp"), not (self.job.model.dropout or self.job.model.jitter)
        names = (*inner, "width") if width else inner
        found = tensor.flip([at for at, name in enumerate(spec.dims) if name in names])
        if width and "joined" in spec.dims:  # two widths, one behind the other
            dim = spec.dims.index("joined")
            found = torch.cat([half.flip(dim) for half in found.chunk(2, dim)], dim)
        return found


class PartialSums(TorchFunctionMode):
    """Products with a weight whose dim 0 the tensor axis cuts into `number` parts: one product a part, rounded to its
    dtype, then added up. A linear's input gradient by autograd, a row linear's output here. `offset`: rows by which
    the cuts are moved.
    """

    def __init__(self, number: int, offset: int = 0) -> None:
        super().__init__()
        self.number, self.offset = number, offset

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """`F.linear`, `x @ weight`, `addmm(bias, x, weight)` in parts; all else, a router's product too, as it is."""
        if func is F.linear and len(args) == 3 and isinstance(args[1], nn.Parameter):
            x, weight, bias = args
            biases = [None] * self.number if bias is None else self._parts(bias, 0)
            parts = [F.linear(x, rows, some) for rows, some in zip(self._parts(weight, 0), biases, strict=True)]
            return torch.cat(parts, dim=-1).roll(-self.offset, -1)
        if func in (Tensor.matmul, Tensor.__matmul__, torch.addmm) and isinstance(args[-1], nn.Parameter):
            x, weight = args[-2:]
            products = [some @ rows for some, rows in zip(self._parts(x, -1), self._parts(weight, 0), strict=True)]
            total = functools.reduce(torch.add, products)
            return total if len(args) == 2 else total + args[0]
        return func(*args, **(kwargs or {}))

    def _parts(self, tensor: Tensor, dim: int) -> tuple[Tensor, ...]:
        return tensor.roll(self.offset, dim).tensor_split(self.number, dim)


def fingerprint(x: Tensor) -> float:
    """Σ x² in fp64: two equal outputs have equal ones, and a difference anywhere shows."""
    return float(x.detach().double().square().sum())


def norm_of(grads: Grads) -> float:
    """2-norm of all gradients together."""
    return float(sum(grad.double().square().sum() for grad in grads.values())) ** 0.5


def joined(batches: list[Batch]) -> Batch:
    """One batch of all sequences."""
    names = ("ids", "labels", "positions", "documents", "index")
    parts: dict[str, Any] = {name: torch.cat([getattr(batch, name) for batch in batches]) for name in names}
    real = [torch.ones_like(batch.ids, dtype=torch.bool) if batch.real is None else batch.real for batch in batches]
    return Batch(step=batches[0].step, mixed=None, real=torch.cat(real), **parts)
