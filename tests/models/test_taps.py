"""The backward in two parts (taps) gives what one plain backward gives, for every kind of block."""

from __future__ import annotations

import pytest
import torch
from tests.models.helpers import (
    GPT,
    LLAMA,
    QWEN,
    DictSink,
    packed,
    plain_backward,
    split_backward,
    taped_without_weights,
    worst,
)
from torch import Tensor, nn

from heptad.config.schema import ModelSection
from heptad.models.batch import Batch
from heptad.models.build import Model, loose_params, wrap
from heptad.models.columns import Columns
from heptad.models.decoder import Decoder, loss_sum
from heptad.models.taps import Tape

SECTIONS = {
    "gpt": GPT,
    "gpt untied": GPT.model_copy(update={"tied": False}),
    "gpt dropout": GPT.model_copy(update={"dropout": 0.3, "attention_dropout": 0.2}),
    "llama": LLAMA,
    "llama tied": LLAMA.model_copy(update={"tied": True}),
    "qwen": QWEN,
    "layer with qk-norm": LLAMA.model_copy(update={"norm": "layer", "qk_norm": True}),
    "frozen embedding": LLAMA.model_copy(update={"frozen": ("embed.*",)}),
    "frozen block": GPT.model_copy(update={"frozen": ("blocks.0.*",)}),
    "frozen norms, head, q": QWEN.model_copy(update={"frozen": ("*norm*", "head.out.*", "*.q.*")}),
    "frozen weights, biases live": GPT.model_copy(update={"frozen": ("*.weight",)}),
}


@pytest.mark.parametrize("name", SECTIONS)
@pytest.mark.parametrize("rows", [[[11, 6], [17]], [[7], [7]]], ids=["packed", "unpacked"])
@pytest.mark.parametrize("whole", [False, True], ids=["I and W", "B"])
def test_taps_give_the_gradients_of_one_backward(name: str, rows: list[list[int]], whole: bool) -> None:
    model = Decoder(SECTIONS[name], seed=5, device="cpu", dtype=torch.float64)
    batch = packed(rows)
    units = model.unit_list()
    expected_loss = model(batch)
    expected = plain_backward(model, expected_loss)
    loss, sink = split_backward(units, batch, [loose_params(unit) for unit in units], whole)
    torch.testing.assert_close(loss, expected_loss.detach(), rtol=1e-14, atol=0.0)  # two kernels sum the tokens
    got = {name: sink.grads[param] for name, param in model.named_parameters() if param in sink.grads}
    assert worst(got, expected) <= 1e-12
    assert set(got) == {item.name for item in model.param_specs() if item.trainable}


def test_a_weight_is_read_when_the_backward_runs_and_never_saved() -> None:
    model = Decoder(QWEN, seed=5, device="cpu", dtype=torch.float64)
    batch, block = packed([[9, 4]]), model.blocks[0]
    x = torch.randn(1, 13, 28, dtype=torch.float64, requires_grad=True)
    expected = torch.autograd.grad(block(x, batch).sum(), [x])[0]
    tape, y = taped_without_weights(block, x, batch)
    copies = {name: param.detach().clone() for name, param in block.named_parameters()}
    sizes = {name: param.untyped_storage().size() for name, param in block.named_parameters()}
    for param in block.parameters():
        param.untyped_storage().resize_(0)
    for name, param in block.named_parameters():
        param.untyped_storage().resize_(sizes[name])
        param.data.copy_(copies[name])
    dx, *dys = torch.autograd.grad(y.sum(), [x, *tape.probes()])
    for param in block.parameters():
        param.untyped_storage().resize_(0)  # W reads no weight
    sink = DictSink()
    with torch.no_grad():
        for module, kept, probes in tape.taps:
            members = module.linears if isinstance(module, Columns) else [module]
            grads = {p: p.shape for member in members for p in member.parameters()}
            module.write_weight_grads(kept, tuple(dys[: len(probes)]), sink)
            del dys[: len(probes)]
            assert all(sink.grads[p].shape == shape for p, shape in grads.items())
        assert not dys
    assert (dx - expected).abs().max() <= 1e-12


def test_w_of_a_layer_norm_reads_no_weight() -> None:
    model = Decoder(GPT, seed=5, device="cpu", dtype=torch.float64)
    norm = model.blocks[0].mlp.norm
    norm.tape = Tape()
    y = norm(torch.randn(3, 35, dtype=torch.float64))
    dys = torch.autograd.grad(y.sum(), norm.tape.probes())
    norm.weight.untyped_storage().resize_(0)
    norm.bias.untyped_storage().resize_(0)
    sink = DictSink()
    with torch.no_grad():
        norm.write_weight_grads(norm.tape.taps[0][1], dys, sink)
    assert sink.calls == 2


class Twice(nn.Module):
    """One linear used twice, one never, a bare parameter, an unswappable layer."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(7, 7)
        self.unused = nn.Linear(7, 7)
        self.norm = nn.RMSNorm(7, eps=1e-5)
        self.scale = nn.Parameter(torch.empty(7))
        self.padded = nn.Embedding(19, 7, padding_idx=0)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        y = self.shared(torch.tanh(self.shared(self.norm(x)))) * self.scale
        return x + y + self.padded(batch.ids)


class Start(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(19, 7)

    def forward(self, x: None, batch: Batch) -> Tensor:
        return self.tokens(batch.ids)


class End(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(7, 19, bias=False)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        return loss_sum(self.out(x), batch.labels)


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.start, self.middle, self.end = Start(), Twice(), End()

    def units(self) -> list[nn.Module]:
        return [self.start, self.middle, self.middle, self.end]


def custom() -> Model:
    with torch.device("meta"):
        module = Custom()
    model = wrap(module, ModelSection(vocab=19, width=7, init_std=0.4))
    model.materialise(3, torch.device("cpu"), torch.float64)
    return model


def test_modules_used_twice_unused_ones_and_bare_parameters() -> None:
    model, batch = custom(), packed([[5, 4], [9]], vocab=19)
    expected = plain_backward(model.module, model.loss(batch))
    _, sink = split_backward(model.units, batch, [loose_params(unit) for unit in model.units])
    got = {name: sink.grads[param] for name, param in model.params.items() if param in sink.grads}
    assert worst(got, expected) <= 1e-12
    assert "middle.unused.weight" not in got and "middle.scale" in got and "middle.padded.weight" in got


@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_bf16_norms_compute_in_fp32(norm: str) -> None:
    section = LLAMA.model_copy(update={"norm": norm})
    wide = Decoder(section, device="cpu", dtype=torch.float64).blocks[0].mlp.norm
    narrow = Decoder(section, device="cpu", dtype=torch.bfloat16).blocks[0].mlp.norm
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 11, 28, dtype=torch.bfloat16, generator=generator, requires_grad=True)
    dy = torch.randn(5, 11, 28, dtype=torch.bfloat16, generator=generator)
    exact = x.detach().double().requires_grad_()
    y = wide(exact)
    expected = torch.autograd.grad(y, exact, dy.double())[0]
    for tape in (None, Tape()):
        narrow.tape = tape
        got = narrow(x)
        assert got.dtype == torch.bfloat16
        assert bool(((got.double() - y).abs() <= y.abs() * 2**-8).all())  # one rounding, to 8 bits
        dx = torch.autograd.grad(got, x, dy)[0]
        assert (dx.double() - expected).abs().max() <= 2**-8 * expected.abs().max()
