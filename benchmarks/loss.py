"""Peak bytes of the head's loss at a real vocabulary: cut over two ranks and chunked, against the plain way.

Each measurement is forward and backward of the loss alone, from the head's input to the gradients of input and weight,
in fp32 on forked ranks. What stands before it (input, weight, labels) is not counted; gradients are.
Read next: `heptad/models/loss.py`.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from benchmarks.ranks import launch
from torch import Tensor, nn

from heptad.config.schema import LayoutSection
from heptad.mesh.device import Mesh
from heptad.mesh.layout import Layout
from heptad.mesh.meter import MemoryMeter
from heptad.mesh.regions import Stream
from heptad.models.layers import Linear
from heptad.models.loss import TokenLoss
from heptad.models.taps import Tape

VOCAB = 128_256
"""Llama 3's."""


class OneWeight:
    """A sink for the gradient of one weight, made at its first use."""

    def __init__(self) -> None:
        self.grad: Tensor | None = None

    def add_matmul(self, param: nn.Parameter, a: Tensor, b: Tensor) -> None:
        """grad += a @ b."""
        if self.grad is None:
            self.grad = a @ b
        else:
            self.grad.addmm_(a, b)

    def add_rows(self, param: nn.Parameter, rows: Tensor, values: Tensor) -> None:
        """No head adds rows."""
        raise AssertionError("add_rows")

    def add(self, param: nn.Parameter, grad: Tensor) -> None:
        """grad += `grad`."""
        self.grad = grad if self.grad is None else self.grad.add_(grad)


def naive_peak_bytes(rank: int, num_tokens: int, width: int, vocab: int) -> int:
    """All logits at once on one rank, torch's cross-entropy, ordinary autograd."""
    x, labels = _inputs(num_tokens, width, vocab)
    weight = torch.full((vocab, width), 0.01).requires_grad_()
    meter = MemoryMeter([x, labels, weight])
    before = meter.current_bytes()
    with meter:
        F.cross_entropy(F.linear(x, weight).float(), labels, reduction="sum").backward()
    return meter.peak_bytes - before


def chunked_peak_bytes(
    rank: int, num_ranks: int, num_tokens: int, width: int, vocab: int, chunk: int | Literal["auto"]
) -> int:
    """This rank's rows of the vocabulary, `chunk` tokens at once, gradients into a sink."""
    mesh = Mesh(Layout.of(LayoutSection(tp=num_ranks)), rank, [("tp",)], torch.device("cpu"))
    x, labels = _inputs(num_tokens, width, vocab)
    size = -(-vocab // num_ranks)
    out = Linear(width, size, bias=False)
    out.weight = nn.Parameter(torch.full((size, width), 0.01))
    rows = range(rank * size, min((rank + 1) * size, vocab))
    meter = MemoryMeter([x, labels, out.weight])
    before = meter.current_bytes()
    with meter:
        tape = Tape(OneWeight())
        loss = TokenLoss(out, Stream(mesh.group("tp")), rows, chunk, labels, tape)(x)
        torch.autograd.grad(loss, [x, *tape.leaves()], allow_unused=True)
    return meter.peak_bytes - before


def peak_bytes(num_tokens: int = 512, width: int = 64, vocab: int = VOCAB, num_ranks: int = 2) -> tuple[int, int]:
    """(largest rank's with `train.loss_chunk = "auto"`, the plain way's)."""
    ours = launch(num_ranks, chunked_peak_bytes, num_ranks, num_tokens, width, vocab, "auto")
    return max(ours), launch(1, naive_peak_bytes, num_tokens, width, vocab)[0]


def _inputs(num_tokens: int, width: int, vocab: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_tokens, width, generator=generator).requires_grad_()
    return x, torch.randint(vocab, (num_tokens,), generator=generator)
