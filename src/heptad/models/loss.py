"""The head's loss: cross-entropy over a vocabulary that is cut over the tensor ranks, in chunks of tokens.

Each rank has the logits of its own ⌈V/T⌉ rows of the vocabulary, for one chunk of tokens at a time: [N, V] is never on
one rank, and with chunks [N, V/T] is not either. A token's maximum, Σ exp and target logit are merged over the ranks by
two all-reduces for all tokens together, of N and of 2·N numbers in fp32 (fp64 in a float64 run). Padded rows (the last
ranks', where T does not divide V) have no probability: their logits are -inf, their gradient is exactly 0.

Kept for the backward is a token's log Σ exp. With one chunk also the buffer of the logits, in which exp(logit - max)
was formed and the gradient softmax - onehot will be: one buffer, nothing twice (1,024 × 4,096 in fp32 on one core:
10 ms for both passes, 14 with torch's log-softmax). With more chunks the backward forms each chunk's logits again: a
fourth matmul of N·D·V/T beside the three of any linear.

How the weight's gradient leaves (`Tape`): B writes it into the sink, chunk by chunk. Where I and W are split, one chunk
hands the logits' gradient to W as any linear does; with more chunks I forms the weight's gradient too and W adds it:
kept until W, the logits' gradients would be the [N, V/T] that chunks avoid, and W has no gathered weight to form them
from. Sources: Megatron-LM, Shoeybi et al., arXiv 1909.08053, §3; chunks: Wijmans et al., arXiv 2411.09009.

Legend: N tokens of the micro-batch, D width, V vocabulary, T tensor ranks. Read next: `chunk.py`, `decoder.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from heptad.mesh.collectives import Group, all_gather, all_reduce
from heptad.mesh.regions import Pending, Stream
from heptad.models.batch import IGNORED
from heptad.models.chunk import chunk_tokens
from heptad.models.layers import Linear, link_of, trainable
from heptad.models.taps import Dys, GradSink, Tape


def at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    """The dtype of losses and their sums."""
    return torch.promote_types(dtype, torch.float32)


def exponentials_(wide: Tensor, start: int, rows: int, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """wide [c, V/T] becomes exp(logit - top); -> top [c], Σ exp [c], the target's logit [c] (0: not here).

    The first `rows` columns are rows of the vocabulary, from `start` on; the others are padding. A rank without any
    real row has top = the lowest finite number and Σ exp = 0.
    """
    wide[:, rows:] = -torch.inf
    here, column = targets(labels, start, rows)
    target = wide.gather(-1, column.unsqueeze(-1)).squeeze(-1).masked_fill(~here, 0.0)
    top = wide.amax(-1).clamp(min=torch.finfo(wide.dtype).min)
    return top, wide.sub_(top.unsqueeze(-1)).exp_().sum(-1), target


def gradient_(exps: Tensor, factor: Tensor, dy: Tensor, start: int, rows: int, labels: Tensor) -> Tensor:
    """exps [c, V/T] becomes exps · factor · dy, less dy at each target: the logits' gradient. factor, dy [c]."""
    here, column = targets(labels, start, rows)
    hit = torch.where(here, dy, 0.0).neg().unsqueeze(-1)
    return exps.mul_((factor * dy).unsqueeze(-1)).scatter_add_(-1, column.unsqueeze(-1), hit)


def targets(labels: Tensor, start: int, rows: int) -> tuple[Tensor, Tensor]:
    """labels [c] -> whether each is a target among the rows [start, start + rows), and its column there (0: not)."""
    here = (labels >= start) & (labels < start + rows)  # IGNORED is negative
    return here, torch.where(here, labels - start, 0)


@dataclass(frozen=True, slots=True)
class LossKernels:
    """The loss's arithmetic on one chunk of logits: pure functions of tensors, in the logits' memory."""

    exponentials_: Callable[[Tensor, int, int, Tensor], tuple[Tensor, Tensor, Tensor]] = exponentials_
    gradient_: Callable[[Tensor, Tensor, Tensor, int, int, Tensor], Tensor] = gradient_


@dataclass(slots=True)
class TokenLoss:
    """One micro-batch's loss, as the head and its tap see it.

    labels [N]: of all tokens, on every rank. rows: those of the whole vocabulary that `out.weight` has here, first ones
    first; any it has beyond are padding. chunk: `train.loss_chunk`.
    """

    out: Linear
    stream: Stream
    rows: range
    chunk: int | Literal["auto"]
    labels: Tensor
    tape: Tape | None = None
    kernels: LossKernels = LossKernels()

    def __call__(self, x: Tensor) -> Tensor:
        """x: the stream after the norm -> Σ of -log softmax over the labels that count, 0-d, the same on every rank."""
        with torch.no_grad():
            full = self.gather(x.detach()).wait()
        kept = full if self.stream.sequence and self.stream.keep else x
        link, sink = self._link(kept), None if self.tape is None else self.tape.sink
        loss: Tensor = _Loss.apply(x, full, kept, link, self, sink)
        return loss

    def _link(self, kept: Tensor) -> Tensor | None:
        """What the weight's gradient leaves by: the tape's anchor or probe, or without a tape the weight itself."""
        weight, num_tokens = self.out.weight, self.labels.numel()
        if not trainable(weight):
            return None
        if self.tape is None:
            return weight
        if self.tokens_at_once(kept) == num_tokens:
            return link_of(self.tape, self, (kept,), kept, torch.Size((num_tokens, weight.shape[0])))
        return link_of(self.tape, self, (), kept.new_empty((), dtype=at_least_fp32(kept.dtype)), weight.shape)

    def tokens_at_once(self, x: Tensor) -> int:
        """Tokens in a chunk."""
        itemsize = at_least_fp32(x.dtype).itemsize
        return chunk_tokens(self.chunk, self.labels.numel(), self.out.weight.shape[0], itemsize)

    def gather(self, x: Tensor) -> Pending:
        """All tokens' x from the stream."""
        return self.stream.gather(x, self.labels.numel())

    def gather_again(self, kept: Tensor) -> Pending:
        """All tokens' x from what was kept of it."""
        return self.gather(kept) if self.stream.gathers_again else Pending(None, kept)

    def write_weight_grads(self, saved: tuple[Tensor, ...], dys: Dys, sink: GradSink) -> None:
        """W: the logits' gradient [N, V/T] times x, or the weight's gradient that I formed."""
        (dy,) = dys
        assert dy is not None
        if saved:
            sink.add_matmul(self.out.weight, dy.t(), self.gather_again(saved[0]).wait().flatten(0, -2))
        else:
            sink.add(self.out.weight, dy)

    def exponentials(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x [c, D], labels [c] -> exp(logit - top) [c, V/T]; top, Σ exp, the target's logit (0: not here), all [c]."""
        wide = (x @ self.out.weight.t()).to(at_least_fp32(x.dtype))  # [c, V/T]
        top, total, target = self.kernels.exponentials_(wide, self.rows.start, len(self.rows), labels)
        return wide, top, total, target

    def gradient_(self, exps: Tensor, factor: Tensor, dy: Tensor, labels: Tensor) -> Tensor:
        """The logits' gradient [c, V/T], in the memory of exps."""
        return self.kernels.gradient_(exps, factor, dy, self.rows.start, len(self.rows), labels)


class _Loss(torch.autograd.Function):
    """Loss of `job` and a backward that gives dx, reduced over the ranks, and passes the weight's gradient on."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, full: Tensor, kept: Tensor, link: Tensor | None, job: TokenLoss, sink: GradSink | None
    ) -> Tensor:
        labels, rows, step = job.labels, full.flatten(0, -2), job.tokens_at_once(x)
        parts: list[tuple[Tensor, Tensor, Tensor]] = []
        exps = None
        for start in range(0, labels.numel(), step):
            exps = None  # before the next is made: one chunk's logits are alive
            exps, *sums = job.exponentials(rows[start : start + step], labels[start : start + step])
            parts.append((sums[0], sums[1], sums[2]))
        top, total, target = (torch.cat(column) for column in zip(*parts, strict=True))
        highest, log_sum, target = _merge(top, total, target, job.stream.group)
        ctx.job, ctx.sink, ctx.shape, ctx.dtype, ctx.step = job, sink, full.shape, full.dtype, step
        ctx.later = len(parts) == 1 and sink is None and job.tape is not None  # W makes the weight's gradient
        reads_x = len(parts) > 1 or (link is not None and not ctx.later)
        ctx.save_for_backward(
            kept if reads_x else None,
            highest + log_sum if len(parts) > 1 else (top - highest - log_sum).exp_(),
            None if len(parts) > 1 else exps,
        )
        return ((highest - target) + log_sum).masked_fill_(labels == IGNORED, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        job: TokenLoss = ctx.job
        kept, statistic, exps = ctx.saved_tensors
        wants_x, wants_weight = ctx.needs_input_grad[0], ctx.needs_input_grad[3]
        labels, weight, step = job.labels, job.out.weight, ctx.step
        counted = torch.where(labels == IGNORED, 0.0, dy)  # [N]
        full = None if kept is None else job.gather_again(kept)
        dx = weight.new_empty(ctx.shape, dtype=ctx.dtype).flatten(0, -2) if wants_x else None  # [N, D]
        passed, reduced = None, None
        for start in range(0, labels.numel(), step):
            part = slice(start, start + step)
            if exps is None:
                assert full is not None
                grad = _logits_gradient(job, full.wait().flatten(0, -2)[part], statistic[part], counted[part], part)
            else:
                grad = job.gradient_(exps, statistic, counted, labels)
            grad = grad.to(ctx.dtype)  # [c, V/T]
            if dx is not None:
                torch.mm(grad, weight, out=dx[part])
                if start + step >= labels.numel():
                    reduced = job.stream.reduce(dx.view(ctx.shape))  # under the last weight gradient
            if wants_weight and ctx.later:
                passed = grad
            elif wants_weight:
                assert full is not None
                passed = _weight_gradient(job, grad, full.wait().flatten(0, -2)[part], ctx.sink, passed)
            del grad  # before the next is made
        return None if reduced is None else reduced.wait(), None, None, passed, None, None


def _logits_gradient(job: TokenLoss, x: Tensor, log_sums: Tensor, dy: Tensor, part: slice) -> Tensor:
    """One chunk's logits again, and in their memory their gradient; x [c, D], log_sums and dy [c] -> [c, V/T]."""
    labels = job.labels[part]
    exps, top, _, _ = job.exponentials(x, labels)
    return job.gradient_(exps, (top - log_sums).exp_(), dy, labels)


def _weight_gradient(
    job: TokenLoss, grad: Tensor, x: Tensor, sink: GradSink | None, before: Tensor | None
) -> Tensor | None:
    """gradᵀ x of one chunk, into the sink; without one the sum of the chunks' so far, in at least fp32."""
    if sink is not None:
        sink.add_matmul(job.out.weight, grad.t(), x)
        return None
    if before is None:
        return (grad.t() @ x).to(at_least_fp32(x.dtype))
    return before.addmm_(grad.t(), x) if before.dtype == x.dtype else before.add_(grad.t() @ x)


def _merge(top: Tensor, total: Tensor, target: Tensor, group: Group | None) -> tuple[Tensor, Tensor, Tensor]:
    """Per rank (max, Σ exp(logit - max), target's logit or 0), each [N] -> (max, log Σ exp(logit - max), target)."""
    if group is None or group.size == 1:
        return top, total.log(), target
    highest = top.clone()
    all_reduce(highest, group, group.ledger.phase, "max").wait()
    sums = torch.stack([total * (top - highest).exp_(), target])  # [2, N]
    all_reduce(sums, group, group.ledger.phase).wait()
    return highest, sums[0].log(), sums[1]


def whole_logits(local: Tensor, group: Group | None, vocab: int) -> Tensor:
    """local [..., V/T] of each rank -> [..., V] on every one, padding removed."""
    if group is None or group.size == 1:
        return local[..., :vocab]
    full = local.new_empty(group.size, *local.shape)
    work = all_gather(full.view(-1), local.contiguous().view(-1), group, group.ledger.phase)
    work.complete()
    return full.movedim(0, -2).flatten(-2)[..., :vocab]  # [..., T, V/T] -> [..., T · V/T] -> [..., V]
