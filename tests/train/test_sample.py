"""Sampling: greedy, keyed, causal window, and the right frequencies."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from heptad.models.batch import IGNORED, Batch
from heptad.train.sample import batch_of, choose, generate


def successor(batch: Batch) -> Tensor:
    """Likeliest next token: one more than the last (vocabulary 11)."""
    return torch.nn.functional.one_hot((batch.ids + 1) % 11, 11).float() * 5


def test_greedy() -> None:
    assert generate(successor, [3], 10, window=4, temperature=0.0, seed=0) == [4, 5, 6, 7, 8, 9, 10, 0, 1, 2]


def test_forwards_have_one_shape_and_see_the_last_tokens() -> None:
    seen: list[tuple[tuple[int, ...], list[int]]] = []

    def logits(batch: Batch) -> Tensor:
        seen.append((tuple(batch.ids.shape), batch.ids[0].tolist()))
        return successor(batch)

    generate(logits, [1, 2], 4, window=3, temperature=0.0, seed=0)
    assert {shape for shape, _ in seen} == {(1, 3)}
    assert [ids for _, ids in seen] == [[1, 2, 0], [1, 2, 3], [2, 3, 4], [3, 4, 5]]


def test_batch_has_no_targets_and_one_document() -> None:
    batch = batch_of([5, 6], 4)
    assert batch.ids.tolist() == [[5, 6, 0, 0]] and (batch.labels == IGNORED).all() and batch.mask is None
    assert batch.positions.tolist() == [[0, 1, 2, 3]]


def test_samples_are_keyed() -> None:
    flat = lambda batch: torch.zeros(1, batch.ids.shape[1], 50)  # noqa: E731
    first = generate(flat, [0], 30, window=8, temperature=1.0, seed=1)
    assert first == generate(flat, [0], 30, window=8, temperature=1.0, seed=1)
    assert first != generate(flat, [0], 30, window=8, temperature=1.0, seed=2)


def test_frequencies_follow_the_softmax() -> None:
    scores = torch.tensor([2.0, 1.0, 0.0, -1.0])
    picked = torch.bincount(torch.tensor([choose(scores, 0.5, 7, place) for place in range(4000)]), minlength=4)
    want = torch.softmax(scores / 0.5, 0)
    assert picked[0] / 4000 == pytest.approx(want[0].item(), abs=0.02)
    assert picked[1] / 4000 == pytest.approx(want[1].item(), abs=0.02)
