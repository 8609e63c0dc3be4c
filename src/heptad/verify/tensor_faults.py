"""Faults of the tensor axis, of sequence parallelism and of recompute, after bugs that were made in the field.

Sums that are left out or run twice, padding and replicas that count, and masks of dropout that depend on which rank or
which forward draws them. Read next: `fault.py` (what a fault is), `faults.py` (all of them), `models/cut.py` (whose
gradients are summed), `models/dropout.py` (how masks are keyed).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from heptad.config.schema import Job
from heptad.mesh.collectives import Group
from heptad.models.attention import Attention
from heptad.models.cut import Summed, cut, family_of
from heptad.models.decoder import Block, Embed, Head
from heptad.models.dropout import Dropout
from heptad.models.parallel import RowLinear
from heptad.models.spec import ParamSpec
from heptad.train import step as step_module
from heptad.train.step import Trainer
from heptad.verify.fault import Fault, FaultKind, anything, engine_of

# Where faults live


def _tensor(job: Job) -> tuple[str, ...] | str:
    return ("tp",) if job.layout.tp > 1 else "there is one tensor rank (layout.tp = 1)"


def _where(rule: Callable[[Job], bool], why: str) -> Callable[[Job], tuple[str, ...] | str]:
    """On the tensor axis, where `rule` holds of the job; else `why` not."""

    def home(job: Job) -> tuple[str, ...] | str:
        found = _tensor(job)
        return found if isinstance(found, str) or rule(job) else why

    return home


def _summed(job: Job, spec: ParamSpec) -> Summed:
    if family_of(spec) != "dense":
        return "none"
    return cut(spec, job.model, job.layout.tp, 0, job.layout.sequence_parallel).summed


def _partial_norms(job: Job) -> bool:
    return job.layout.sequence_parallel or job.model.qk_norm


def _partial_norm(job: Job, spec: ParamSpec) -> bool:
    return ("norm." in spec.name) and _summed(job, spec) == "tensor"


def _shared_kv(job: Job) -> bool:
    return (job.model.kv_heads or job.model.heads) < job.layout.tp


def _kv_copy(job: Job, spec: ParamSpec) -> bool:
    return anything(job, spec) and _summed(job, spec) == "copies"


def _row_bias(job: Job, spec: ParamSpec) -> bool:
    return spec.name.endswith((".out.bias", ".down.bias"))


def _recomputed_dropout(job: Job) -> tuple[str, ...] | str:
    """Selective recompute runs attention's core again, in which only the scores are dropped."""
    mode, model = job.recompute.mode, job.model
    if mode == "none":
        return "nothing is recomputed (recompute.mode = none)"
    if mode == "selective":
        why = "selective recompute runs no dropout again but that of scores (model.attention_dropout, layout.cp)"
        return ("recompute",) if model.attention_dropout and job.layout.cp == 1 else why
    dropped = model.dropout or model.attention_dropout
    return ("recompute",) if dropped else "nothing is dropped (model.dropout = model.attention_dropout = 0)"


# What they do


def left_out(fault: Fault, trainer: Trainer) -> None:
    """The aimed gradient is not summed with the others that are only a part."""
    for members, group, _ in engine_of(trainer)._parts:
        if group.axis != "tp":
            continue
        members[:] = [shard for shard in members if shard.spec.name != fault.param]


def _bias_repeated(fault: Fault, trainer: Trainer) -> None:
    for name, module in trainer.parallel.model.module.named_modules():
        if isinstance(module, RowLinear) and f"{name}.bias" == fault.param:
            module.adds_bias = True


def _padded_logit(fault: Fault, trainer: Trainer) -> None:
    for module in trainer.parallel.model.module.modules():
        if isinstance(module, Head) and len(module.vocabulary) < module.out.weight.shape[0]:
            module.vocabulary = range(module.vocabulary.start, module.vocabulary.start + module.out.weight.shape[0])


def _norm_counts_replicas(fault: Fault, trainer: Trainer) -> None:
    right = vars(step_module)["total_norm"]  # maybe wrong already: two faults

    def repeated(shards: Any, p: float = 2.0, pipeline: Group | None = None) -> Tensor:
        with torch.no_grad():
            found: Tensor = right([replace(shard, owner=True) for shard in shards], p, pipeline)
            return found

    setattr(step_module, "total_norm", repeated)  # noqa: B010


class _Misled:
    """A `Dropout` whose key is changed on the way: (rows' numbers, step) -> the same, wrong."""

    def __init__(self, right: Dropout, change: Callable[[Tensor, int], tuple[Tensor, int]]) -> None:
        self.right, self.change = right, change

    def features(self, x: Tensor, index: Tensor, step: int) -> Tensor:
        """See `Dropout.features`."""
        return self.right.features(x, *self.change(index, step))

    def attention_map(
        self, heads: int, queries: Tensor, keys: Tensor, step: int
    ) -> tuple[tuple[Tensor, ...], Callable[..., Tensor]]:
        """See `Dropout.attention_map`."""
        rows, step = self.change(queries, step)
        return self.right.attention_map(heads, rows, keys, step)


def _mislead(trainer: Trainer, change: Callable[[Tensor, int], tuple[Tensor, int]], *kinds: type) -> None:
    for module in trainer.parallel.model.module.modules():
        for name in ("dropout", "attention_dropout", "mlp_dropout") if isinstance(module, kinds) else ():
            right = getattr(module, name, None)
            if isinstance(right, Dropout | _Misled):
                setattr(module, name, _Misled(right, change))  # type: ignore[arg-type]


def _stale_dropout(fault: Fault, trainer: Trainer) -> None:
    executor = trainer.parallel.executor

    def again(index: Tensor, step: int) -> tuple[Tensor, int]:
        return index, step + (executor.phase == "backward")

    _mislead(trainer, again, Block, Attention)


def _shard_dropout(fault: Fault, trainer: Trainer) -> None:
    group = trainer.mesh.group("tp")
    if not trainer.job.layout.sequence_parallel:
        return

    def local(index: Tensor, step: int) -> tuple[Tensor, int]:
        return index - group.index * index.shape[0], step

    _mislead(trainer, local, Block, Embed)


TENSOR: dict[str, FaultKind] = {
    "norm_not_summed": FaultKind(
        "a norm's gradient, of this rank's tokens or heads only, is not summed over tensor ranks",
        _where(_partial_norms, "every norm sees all tokens and heads (layout.sequence_parallel, model.qk_norm)"),
        left_out,
        _partial_norm,
    ),
    "bias_repeated": FaultKind(
        "a row-parallel bias is added by every tensor rank",
        _where(
            lambda job: job.model.attention_bias or job.model.mlp_bias,
            "no row-parallel linear has a bias (model.attention_bias, model.mlp_bias)",
        ),
        _bias_repeated,
        _row_bias,
        second=True,
    ),
    "kv_not_summed": FaultKind(
        "the gradient of a kv head that tensor ranks share is not summed over them",
        _where(_shared_kv, "no kv head is shared (model.kv_heads >= layout.tp)"),
        left_out,
        _kv_copy,
    ),
    "padded_logit": FaultKind(
        "rows that pad the vocabulary are counted in the softmax",
        _where(lambda job: job.model.vocab % job.layout.tp > 0, "no row is padding (layout.tp divides model.vocab)"),
        _padded_logit,
    ),
    "norm_counts_replicas": FaultKind(
        "what several tensor ranks hold counts several times in the gradient norm",
        _tensor,
        _norm_counts_replicas,
    ),
    "shard_dropout": FaultKind(
        "a tensor rank numbers the rows of its part of the stream from the first one, so parts drop alike",
        _where(
            lambda job: job.layout.sequence_parallel and job.model.dropout > 0,
            "no cut stream is dropped (layout.sequence_parallel, model.dropout)",
        ),
        _shard_dropout,
    ),
    "stale_dropout": FaultKind(
        "a forward that runs again drops other elements",
        _recomputed_dropout,
        _stale_dropout,
    ),
}
