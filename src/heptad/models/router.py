"""Routers: which K of E experts each token goes to, with what weight, and what keeps experts evenly loaded.

"softmax" (Switch, GShard, Mixtral, Qwen3): scores are softmax(logits), the K largest are taken. "deepseek": scores are
sigmoids; a bias is added for the choice alone, and moved after each step by the load of the whole global batch
(`train/balance.py`); the choice lies in the `router_group_limit` best groups of experts, a group being as good as its
best two. Weights are the chosen scores, normalised to sum to one where the model says so, times `routed_scale`.

Two losses are added, for each block with experts: `aux_loss` (Switch, equation 4; DeepSeek-V3's `balance_loss`,
equation 17, is the same of scores that sum to one, with the choice made without bias and groups) and `z_loss` (mean of
log² Σ exp(logits)). Both are defined for one sequence (a row of the batch, whatever documents it holds) and averaged
over the global batch's sequences: a product of two means over the batch could not be known before the first backward
of a pipeline. Their gradient enters at the weights, whatever the gradient of the main loss is; the loss that a step
reports is the main one alone. Capacity counts within a sequence too: of the choices of an expert the first
⌈capacity_factor · K · tokens / E⌉ are kept, by position. What fills a row up is neither routed nor counted. So nothing
here depends on micro-batches or on what else is in them, or on which ranks hold a sequence (`sequences.py`).

Logits and scores are computed in at least fp32. Legend: N tokens of this rank (one device: B·L), B sequences, L tokens
each, E experts, K experts a token, D width. Sources: Switch, arXiv 2101.03961; GShard, arXiv 2006.16668; ST-MoE
(z-loss), arXiv 2202.08906; DeepSeek-V3, arXiv 2412.19437, §2.1.2. Read next: `sequences.py`, `moe.py`, `experts.py`.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from heptad.config.experts import balances, updates_bias
from heptad.config.schema import ModelSection
from heptad.models.batch import Batch
from heptad.models.dropout import noise
from heptad.models.layers import link_of, trainable
from heptad.models.sequences import Own, Sequences
from heptad.models.taps import Dys, GradSink, Tape

TINY = 1e-20
"""Added to a sum of sigmoids, as DeepSeek-V3's code does."""


class Routing(NamedTuple):
    """Where each token goes. weights [N, K], at least fp32; experts [N, K] int64; kept [N, K] bool, None: all are."""

    weights: Tensor
    experts: Tensor
    kept: Tensor | None


class Gate(nn.Module):
    """logits [N, E] = x [N, D] weight[E, D]ᵀ, in at least fp32 whatever the dtype of both."""

    weight: nn.Parameter
    tape: Tape | None = None

    def __init__(self, experts: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, width))

    def forward(self, x: Tensor) -> Tensor:
        """x [N, D] -> [N, E]."""
        if self.tape is None:
            return F.linear(_wide(x), _wide(self.weight))
        link = None
        if trainable(self.weight):
            like = x.new_empty((), dtype=_wide(x[:0]).dtype)
            link = link_of(self.tape, self, (x,), like, torch.Size((x.shape[0], self.weight.shape[0])))
        out: Tensor = _Gate.apply(x, link, self, self.tape.sink)
        return out

    def write_weight_grads(self, saved: tuple[Tensor, ...], dys: Dys, sink: GradSink) -> None:
        """weight += dyᵀ x."""
        (x,), (dy,) = saved, dys
        assert dy is not None
        sink.add_matmul(self.weight, dy.t(), _wide(x))


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, link: Tensor | None, module: Gate, sink: GradSink | None) -> Tensor:
        ctx.module, ctx.sink, ctx.dtype = module, sink, x.dtype
        if sink is not None and link is not None:
            ctx.save_for_backward(x)
        return F.linear(_wide(x), _wide(module.weight))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        wanted = ctx.needs_input_grad[1]
        if wanted and ctx.sink is not None:
            ctx.module.write_weight_grads(ctx.saved_tensors, (dy,), ctx.sink)
        dx = (dy @ _wide(ctx.module.weight)).to(ctx.dtype) if ctx.needs_input_grad[0] else None
        return dx, dy if wanted and ctx.sink is None else None, None, None


class Router(nn.Module):
    """Chooses for tokens [N, D] of a batch, those of it that are this rank's own. What it is set by from outside:

    bias: [E] in at least fp32, of the choice ("deepseek"); state, not a parameter (`place`). A speed of 0 leaves it.
    num_sequences: of the global batch that is one update; None: those of the batch at hand.
    loads: where set and in training, micro-batch -> int64 [E + 1]: how many own tokens chose each expert, whether kept
    or not, and how many of these choices are not.
    choices: likewise, the experts of each token [N, K] int64, -1 where a choice is not kept. added: likewise, this
    rank's part of both losses, with their coefficients [2]. Running a forward again (recompute) writes the same again.
    rows: what it knows of whole sequences (a seam).
    """

    bias: Tensor | None = None
    num_sequences: int | None = None
    loads: dict[int, Tensor] | None = None
    choices: dict[int, Tensor] | None = None
    added: dict[int, Tensor] | None = None

    def __init__(self, section: ModelSection, seed: int, name: str) -> None:
        super().__init__()
        assert section.experts is not None
        self.top, self.groups = section.experts_per_token, section.router_groups
        self.group_limit = section.router_group_limit or section.router_groups
        self.sigmoid, self.normalise = section.router == "deepseek", section.normalise_top_k
        self.scale, self.capacity_factor = section.routed_scale, section.capacity_factor
        self.balance = balances(section)
        self.z_loss, self.jitter = section.z_loss, section.jitter
        self.speed = section.bias_update_speed if updates_bias(section) else 0.0
        self.seed, self.name = seed, name
        self.rows = Sequences()
        self.gate = Gate(section.experts, section.width)

    def place(self, device: torch.device, dtype: torch.dtype) -> None:
        """Memory for the bias, which starts at zero."""
        if self.sigmoid:
            wide = torch.promote_types(dtype, torch.float32)
            self.bias = torch.zeros(self.gate.weight.shape[0], dtype=wide, device=device)

    def forward(self, x: Tensor, batch: Batch) -> Routing:
        """x [N, D], own tokens of `batch` -> where they go."""
        own = self.rows.own(batch)
        if self.jitter and self.training:
            x = x * noise(self.jitter, self.seed, f"{self.name}.jitter", own.index, batch.step, x)
        logits = self.gate(x)  # [N, E]
        scores = logits.sigmoid() if self.sigmoid else logits.softmax(-1)
        with torch.no_grad():
            chosen = self.choose(scores)
        weights = scores.gather(1, chosen)
        if self.normalise:
            weights = weights / (weights.sum(-1, keepdim=True) + (TINY if self.sigmoid else 0.0))
        weights = weights * self.scale
        if self.training and (self.balance or self.z_loss):
            losses = self.losses(logits, scores, chosen, own, batch)
            if self.added is not None:
                self.added[id(batch.ids)] = losses.detach()
            weights = _Attached.apply(weights, losses)
        with torch.no_grad():
            real = None if own.real is None else own.real.unsqueeze(-1)
            kept = self._kept(chosen, real, batch)
            if self.loads is not None and self.training:
                picked = hits(chosen, self.gate.weight.shape[0])  # [N, E]
                load = (picked if real is None else picked & real).sum(0)
                dropped = load.sum() - kept.sum() if kept is not None else load.new_zeros(())
                self.loads[id(batch.ids)] = torch.cat([load, dropped.view(1)])
            if self.choices is not None and self.training:
                self.choices[id(batch.ids)] = chosen if kept is None else chosen.masked_fill(~kept, -1)
        return Routing(weights, chosen, kept)

    def choose(self, scores: Tensor) -> Tensor:
        """scores [N, E] -> the experts of each token [N, K]."""
        if not self.sigmoid:
            return scores.topk(self.top).indices
        ranked = scores if self.bias is None else scores + self.bias
        if self.group_limit < self.groups:
            grouped = ranked.unflatten(-1, (self.groups, -1))  # [N, groups, E / groups]
            best = grouped.topk(min(2, grouped.shape[-1])).values.sum(-1).topk(self.group_limit).indices
            allowed = torch.zeros(grouped.shape[:2], dtype=torch.bool, device=ranked.device).scatter_(1, best, True)
            ranked = grouped.masked_fill(~allowed.unsqueeze(-1), -math.inf).flatten(1)
        return ranked.topk(self.top).indices

    def best(self, scores: Tensor) -> Tensor:
        """scores [N, E] -> the experts of each token by its scores alone [N, K]."""
        return scores.topk(self.top).indices

    def losses(self, logits: Tensor, scores: Tensor, chosen: Tensor, own: Own, batch: Batch) -> Tensor:
        """Both losses, with their coefficients [2], of own tokens: a part of the global average."""
        member, number = own.member(scores.dtype), batch.num_real().clamp(min=1)  # [B, N], [B]
        balance = squares = logits.new_zeros(())
        if self.balance:
            experts = scores.shape[-1]
            if self.sigmoid:
                scores = scores / (scores.sum(-1, keepdim=True) + TINY)
                chosen = self.best(scores.detach())
            load = self.rows.summed((member @ hits(chosen, experts).to(member.dtype)).to(torch.int32))  # [B, E]
            load = load.to(scores.dtype) * (experts / self.top) / number.unsqueeze(1)  # 1 where even
            balance = self.balance * (load * (member @ scores) / number.unsqueeze(1)).sum()
        if self.z_loss:
            squares = self.z_loss * (member @ logits.logsumexp(-1).square() / number).sum()
        return torch.stack([balance, squares]) / (own.rows if self.num_sequences is None else self.num_sequences)

    def _kept(self, chosen: Tensor, real: Tensor | None, batch: Batch) -> Tensor | None:
        """chosen [N, K], real [N, 1] -> bool [N, K]; None: all are."""
        experts = self.gate.weight.shape[0]
        if self.capacity_factor is None:
            return None if real is None else real.expand_as(chosen)
        places = self.rows.whole(chosen if real is None else chosen.masked_fill(~real, -1), batch)  # [B, L, K]
        picked = hits(places + 1, experts + 1)  # in the first column what is not real
        share = batch.num_real().double() * (self.capacity_factor * self.top / experts)
        capacity = (share * (1 - 1e-12)).ceil().to(torch.int64)  # a product that is whole but for rounding is whole
        place = picked.to(torch.int32).cumsum(1).gather(-1, places + 1)  # from 1
        return self.rows.part((places >= 0) & (place <= capacity.view(-1, 1, 1)), batch)


class _Attached(torch.autograd.Function):
    """weights, to whose gradient that of the sum of `losses` is added, scaled by nothing."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, losses: Tensor) -> Tensor:
        ctx.dtype, ctx.device = losses.dtype, losses.device
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        return dy, torch.ones(2, dtype=ctx.dtype, device=ctx.device)


def hits(chosen: Tensor, experts: int) -> Tensor:
    """chosen [..., K] -> bool [..., E], True where an expert was chosen."""
    return torch.zeros(*chosen.shape[:-1], experts, dtype=torch.bool, device=chosen.device).scatter_(-1, chosen, True)


def routers(module: nn.Module) -> dict[str, Router]:
    """Every router of `module`, by name."""
    return {name: child for name, child in module.named_modules() if isinstance(child, Router)}


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
