"""What is compared: Heptad's step and the same model under torch DDP, under torch FSDP2, and in a loop written by
hand.

All contenders start from the same keyed weights, read the same batches, clip at the same norm and use the same
AdamW (fused). Every position has a target and every rank as many, so a peer's mean of means is the global mean, and
peers need no all-reduce of a count. Heptad's side is the whole `Trainer.step` (count, loss and norm all-reduces,
finite check); a peer's side is what its users write: forward, backward, `clip_grad_norm_`, `optimizer.step`.
`check` asserts that the losses agree, so a contender cannot win by computing something else. Peers run the model
without taps, on plain autograd.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from heptad.config.schema import (
    DataSection,
    Job,
    LayoutSection,
    ModelSection,
    OptimizerSection,
    PrecisionSection,
    TrainSection,
)
from heptad.models.batch import Batch
from heptad.models.decoder import Decoder
from heptad.models.resolve import resolve
from heptad.train.step import Trainer

CPU = torch.device("cpu")
LR, CLIP, DECAY, BETAS, STEPS = 1e-4, 1.0, 0.1, (0.9, 0.95), 100_000


@dataclass(frozen=True, slots=True)
class Size:
    """A model and how many tokens each rank reads a step: `sequences` of `seq_len`, in one micro-batch."""

    layers: int = 6
    width: int = 256
    heads: int = 4
    mlp_width: int = 688
    vocab: int = 2048
    seq_len: int = 128
    sequences: int = 1
    microbatches: int = 1

    def section(self) -> ModelSection:
        """The model as a job says it."""
        return ModelSection(
            layers=self.layers, width=self.width, heads=self.heads, mlp_width=self.mlp_width, vocab=self.vocab
        )

    def tokens(self, seq_len: int, sequences: int = 1) -> Size:
        """The same model on other token counts."""
        return replace(self, seq_len=seq_len, sequences=sequences)


class Contender(Protocol):
    """One side of a comparison."""

    name: str

    def step(self, number: int) -> float:
        """Training step `number` (from 1); returns this rank's idea of the loss (mean over its tokens or all)."""


def job_of(size: Size, world: int, zero: int, **layout: int | float) -> Job:
    """Heptad's job for `world` ranks: fp32, constant learning rate; `layout` fields override."""
    degrees: dict[str, int | float] = {"dp_shard": 1 if "dp_replicate" in layout else world, **layout}
    return resolve(
        Job(
            model=size.section(),
            layout=LayoutSection(zero=zero, **degrees),
            precision=PrecisionSection(params="fp32"),
            optimizer=OptimizerSection(lr=LR, clip_norm=CLIP, weight_decay=DECAY, betas=BETAS, schedule="constant"),
            data=DataSection(seq_len=size.seq_len),
            train=TrainSection(
                global_batch=size.sequences * size.microbatches * world, micro_batch=size.sequences, steps=STEPS
            ),
        )
    )


def batch_of(size: Size, rank: int, number: int) -> Batch:
    """Micro-batch of step `number`: a function of (rank, number), one document a row, a target at each position."""
    shape = (size.sequences, size.seq_len)
    generator = torch.Generator().manual_seed(1_000 * (number % 4) + rank)
    ids = torch.randint(size.vocab, shape, generator=generator)
    labels = torch.randint(size.vocab, shape, generator=generator)
    positions = torch.arange(size.seq_len).expand(shape).contiguous()
    return Batch(ids, labels, positions, torch.zeros(shape, dtype=torch.int64), positions, number, mixed=False)


class Ours:
    """Heptad's whole step. `reads`: whose batches it reads, where ranks share them (None: its own)."""

    def __init__(self, size: Size, rank: int, job: Job, name: str = "heptad", reads: int | None = None) -> None:
        self.name, self.size, self.rank = name, size, rank
        self.trainer = Trainer(job, rank, CPU)
        self._batches = {number: batch_of(size, rank if reads is None else reads, number) for number in range(4)}

    def step(self, number: int) -> float:
        batch = replace(self._batches[number % 4], step=number)
        return self.trainer.step(number, [batch]).loss


class Peer:
    """A torch module that returns the sum of its tokens' losses, in the loop its users write."""

    def __init__(self, name: str, size: Size, rank: int, module: nn.Module) -> None:
        self.name, self.size, self.module = name, size, module
        self._batches = {number: batch_of(size, rank, number) for number in range(4)}
        self.params = list(module.parameters())
        matrices = [param for param in self.params if param.ndim > 1]
        others = [param for param in self.params if param.ndim <= 1]
        groups = [{"params": matrices, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, fused=True)

    def step(self, number: int) -> float:
        loss: Tensor = self.module(self._batches[number % 4]) / (self.size.sequences * self.size.seq_len)
        loss.backward()
        nn.utils.clip_grad_norm_(self.params, CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.item()


def decoder(size: Size) -> Decoder:
    """The model with its keyed initial values, no taps."""
    return Decoder(job_of(size, 1, 0).model, seed=0, device=CPU, dtype=torch.float32)


def plain(size: Size, rank: int = 0) -> Peer:
    """The hand-written loop of one process: one `loss.backward()`."""
    return Peer("loop", size, rank, decoder(size))


def ddp(size: Size, rank: int, bucket_cap_mb: float) -> Peer:
    """torch DDP; its gradients are views of its buckets."""
    module = DistributedDataParallel(decoder(size), bucket_cap_mb=bucket_cap_mb, gradient_as_bucket_view=True)
    return Peer(f"ddp{bucket_cap_mb:g}", size, rank, module)


def fsdp2(size: Size, rank: int) -> Peer:
    """torch FSDP2 as its users call it: `fully_shard` on every block, then on the root; its own prefetch defaults."""
    module, mesh = decoder(size), init_device_mesh("cpu", (dist.get_world_size(),))
    for block in module.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(module, mesh=mesh)
    return Peer("fsdp2", size, rank, module)


def check(contenders: list[Contender], steps: int = 3, tolerance: float = 2e-5) -> None:
    """Run `steps` steps of each and assert that all see the same losses, averaged over ranks: the same training."""
    seen = {}
    for contender in contenders:
        losses = torch.tensor([contender.step(number) for number in range(1, steps + 1)], dtype=torch.float64)
        dist.all_reduce(losses)
        seen[contender.name] = losses / dist.get_world_size()
    first = seen[contenders[0].name]
    for name, losses in seen.items():
        assert torch.allclose(losses, first, rtol=tolerance, atol=0.0), (name, losses.tolist(), first.tolist())
