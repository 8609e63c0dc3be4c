"""Small models and batches for this folder's tests: distinct odd sizes, float64, packed documents."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from heptad.config.schema import ModelSection
from heptad.models.batch import IGNORED, Batch
from heptad.models.build import tapped_modules
from heptad.models.taps import Tape, write_weight_grads

LLAMA = ModelSection(layers=2, width=28, heads=6, kv_heads=3, head_dim=10, mlp_width=37, vocab=53, init_std=0.3)
QWEN = LLAMA.model_copy(update={"qk_norm": True, "norm_eps": 1e-6})
GPT = ModelSection(
    layers=2,
    width=35,
    heads=5,
    mlp_width=33,
    vocab=53,
    max_positions=31,
    norm="layer",
    mlp="plain",
    activation="gelu_tanh",
    positions="learned",
    qkv_bias=True,
    attention_bias=True,
    mlp_bias=True,
    tied=True,
    init_std=0.3,
)


def packed(lengths: list[list[int]], vocab: int = 53, seed: int = 3, step: int = 0, first: int = 0) -> Batch:
    """One row of documents for each list of lengths; a document's last token has no target."""
    generator = torch.Generator().manual_seed(seed)
    rows = [_row(row, vocab, generator) for row in lengths]
    ids, labels, positions, documents = (torch.stack(parts) for parts in zip(*rows, strict=True))
    index = torch.arange(first, first + ids.numel()).view(ids.shape)
    return Batch(ids, labels, positions, documents, index, step)


def _row(lengths: list[int], vocab: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    documents = [torch.randint(vocab, (length,), generator=generator) for length in lengths]
    labels = [torch.cat([document[1:], torch.tensor([IGNORED])]) for document in documents]
    positions = [torch.arange(length) for length in lengths]
    numbers = [torch.full((length,), number) for number, length in enumerate(lengths)]
    return torch.cat(documents), torch.cat(labels), torch.cat(positions), torch.cat(numbers)


class DictSink:
    """Gradients by parameter, in a dict."""

    def __init__(self) -> None:
        self.grads: dict[nn.Parameter, Tensor] = {}
        self.calls = 0

    def add_matmul(self, param: nn.Parameter, a: Tensor, b: Tensor) -> None:
        self.add(param, a @ b)

    def add_rows(self, param: nn.Parameter, rows: Tensor, values: Tensor) -> None:
        self.add(param, torch.zeros_like(param).index_add_(0, rows, values))

    def add_groups(self, param: nn.Parameter, a: Tensor, b: Tensor, counts: Sequence[int]) -> None:
        pairs = zip(a.split(list(counts)), b.split(list(counts)), strict=True)
        self.add(param, torch.stack([left.t() @ right for left, right in pairs]))

    def add(self, param: nn.Parameter, grad: Tensor) -> None:
        assert param.requires_grad and grad.shape == param.shape
        self.calls += 1
        self.grads[param] = self.grads[param] + grad if param in self.grads else grad


def split_backward(
    units: list[nn.Module], batch: Batch, loose: list[list[nn.Parameter]], whole: bool = False
) -> tuple[Tensor, DictSink]:
    """The step as the executor runs it: F of each unit on a detached input, then I and W (or B), last unit first."""
    kept, x = [], None
    sink = DictSink()
    for unit in units:
        tape = Tape(sink if whole else None)
        for module in tapped_modules(unit):
            module.tape = tape
        start = None if x is None else x.detach().requires_grad_()
        x = unit(start, batch)
        for module in tapped_modules(unit):
            module.tape = None
        kept.append((tape, start, x))
    assert x is not None
    dy = torch.ones_like(x)
    for (tape, start, y), params in reversed(list(zip(kept, loose, strict=True))):
        inputs = ([] if start is None else [start]) + params + tape.leaves()
        if not y.requires_grad:
            break  # nothing here or below is trainable
        grads = list(torch.autograd.grad([y], inputs, [dy], allow_unused=True))
        if start is not None:
            dy = grads.pop(0)
        for param in params:
            grad = grads.pop(0)
            if grad is not None:
                sink.add(param, grad)
        write_weight_grads(tape, [] if whole else grads, sink)
    return x.detach(), sink


def taped_without_weights(block: nn.Module, x: Tensor, batch: Batch) -> tuple[Tape, Tensor]:
    """The tape and the output of a block's forward, of which neither autograd nor the tape has saved a weight."""
    tape, saved = Tape(), list[int]()
    for module in tapped_modules(block):
        module.tape = tape

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.untyped_storage().data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = block(x, batch)
    kept = {tensor.untyped_storage().data_ptr() for _, tensors, _ in tape.taps for tensor in tensors}
    assert saved and {param.untyped_storage().data_ptr() for param in block.parameters()}.isdisjoint(kept.union(saved))
    return tape, y


def plain_backward(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """Gradients of ordinary autograd by name; None-gradients are left out."""
    model.zero_grad()
    loss.backward()
    return {name: param.grad for name, param in model.named_parameters() if param.grad is not None}


def worst(got: dict[str, Tensor], expected: dict[str, Tensor], bound: float = 1e-12) -> float:
    """Largest difference relative to each parameter's largest gradient.

    A gradient that is zero by nature (a key's bias) consists of roundings of the others', some eps of the largest; the
    scale is never below the one at which 8 eps of that largest gradient would be `bound`.
    """
    assert got.keys() == expected.keys()
    floor = 8 * torch.finfo(torch.float64).eps / bound * max(item.abs().max().item() for item in expected.values())
    scales = {name: max(expected[name].abs().max().item(), floor) for name in got}
    return max((got[name] - expected[name]).abs().max().item() / scales[name] for name in got)


def value(scalar: Tensor) -> float:
    """A number without its graph."""
    return float(scalar.detach())
