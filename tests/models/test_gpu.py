"""On a CUDA device: the split backward, isolation and everything keyed give what they give on the CPU."""

from __future__ import annotations

import pytest
import torch
from tests.models.helpers import GPT, LLAMA, QWEN, packed, plain_backward, split_backward, worst
from tests.models.moe import DEEPSEEK, SOFTMAX

from heptad.models import grouped as kernels
from heptad.models.batch import Batch
from heptad.models.decoder import Decoder
from heptad.models.dropout import Dropout

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


@pytest.mark.parametrize(
    "section", [GPT, LLAMA, QWEN, SOFTMAX, DEEPSEEK], ids=["gpt", "llama", "qwen", "softmax", "deepseek"]
)
@pytest.mark.parametrize("rows", [[[11, 6], [17]], [[7], [7]]], ids=["packed", "whole"])
def test_taps_give_the_gradients_of_one_backward(section, rows) -> None:  # type: ignore[no-untyped-def]
    model = Decoder(section, seed=5, device=CUDA, dtype=torch.float64)
    batch, units = packed(rows).to(CUDA), model.unit_list()
    expected = plain_backward(model, model(batch))
    _, sink = split_backward(units, batch, [[] for _ in units])
    got = {name: sink.grads[param] for name, param in model.named_parameters()}
    assert worst(got, expected) <= 1e-12
    on_cpu = Decoder(section, seed=5, device="cpu", dtype=torch.float64)
    assert all(torch.equal(param.cpu(), on_cpu.get_parameter(name)) for name, param in model.named_parameters())
    assert worst({n: g.cpu() for n, g in got.items()}, plain_backward(on_cpu, on_cpu(packed(rows)))) <= 1e-10


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_c_126_documents_are_isolated_bit_for_bit(dtype: torch.dtype) -> None:
    model, batch = Decoder(LLAMA, device=CUDA, dtype=dtype), packed([[9, 13]]).to(CUDA)
    ids = batch.ids.clone()
    ids[:, :9] = (ids[:, :9] + 17) % 53
    changed = Batch(ids, batch.labels, batch.positions, batch.documents, batch.index, 0)
    assert torch.equal(model.logits(batch)[:, 9:], model.logits(changed)[:, 9:])


def test_masks_are_the_cpus() -> None:
    dropout, index, x = Dropout(0.3, 1, "x"), torch.arange(22).view(2, 11), torch.ones(2, 11, 7)
    assert torch.equal(dropout.features(x.to(CUDA), index.to(CUDA), 3).cpu(), dropout.features(x, index, 3))
    scores, at = torch.ones(2, 3, 11, 11), index.to(CUDA)
    assert torch.equal(dropout.attention(scores.to(CUDA), at, at, 3).cpu(), dropout.attention(scores, index, index, 3))


@pytest.mark.parametrize("counts", [[130, 0, 7, 63], [0, 0, 0, 9], [0, 0, 0, 0]])
def test_torchs_grouped_product_is_the_loops(counts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward, input gradient and weight gradient of experts in bf16: one kernel, or one product a group."""
    generator = torch.Generator(CUDA).manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=CUDA, dtype=torch.bfloat16)

    x, dy, weights = random(sum(counts), 24), random(sum(counts), 40), random(4, 40, 24)

    def products() -> list[torch.Tensor]:
        grad = torch.ones(4, 40, 24, device=CUDA)
        kernels.add_outer_(grad, dy, x, counts, fresh=False)
        return [kernels.grouped(x, weights.transpose(1, 2), counts), kernels.grouped(dy, weights, counts), grad]

    assert kernels._fused(x, weights)
    fused = products()
    monkeypatch.setattr(kernels, "_fused", lambda *_: False)
    for got, right in zip(fused, products(), strict=True):
        assert got.dtype == right.dtype and got.shape == right.shape
        if right.numel():
            assert (got.double() - right.double()).abs().max() <= 2**-7 * right.abs().max()
