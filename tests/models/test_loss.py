"""The token loss of the taped path: value and gradient of torch's cross-entropy, one buffer, no NaN without targets."""

from __future__ import annotations

import pytest
import torch

from heptad.models.batch import IGNORED
from heptad.models.decoder import loss_sum
from heptad.models.loss import TokenLoss


@pytest.mark.parametrize("num_ignored", [0, 5, 13])
def test_value_and_gradient_are_cross_entropys(num_ignored: int) -> None:
    torch.manual_seed(3)
    logits = 5 * torch.randn(13, 17, dtype=torch.float64)
    labels = torch.randint(17, (13,))
    labels[:num_ignored] = IGNORED
    plain, ours = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    want = loss_sum(plain, labels)
    loss = TokenLoss.apply(ours, labels)
    torch.testing.assert_close(loss, want, rtol=1e-14, atol=0.0)
    (0.25 * want).backward()
    (0.25 * loss).backward()
    assert plain.grad is not None and ours.grad is not None
    assert (ours.grad - plain.grad).abs().max() <= 1e-15
    assert not ours.grad[:num_ignored].any()


def test_c_009_only_ignored_targets_give_zero_and_a_finite_gradient() -> None:
    logits = torch.randn(4, 7, requires_grad=True)
    loss = TokenLoss.apply(logits, torch.full((4,), IGNORED))
    loss.backward()
    assert loss.item() == 0.0
    assert logits.grad is not None and not logits.grad.any()


def test_the_logits_themselves_are_left_alone() -> None:
    logits = torch.randn(3, 5, requires_grad=True)
    before = logits.detach().clone()
    TokenLoss.apply(logits, torch.tensor([1, 2, IGNORED])).backward()
    assert torch.equal(logits.detach(), before)


def test_a_label_as_unlikely_as_can_be() -> None:
    logits = torch.tensor([[0.0, -1e4]], requires_grad=True)
    loss = TokenLoss.apply(logits, torch.tensor([1]))
    loss.backward()
    assert loss.item() == 1e4
    assert logits.grad is not None and logits.grad.tolist() == [[1.0, -1.0]]
