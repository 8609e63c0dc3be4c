"""The head's loss on one rank, in chunks: value and gradients of torch's cross-entropy, and what it never creates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from tests.models.helpers import LLAMA, DictSink, packed
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from heptad.mesh.regions import SINGLE
from heptad.models.batch import IGNORED
from heptad.models.chunk import CHUNK_BYTES, MIN_TOKENS, chunk_tokens
from heptad.models.decoder import Decoder, loss_sum
from heptad.models.layers import Linear
from heptad.models.loss import TokenLoss
from heptad.models.taps import Tape, write_weight_grads

Chunk = int | Literal["auto"]
WAYS = ["B", "I and W", "autograd"]
DY = 0.25


def linear_of(weight: Tensor) -> Linear:
    out = Linear(weight.shape[1], weight.shape[0], bias=False)
    out.weight = nn.Parameter(weight.clone())
    return out


def run(way: str, x: Tensor, out: Linear, labels: Tensor, chunk: Chunk) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, dx, the weight's gradient) for dy = `DY`; every way a unit's backward can be run."""
    x, sink = x.clone().requires_grad_(), DictSink()
    tape = None if way == "autograd" else Tape(sink if way == "B" else None)
    loss = TokenLoss(out, SINGLE, range(out.weight.shape[0]), chunk, labels, tape)(x)
    leaves = [out.weight] if tape is None else tape.leaves()
    dx, *grads = torch.autograd.grad(loss, [x, *leaves], torch.full_like(loss, DY), allow_unused=True)
    if tape is not None:
        write_weight_grads(tape, [] if way == "B" else list(grads), sink)
        return loss.detach(), dx, sink.grads[out.weight]
    return loss.detach(), dx, grads[0]


def plain(x: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    loss = loss_sum(F.linear(x, weight), labels)
    return loss.detach(), *torch.autograd.grad(loss, [x, weight], torch.full_like(loss, DY))


def example(num_tokens: int, vocab: int, num_ignored: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(num_tokens, 7, dtype=dtype, generator=generator)
    weight = 2 * torch.randn(vocab, 7, dtype=dtype, generator=generator)
    labels = torch.randint(vocab, (num_tokens,), generator=generator)
    labels[torch.randperm(num_tokens, generator=generator)[:num_ignored]] = IGNORED
    return x, weight, labels


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("chunk", [1, 3, 16, 23, "auto"])
@pytest.mark.parametrize("num_ignored", [0, 5, 23])
def test_value_and_gradients_are_cross_entropys(way: str, chunk: Chunk, num_ignored: int) -> None:
    x, weight, labels = example(23, 37, num_ignored)
    found, wanted = run(way, x, linear_of(weight), labels, chunk), plain(x, weight, labels)
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-14, atol=0.0)
    for got, want in zip(found[1:], wanted[1:], strict=True):
        assert (got - want).abs().max() <= 1e-14 * want.abs().max()
    assert not found[1][labels == IGNORED].any()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("chunk", [2, "auto"])
def test_c_009_only_ignored_targets_give_exactly_zero(way: str, chunk: Chunk) -> None:
    x, weight, labels = example(4, 11, 4)
    loss, dx, dw = run(way, x, linear_of(weight), labels, chunk)
    assert loss.item() == 0.0
    assert not dx.any() and not dw.any()


@pytest.mark.parametrize("chunk", [1, "auto"])
def test_a_label_as_unlikely_as_can_be(chunk: Chunk) -> None:
    out, x = linear_of(torch.tensor([[0.0], [-1e4]])), torch.ones(2, 1)
    loss, dx, dw = run("B", x, out, torch.tensor([1, IGNORED]), chunk)
    assert loss.item() == 1e4
    assert dx.tolist() == [[DY * 1e4], [0.0]]
    assert dw.tolist() == [[DY], [-DY]]


@pytest.mark.parametrize("way", WAYS)
def test_bf16_is_computed_in_fp32_and_weight_gradients_are_summed_in_it(way: str) -> None:
    x, weight, labels = example(64, 37, 9, torch.bfloat16)
    exact = plain(x.double(), weight.double(), labels)
    for chunk in (5, "auto"):
        loss, dx, dw = run(way, x, linear_of(weight), labels, chunk)
        assert loss.dtype == torch.float32 and dx.dtype == torch.bfloat16
        assert loss.item() == pytest.approx(exact[0].item(), rel=2**-8)
        assert (dx.double() - exact[1]).abs().max() <= 2**-6 * exact[1].abs().max()
        assert (dw.double() - exact[2]).abs().max() <= 2**-6 * exact[2].abs().max()


def test_a_frozen_weight_gets_no_gradient_and_keeps_no_input() -> None:
    x, weight, labels = example(23, 37, 5)
    out = linear_of(weight)
    out.weight.requires_grad_(False)
    for chunk in (3, "auto"):
        start, sink, saved = x.clone().requires_grad_(), DictSink(), list[torch.Size]()

        def pack(tensor: Tensor, into: list[torch.Size] = saved) -> Tensor:
            into.append(tensor.shape)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = TokenLoss(out, SINGLE, range(37), chunk, labels, Tape(sink))(start)
        (dx,) = torch.autograd.grad(loss, [start], torch.full_like(loss, DY))
        assert (dx - plain(x, weight, labels)[1]).abs().max() <= 1e-14
        assert not sink.grads
        assert (x.shape in saved) == (chunk == 3)


class Largest(TorchDispatchMode):
    """Elements of the largest tensor an operator made."""

    elements = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        self.elements = max([self.elements, *(leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, Tensor))])
        return out


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("num_tokens", [64, 256])
def test_c_102_the_largest_tensor_is_one_chunks_logits(way: str, num_tokens: int) -> None:
    x, weight, labels = example(num_tokens, 1000, 7)
    out = linear_of(weight)
    with Largest() as largest:
        chunked = run(way, x, out, labels, 16)
    assert largest.elements == 16_000
    with Largest() as largest:
        unchunked = run(way, x, out, labels, num_tokens)
    assert largest.elements == 1000 * num_tokens  # the mode can see it
    for got, want in zip(chunked, unchunked, strict=True):
        assert (got - want).abs().max() <= 1e-14 * want.abs().max()


def test_a_split_backward_reads_no_weight_in_w() -> None:
    """Chunked or not: the data axis may have dropped the weight by then."""
    x, weight, labels = example(23, 37, 5)
    for chunk in (3, 23):
        out, tape, sink = linear_of(weight), Tape(), DictSink()
        loss = TokenLoss(out, SINGLE, range(37), chunk, labels, tape)(x)
        grads = list(torch.autograd.grad(loss, tape.leaves(), torch.full_like(loss, DY)))
        out.weight.untyped_storage().resize_(0)
        write_weight_grads(tape, list(grads), sink)
        assert (sink.grads[out.weight] - plain(x, weight, labels)[2]).abs().max() <= 1e-14


def test_the_head_gives_the_same_bits_with_and_without_a_tape_under_no_grad() -> None:
    """What a recomputed unit's first forward returns, and what an evaluation does."""
    model = Decoder(LLAMA, seed=5, device="cpu", dtype=torch.float64)
    batch, head = packed([[11, 6], [17]]), model.head
    x = model.hidden(batch).detach()
    for head.loss_chunk in (5, "auto"):
        with torch.no_grad():
            bare = head(x, batch)
        head.out.tape = Tape()
        taped = head(x, batch)
        head.out.tape = None
        assert torch.equal(bare, taped.detach())
        torch.testing.assert_close(bare, head(x, batch).detach(), rtol=1e-14, atol=0.0)


def test_chunk_tokens() -> None:
    assert chunk_tokens(16, 64, 1000, 4) == 16
    assert chunk_tokens(16, 9, 1000, 4) == 9
    assert chunk_tokens("auto", 1024, 4096, 4) == 1024  # 16 MiB: one chunk
    assert chunk_tokens("auto", 4096, 4096, 4) == 2048
    assert chunk_tokens("auto", 4096, 4096, 4) * 4096 * 4 == CHUNK_BYTES
    assert chunk_tokens("auto", 4096, 128_256, 4) == MIN_TOKENS
