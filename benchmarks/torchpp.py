"""The peer of the pipeline axis: the same model cut into stages, run by `torch.distributed.pipelining`.

Stages hold the plain torch Llama's blocks (`dtensor.py`), cut where Heptad cuts them, with Heptad's keyed weights; the
last one gives logits, and the loss is a function, as torch's users write it. Gradients are summed (`scale_grads=False`,
the loss is scaled by the tokens of all micro-batches), clipped at the norm over all ranks, which takes an all-reduce,
and stepped by fused AdamW. Read next: `pipeline.py` (the lines).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from benchmarks.dtensor import Block, Llama
from benchmarks.peers import BETAS, CLIP, CPU, DECAY, LR, Size, batch_of
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

SCHEDULES: dict[str, tuple[Callable[..., Any], int]] = {
    "gpipe": (schedules.ScheduleGPipe, 1),
    "1f1b": (schedules.Schedule1F1B, 1),
    "interleaved": (schedules.ScheduleInterleaved1F1B, 2),
    "zbv": (schedules.ScheduleZBVZeroBubble, 2),
    "dualpipev": (schedules.ScheduleDualPipeV, 2),
}
"""Heptad's name -> torch's class, stages a rank."""


class Part(nn.Module):
    """One stage: some blocks, below them the embedding, above them the head."""

    cos: Tensor
    sin: Tensor

    def __init__(self, model: Llama, units: range, num_units: int) -> None:
        super().__init__()
        self.embed = model.embed if 0 in units else None
        self.blocks = nn.ModuleList(model.blocks[unit - 1] for unit in units if 0 < unit < num_units - 1)
        self.norm, self.head = (model.norm, model.head) if num_units - 1 in units else (None, None)
        self.register_buffer("cos", model.cos)
        self.register_buffer("sin", model.sin)

    def forward(self, x: Tensor) -> Tensor:
        """Token numbers or the stream [B, L, D], to the stream or logits [B, L, V]."""
        x = x if self.embed is None else self.embed(x)
        for block in self.blocks:
            assert isinstance(block, Block)
            x = block(x, self.cos, self.sin)
        if self.head is not None:
            assert self.norm is not None
            x = self.head(self.norm(x))
        return x


class PipelinePeer:
    """A rank of torch's runtime. `units`: of each stage, as Heptad cuts them."""

    def __init__(self, name: str, size: Size, rank: int, schedule: str, units: tuple[range, ...]) -> None:
        self.name, self.size = name, size
        world, (build, chunks) = dist.get_world_size(), SCHEDULES[schedule]
        count = world * chunks
        assert count == len(units)
        v_shaped = schedule in ("zbv", "dualpipev")
        mine = [rank, count - 1 - rank] if v_shaped else [rank + at * world for at in range(chunks)]
        model = Llama(size)
        parts = [Part(model, units[stage], size.layers + 2) for stage in mine]
        tokens = size.sequences * size.seq_len * size.microbatches

        def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
            return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / tokens

        stages = [PipelineStage(part, stage, count, CPU) for part, stage in zip(parts, mine, strict=True)]
        one = stages[0] if chunks == 1 else stages
        self.schedule = build(one, size.microbatches, loss_fn=loss_of, scale_grads=False)
        self.params = [param for part in parts for param in part.parameters()]
        matrices = [param for param in self.params if param.ndim > 1]
        others = [param for param in self.params if param.ndim <= 1]
        groups = [{"params": matrices, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW([g for g in groups if g["params"]], lr=LR, betas=BETAS, fused=True)
        self.first, self.last, self.last_rank = 0 in mine, count - 1 in mine, 0 if v_shaped else world - 1
        self._batches = {number: whole_batch(size, number) for number in range(4)}

    def step(self, number: int) -> float:
        ids, labels = self._batches[number % 4]
        losses: list[Tensor] = []
        given: dict[str, Any] = {"target": labels, "losses": losses} if self.last else {}
        self.schedule.step(*((ids,) if self.first else ()), return_outputs=False, **given)
        norm = get_total_norm([param.grad for param in self.params if param.grad is not None])
        square = norm.square()
        dist.all_reduce(square)
        clip_grads_with_norm_(self.params, CLIP, square.sqrt())
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        loss = torch.stack(losses).sum().detach() if losses else torch.zeros(())
        dist.broadcast(loss, self.last_rank)  # Heptad's step ends with a loss that every rank knows
        return loss.item()


def whole_batch(size: Size, number: int) -> tuple[Tensor, Tensor]:
    """Token numbers and labels of step `number`, all micro-batches along the first dim."""
    batches = [batch_of(size, at, number) for at in range(size.microbatches)]
    return torch.cat([batch.ids for batch in batches]), torch.cat([batch.labels for batch in batches])
