"""Dropout's mask is a function of the token's number: the same in any layout and whenever it is computed again."""

from __future__ import annotations

import math

import pytest
import torch
from tests.models.helpers import GPT, packed, split_backward

from heptad.models.batch import Batch
from heptad.models.build import loose_params
from heptad.models.decoder import Decoder
from heptad.models.dropout import Dropout

RATE = 0.3
GPT_DROPPED = GPT.model_copy(update={"dropout": 0.1, "attention_dropout": 0.2})


def kept(seed: int = 1, site: str = "blocks.0.mlp", step: int = 4, first: int = 0) -> torch.Tensor:
    index = torch.arange(first, first + 512).view(1, 512)
    return Dropout(RATE, seed, site).features(torch.ones(1, 512, 257), index, step) != 0


def test_share_and_scale() -> None:
    dropped = Dropout(RATE, 1, "x").features(torch.ones(1, 512, 257), torch.arange(512).view(1, -1), 0)
    mask = dropped != 0
    n = mask.numel()
    assert abs(float(mask.double().mean()) - (1 - RATE)) < 4 * math.sqrt(RATE * (1 - RATE) / n)
    assert torch.allclose(dropped[mask], torch.tensor(1 / (1 - RATE)))


@pytest.mark.parametrize(
    "other", [{"seed": 2}, {"site": "blocks.1.mlp"}, {"step": 5}, {"first": 512}], ids=["seed", "site", "step", "index"]
)
def test_masks_of_other_keys_are_independent(other: dict[str, int | str]) -> None:
    one, two = kept().double() - (1 - RATE), kept(**other).double() - (1 - RATE)  # type: ignore[arg-type]
    spread = RATE * (1 - RATE) / math.sqrt(one.numel())
    assert abs(float((one * two).mean())) < 4 * spread


def test_neighbours_and_rows_are_independent() -> None:
    x = kept()[0].double() - (1 - RATE)
    spread = RATE * (1 - RATE)
    for pair in ((x[1:], x[:-1]), (x[:, 1:], x[:, :-1]), (x[2:, 1:], x[:-2, :-1])):
        assert abs(float((pair[0] * pair[1]).mean())) < 4 * spread / math.sqrt(pair[0].numel())
    assert float(x.mean(1).std()) == pytest.approx(math.sqrt(spread / 257), rel=0.15)
    assert float(x.mean(0).std()) == pytest.approx(math.sqrt(spread / 512), rel=0.2)


def test_any_cut_of_the_tokens_drops_the_same() -> None:
    x = torch.randn(2, 11, 7, generator=torch.Generator().manual_seed(0))
    index = torch.arange(22).view(2, 11)
    dropout = Dropout(RATE, 1, "x")
    whole = dropout.features(x, index, 3)
    assert torch.equal(whole[1:, 4:9], dropout.features(x[1:, 4:9], index[1:, 4:9], 3))
    scores = torch.rand(2, 3, 11, 11, generator=torch.Generator().manual_seed(0))
    whole = dropout.attention(scores, index, index, 3)
    part = dropout.attention(scores[1:, :, 2:7, 5:], index[1:, 2:7], index[1:, 5:], 3)
    assert torch.equal(whole[1:, :, 2:7, 5:], part)
    assert not torch.equal(whole[0] != 0, whole[1] != 0)


def test_attention_masks_of_heads_are_independent() -> None:
    index = torch.arange(101).view(1, -1)
    mask = Dropout(RATE, 1, "x").attention(torch.ones(1, 5, 101, 101), index, index, 0)[0] != 0
    x = mask.double() - (1 - RATE)
    bound = 4.5 * RATE * (1 - RATE) / 101
    for head in range(4):
        assert abs(float((x[head] * x[head + 1]).mean())) < bound
        assert abs(float((x[head] * x[head].t()).triu(1).mean())) < bound
    assert abs(float(x.mean())) < 4 * math.sqrt(RATE * (1 - RATE) / x.numel())


def test_c_022_running_a_unit_again_gives_the_same_bits() -> None:
    """Recompute is a second forward: without a tape, with one, and after other forwards in between."""
    model = Decoder(GPT_DROPPED, seed=5, device="cpu", dtype=torch.float32)
    batch, other = packed([[11, 6]]), packed([[17]], step=9)
    units = model.unit_list()
    loose = [loose_params(unit) for unit in units]
    with torch.no_grad():
        first = model(batch)
    loss, sink = split_backward(units, batch, loose)
    split_backward(units, other, loose)
    again, sink_again = split_backward(units, batch, loose)
    assert torch.equal(first, loss) and torch.equal(loss, again)
    assert all(torch.equal(grad, sink_again.grads[param]) for param, grad in sink.grads.items())
    assert not torch.equal(model(packed([[11, 6]], step=1)), loss)


def test_a_batch_cut_into_micro_batches_drops_the_same() -> None:
    model = Decoder(GPT_DROPPED, seed=5, device="cpu", dtype=torch.float64)
    whole = packed([[11, 6], [17], [8, 9]])
    parts = [
        Batch(*(getattr(whole, n)[i : i + 1] for n in ("ids", "labels", "positions", "documents", "index")), step=0)
        for i in range(3)
    ]
    total = sum(model(part).detach() for part in parts)
    assert abs(total - model(whole).detach()) <= 1e-11 * total


def test_evaluation_drops_nothing() -> None:
    dropped = Decoder(GPT_DROPPED, seed=5, device="cpu", dtype=torch.float64).eval()
    plain = Decoder(GPT, seed=5, device="cpu", dtype=torch.float64)
    batch = packed([[11, 6]])
    assert abs(dropped(batch).detach() - plain(batch).detach()) <= 1e-12
