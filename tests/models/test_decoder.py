"""What the decoder must hold beside HuggingFace's numbers: isolation of documents, empty losses, sums."""

from __future__ import annotations

import pytest
import torch
from tests.models.helpers import GPT, LLAMA, QWEN, packed, split_backward, value
from torch._subclasses.fake_tensor import FakeTensorMode

from heptad.config.schema import ModelSection
from heptad.models.attention import flash_attention
from heptad.models.batch import IGNORED, Batch, visible
from heptad.models.decoder import Decoder, loss_sum

SECTIONS = {"gpt": GPT, "llama": LLAMA, "qwen": QWEN}


def model_of(name: str, dtype: torch.dtype = torch.float64) -> Decoder:
    return Decoder(SECTIONS[name], seed=2, device="cpu", dtype=dtype)


@pytest.mark.parametrize("name", SECTIONS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_c_126_documents_are_isolated_bit_for_bit(name: str, dtype: torch.dtype) -> None:
    model, batch = model_of(name, dtype), packed([[9, 13]])
    other = batch.ids.clone()
    other[:, :9] = (other[:, :9] + 17) % 53
    # a caller cannot hand over another mask: it is made from the documents, whatever is copied or moved
    changed = Batch(other, batch.labels, batch.positions, batch.documents, batch.index, 0).to(torch.device("cpu"))
    with pytest.raises(TypeError):
        Batch(other, batch.labels, batch.positions, batch.documents, batch.index, 0, mask=None)
    before, after = model.logits(batch), model.logits(changed)
    assert torch.equal(before[:, 9:], after[:, 9:])
    assert not torch.equal(before[:, :9], after[:, :9])


def test_c_126_core_attention_over_many_blocks_of_keys() -> None:
    """Longer than one tile of the kernel, so a query's first tiles of keys are all masked."""
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, heads, 1301, 8, generator=generator) for heads in (2, 1, 1))
    batch = packed([[1103, 198]])
    before = flash_attention(q, k, v, batch, None)
    k[:, :, :1103] += 5
    v[:, :, :1103] -= 3
    assert torch.equal(before[:, :, 1103:], flash_attention(q, k, v, batch, None)[:, :, 1103:])
    assert bool(before.isfinite().all())


@pytest.mark.parametrize("name", SECTIONS)
def test_c_127_packed_loss_is_the_sum_of_separate_losses(name: str) -> None:
    model = model_of(name)
    batch = packed([[5, 11, 3]])
    parts = batch.ids[0].split([5, 11, 3])
    labels = batch.labels[0].split([5, 11, 3])
    separate = 0.0
    for ids, targets in zip(parts, labels, strict=True):
        row = torch.arange(len(ids)).view(1, -1)
        separate += value(model(Batch(ids.view(1, -1), targets.view(1, -1), row, row * 0, row, 0)))
    assert value(model(batch)) == pytest.approx(separate, rel=1e-12)
    # each half alone is not enough
    rows = torch.arange(19).view(1, -1)
    no_restart = Batch(batch.ids, batch.labels, rows, batch.documents, batch.index, 0)
    no_mask = Batch(batch.ids, batch.labels, batch.positions, batch.documents * 0, batch.index, 0)
    assert value(model(no_mask)) != pytest.approx(separate, rel=1e-5)
    if name == "gpt":  # rotary angles are relative: only absolute positions notice a missing restart
        assert value(model(no_restart)) != pytest.approx(separate, rel=1e-5)


def test_whole_rows_need_no_mask_and_give_the_same() -> None:
    model, batch = model_of("llama"), packed([[7], [7]])
    assert batch.mask is None and batch.mixed is False
    masked = Batch(batch.ids, batch.labels, batch.positions, batch.documents, batch.index, 0, mixed=True)
    assert masked.mask is not None and torch.equal(masked.mask, visible(batch.documents))
    assert (model.logits(batch) - model.logits(masked)).abs().max() <= 1e-12


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_c_008_c_009_nothing_but_ignored_labels_gives_exactly_zero(dtype: torch.dtype) -> None:
    model, batch = model_of("llama", dtype), packed([[6, 5]])
    empty = Batch(
        batch.ids, torch.full_like(batch.labels, IGNORED), batch.positions, batch.documents, batch.index, batch.step
    )
    loss = model(empty)
    loss.backward()
    assert value(loss) == 0.0 and empty.num_targets() == 0
    for param in model.parameters():
        assert param.grad is not None and not bool(param.grad.any()) and bool(param.grad.isfinite().all())


def test_c_009_the_librarys_mean_is_nan_and_ours_is_zero() -> None:
    logits = torch.randn(4, 7, generator=torch.Generator().manual_seed(0)).requires_grad_()
    labels = torch.full((4,), IGNORED)
    assert torch.nn.functional.cross_entropy(logits, labels).isnan()
    loss = loss_sum(logits, labels)
    loss.backward()
    assert value(loss) == 0.0 and torch.equal(logits.grad, torch.zeros(4, 7))


def test_ignored_positions_add_exactly_nothing() -> None:
    model, batch = model_of("qwen"), packed([[12]])
    labels = batch.labels.clone()
    labels[:, 5:] = IGNORED
    cut = Batch(batch.ids, labels, batch.positions, batch.documents, batch.index, 0)
    assert value(model(cut)) == pytest.approx(
        value(loss_sum(model.logits(batch)[:, :5], batch.labels[:, :5])), rel=1e-14
    )


def test_loss_is_fp32_for_bf16_logits() -> None:
    loss = model_of("llama", torch.bfloat16)(packed([[6, 5]]))
    assert loss.dtype == torch.float32


def test_core_attention_is_a_seam() -> None:
    model, batch = model_of("llama"), packed([[6, 5]])
    calls = []

    def counted(q, k, v, given, dropout):  # type: ignore[no-untyped-def]
        calls.append((tuple(q.shape), tuple(k.shape)))
        return flash_attention(q, k, v, given, dropout)

    expected = model(batch)
    for block in model.blocks:
        block.attention.core = counted
    assert torch.equal(model(batch), expected)
    assert calls == [((1, 6, 11, 10), (1, 3, 11, 10))] * 2


def test_grouped_heads_equal_repeated_ones() -> None:
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, heads, 11, 6, dtype=torch.float64, generator=generator) for heads in (6, 3, 3))
    for rows in ([[4, 7], [11]], [[11], [11]]):
        batch = packed(rows)
        got = flash_attention(q, k, v, batch, None)
        scores = q @ k.repeat_interleave(2, 1).transpose(-2, -1) / 6**0.5
        weights = scores.masked_fill(~visible(batch.documents), -torch.inf).softmax(-1)
        assert (got - weights @ v.repeat_interleave(2, 1)).abs().max() <= 1e-13


def test_plain_silu_and_exact_gelu_are_chosen() -> None:
    losses = [
        value(Decoder(ModelSection(activation=kind, init_std=0.3), device="cpu")(packed([[9]])))
        for kind in ("silu", "gelu", "gelu_tanh")
    ]
    assert len(set(losses)) == 3


@pytest.mark.parametrize("mixed", [True, False])
def test_the_split_step_runs_on_fake_tensors(mixed: bool) -> None:
    with FakeTensorMode():
        model = Decoder(GPT.model_copy(update={"dropout": 0.1, "attention_dropout": 0.1}), device="cpu")
        row = torch.zeros(2, 16, dtype=torch.int64)
        units = model.unit_list()
        loss, sink = split_backward(units, Batch(row, row, row, row, row, 0, mixed=mixed), [[] for _ in units])
        assert loss.shape == () and len(sink.grads) == len(list(model.parameters()))
