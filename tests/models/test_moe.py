"""Experts, latent attention and multi-token prediction on one device: gradients through taps, edges, and by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.models.helpers import DictSink, packed, plain_backward, split_backward, taped_without_weights, worst
from tests.models.moe import DEEPSEEK, LOSSES, SOFTMAX, filled, router_of, rows_of, tokens_of
from torch._subclasses.fake_tensor import FakeTensorMode

from heptad.config.schema import ModelSection
from heptad.models.batch import IGNORED, Batch
from heptad.models.build import loose_params
from heptad.models.decoder import Decoder, loss_sum
from heptad.models.experts import Experts
from heptad.models.grouped import add_outer_, grouped
from heptad.models.init import bind
from heptad.models.moe import MoE, sorted_slots
from heptad.models.mtp import shifted
from heptad.models.router import Routing
from heptad.models.spec import complete
from heptad.models.taps import Tape, write_weight_grads


def changed(section: ModelSection, **changes: Any) -> ModelSection:
    return ModelSection.model_validate({**section.model_dump(by_alias=True), **changes})


SECTIONS = {
    "softmax": changed(SOFTMAX, **LOSSES, jitter=0.1),
    "softmax, capacity": changed(SOFTMAX, **LOSSES, capacity_factor=0.6),
    "plain experts, layer norm": changed(SOFTMAX, mlp="plain", norm="layer", dense_layers=0, z_loss=0.3),
    "deepseek": changed(DEEPSEEK, balance_loss=0.5, z_loss=0.3),
    "deepseek, capacity, predictions": changed(DEEPSEEK, balance_loss=0.5, capacity_factor=0.7, mtp_depth=2),
    "tied, predictions, dropout": changed(
        DEEPSEEK, tied=True, mtp_depth=1, dropout=0.2, attention_dropout=0.1, q_lora_rank=None, shared_experts=0
    ),
    "frozen experts": changed(DEEPSEEK, frozen=("*.experts.*", "*.kv_a.*"), balance_loss=0.5),
    "frozen router": changed(SOFTMAX, frozen=("*.router.*", "*.experts.up.*")),
}


def model_of(section: ModelSection, dtype: torch.dtype = torch.float64) -> Decoder:
    return Decoder(section, seed=5, device="cpu", dtype=dtype)


@pytest.mark.parametrize("name", SECTIONS)
@pytest.mark.parametrize("whole", [False, True], ids=["I and W", "B"])
def test_taps_give_the_gradients_of_one_backward(name: str, whole: bool) -> None:
    model = model_of(SECTIONS[name])
    for batch in (packed([[11, 6], [17]]), filled([[7], [7]], 2)):
        expected_loss = model(batch)
        expected = plain_backward(model, expected_loss)
        units = model.unit_list()
        loss, sink = split_backward(units, batch, [loose_params(unit) for unit in units], whole)
        torch.testing.assert_close(loss, expected_loss.detach(), rtol=1e-14, atol=0.0)
        got = {name: sink.grads[param] for name, param in model.named_parameters() if param in sink.grads}
        assert worst(got, expected) <= 1e-12
        assert set(got) == {item.name for item in model.param_specs() if item.trainable}


@pytest.mark.parametrize("name", SECTIONS)
def test_specs_are_the_parameters_in_their_order(name: str) -> None:
    model = model_of(SECTIONS[name])
    assert [(key, tuple(param.shape)) for key, param in model.named_parameters()] == [
        (item.name, item.shape) for item in model.param_specs()
    ]
    assert complete(complete(SECTIONS[name])) == complete(SECTIONS[name])


def test_no_weight_is_saved_and_w_reads_none() -> None:
    model, batch = model_of(SECTIONS["deepseek"]), packed([[9, 4]])
    block = model.blocks[1]
    x = torch.randn(1, 13, 28, dtype=torch.float64, requires_grad=True)
    expected = torch.autograd.grad(block(x, batch).sum(), [x])[0]
    tape, y = taped_without_weights(block, x, batch)
    dx, *dys = torch.autograd.grad(y.sum(), [x, *tape.probes()])
    assert (dx - expected).abs().max() <= 1e-12
    for param in block.parameters():
        param.untyped_storage().resize_(0)
    sink = DictSink()
    write_weight_grads(tape, list(dys), sink)
    assert set(sink.grads) == set(block.parameters())


def test_a_micro_batch_without_a_real_token_runs_the_same_graph() -> None:
    """C-087 on one device: no row for any expert; gradients are there, and zero."""
    model = model_of(SECTIONS["deepseek"])
    batch = filled([[7]], 7)
    units = model.unit_list()
    loss, sink = split_backward(units, batch, [loose_params(unit) for unit in units])
    got = {name: sink.grads[param] for name, param in model.named_parameters()}
    assert set(got) == {item.name for item in model.param_specs()}
    assert all(float(got[f"blocks.1.mlp.experts.{part}.weight"].abs().max()) == 0.0 for part in ("gate", "up", "down"))
    assert float(got["blocks.1.mlp.router.gate.weight"].abs().max()) == 0.0
    assert bool(loss.isfinite())


def test_experts_without_a_token_get_zeros_and_others_all() -> None:
    experts = Experts(complete(SOFTMAX)).double()
    for param in experts.parameters():
        torch.nn.init.normal_(param, generator=torch.Generator().manual_seed(3))
    rows, sink = torch.randn(9, 28, dtype=torch.float64), DictSink()
    experts.tape = Tape(sink)
    experts(rows, [0, 9, 0, 0, 0]).sum().backward(inputs=[experts.tape.anchor])
    for param in experts.parameters():
        grad = sink.grads[param]
        assert [float(grad[e].abs().max()) > 0 for e in range(5)] == [False, True, False, False, False]


def test_what_fills_a_row_up_changes_nothing_and_sends_no_row() -> None:
    for section in (changed(SOFTMAX, capacity_factor=0.6), DEEPSEEK):
        model = model_of(section).eval()
        batch = filled([[9, 4], [13]], 3)
        other = batch.ids.clone()
        other[:, 10:] = 1
        moved = Batch(other, batch.labels, batch.positions, batch.documents, batch.index, 0, real=batch.real)
        with torch.no_grad():
            a, b = model.logits(batch), model.logits(moved)
            alone = torch.cat([model.logits(row) for row in rows_of(batch)])
        assert torch.equal(a[:, :10], b[:, :10])
        torch.testing.assert_close(a, alone, rtol=1e-12, atol=1e-12)
        router = router_of(section)
        slots, counts = sorted_slots(router(tokens_of(batch), batch), section.experts or 0)
        assert set((slots // 2 % 13).tolist()) <= set(range(10)) and sum(counts) == len(slots)


def test_slots_are_sorted_by_expert_and_within_one_by_token() -> None:
    chosen = torch.tensor([[2, 0], [1, 2], [0, 2], [2, 1]])
    kept = torch.tensor([[True, True], [True, False], [True, True], [True, True]])
    slots, counts = sorted_slots(Routing(chosen.double(), chosen, kept), 4)
    assert counts == [2, 2, 3, 0] and slots.tolist() == [1, 4, 2, 7, 0, 5, 6]
    slots, counts = sorted_slots(Routing(chosen.double(), chosen, None), 4)
    assert counts == [2, 2, 4, 0] and slots.tolist() == [1, 4, 2, 7, 0, 3, 5, 6]


def test_a_block_of_experts_is_the_sum_it_says() -> None:
    model, batch = model_of(DEEPSEEK), packed([[9, 4]])
    moe = model.blocks[1].mlp
    assert isinstance(moe, MoE) and moe.shared is not None
    x = torch.randn(1, 13, 28, dtype=torch.float64)
    y = moe.norm(x)
    found = moe.router(y[0], batch)
    gate, up, down = (stack.weight for stack in (moe.experts.gate, moe.experts.up, moe.experts.down))  # type: ignore[union-attr]
    expected = moe.shared(y, batch)[0]
    for token in range(13):
        for weight, expert in zip(found.weights[token], found.experts[token], strict=True):
            inner = torch.nn.functional.silu(gate[expert] @ y[0, token]) * (up[expert] @ y[0, token])
            expected[token] += weight * (inner @ down[expert])
    torch.testing.assert_close(moe(x, batch)[0], expected, rtol=1e-12, atol=1e-12)


def test_flash_with_padded_values_equals_formed_scores() -> None:
    for rows in ([[9, 4], [13]], [[7], [7]]):
        batch = packed(rows)
        for window in (None, 3):
            flash, formed = (model_of(changed(DEEPSEEK, attention=kind, window=window)) for kind in ("flash", "math"))
            left, right = (plain_backward(model, model(batch)) for model in (flash, formed))
            assert worst(left, right, 1e-11) <= 1e-11


def test_predictions_are_of_later_tokens_of_the_same_document() -> None:
    batch = packed([[5, 4], [9]])
    ids, further = shifted(batch, 2)
    assert torch.equal(ids[:, :7], batch.ids[:, 2:])
    expected = torch.full_like(batch.labels, IGNORED)
    for row, place in ((0, 0), (0, 1), (0, 2), (0, 5), (0, 6), *((1, at) for at in range(7))):
        expected[row, place] = batch.labels[row, place + 2]
    assert torch.equal(further.labels, expected)
    assert further.real is not None and further.real.sum() == 3 + 2 + 7
    assert further.mask is batch.mask and further.positions is batch.positions
    assert bool((further.labels[~further.real] == IGNORED).all())
    short = packed([[2]])
    assert not bool(shifted(short, 3)[1].real.any())  # type: ignore[union-attr]


def test_the_loss_of_predictions_is_weighted_and_only_trains() -> None:
    section = changed(DEEPSEEK, mtp_depth=2, mtp_weight=0.4)
    model, batch = model_of(section), packed([[5, 4], [9]])
    x = model.hidden(batch)
    head: Any = model.head
    total = loss_sum(head.out(head.norm(x)), batch.labels)
    assert torch.equal(model.eval()(batch), total)
    for depth, prediction in enumerate(head.predictions, 1):
        ids, further = shifted(batch, depth)
        both = torch.cat([prediction.stream_norm(x), prediction.token_norm(model.embed.tokens(ids))], -1)
        x = prediction.block(prediction.join(both), further)
        total = total + 0.2 * loss_sum(head.out(prediction.norm(x)), further.labels)
    torch.testing.assert_close(model.train()(batch), total, rtol=1e-14, atol=0.0)


def test_a_step_runs_on_fake_tensors() -> None:
    """The counts that the host reads pass `mesh/host.py`; a batch of fake tensors says itself that nothing is mixed."""
    section = changed(DEEPSEEK, capacity_factor=1.0, balance_loss=0.1, mtp_depth=1)
    with FakeTensorMode():
        model = Decoder(section)
        bind(model, {item.name: torch.nn.Parameter(torch.empty(item.shape)) for item in model.param_specs()})
        zeros = torch.zeros(2, 9, dtype=torch.int64)
        loss = model(Batch(zeros, zeros, zeros, zeros, zeros, 0, mixed=False))
        loss.backward()
    assert loss.shape == () and model.blocks[1].mlp.experts.up.weight.grad is not None  # type: ignore[union-attr]


@pytest.mark.parametrize("counts", [[3, 0, 5, 1], [0, 0, 0, 9], [0, 0, 0, 0]])
def test_grouped_products_are_one_a_group(counts: list[int]) -> None:
    rows = sum(counts)
    generator = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(rows, size, generator=generator, dtype=torch.float64) for size in (7, 5))
    weights = torch.randn(4, 7, 5, generator=generator, dtype=torch.float64)
    owner = torch.arange(4).repeat_interleave(torch.tensor(counts))
    torch.testing.assert_close(grouped(x, weights, counts), (x.unsqueeze(1) @ weights[owner]).squeeze(1))
    out = torch.full((4, 5, 7), 2.0, dtype=torch.float64)
    expected = torch.zeros_like(out).index_add_(0, owner, dy.unsqueeze(2) * x.unsqueeze(1))
    add_outer_(out, dy, x, counts, fresh=True)
    torch.testing.assert_close(out, expected)
    wide = torch.ones(4, 5, 7, dtype=torch.float32)
    add_outer_(wide, dy.bfloat16(), x.bfloat16(), counts, fresh=False)
    assert float((wide - 1 - expected).abs().max()) < 0.2
