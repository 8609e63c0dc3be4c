"""A context rank's part of a batch: one permutation for all that is cut, padding that counts for nothing, and back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from heptad.axes.context.take import take, whole
from heptad.config.schema import LayoutSection
from heptad.launch.forked import forked
from heptad.mesh.device import Mesh
from heptad.mesh.layout import Layout
from heptad.models.batch import IGNORED, Batch

LAYOUTS: dict[str, dict[str, Any]] = {
    "ring": dict(cp=2),
    "ring of 3": dict(cp=3),
    "contiguous": dict(cp=4, context_split="contiguous"),
    "ulysses": dict(cp=3, context="ulysses"),
    "both": dict(cp=4, context="ring+ulysses", cp_ulysses=2),
    "gather": dict(cp=4, context="gather"),
}


def batch_of(*lengths: int) -> Batch:
    """Two rows of documents of these lengths, the second row the other way round; labels shifted inside documents."""
    rows = [list(lengths), list(reversed(lengths))]
    documents = torch.tensor([[number for number, size in enumerate(row) for _ in range(size)] for row in rows])
    positions = torch.tensor([[place for size in row for place in range(size)] for row in rows])
    ids = torch.arange(1, documents.numel() + 1).view_as(documents)
    labels = torch.cat([ids[:, 1:], ids.new_full((2, 1), IGNORED)], dim=1)
    ends = torch.cat([documents[:, 1:] != documents[:, :-1], torch.ones(2, 1, dtype=torch.bool)], dim=1)
    return Batch(ids, labels.masked_fill(ends, IGNORED), positions, documents, ids + 100, step=1)


def test_c_026_c_031_labels_are_shifted_before_the_split_and_positions_follow_it() -> None:
    whole_row = Batch(
        ids=torch.arange(1, 9).view(1, 8),
        labels=torch.tensor([[2, 3, 4, 5, 6, 7, 8, IGNORED]]),
        positions=torch.arange(8).view(1, 8),
        documents=torch.zeros(1, 8, dtype=torch.int64),
        index=torch.arange(8).view(1, 8),
        step=1,
    )
    plain = [take(whole_row, LayoutSection(cp=2, context_split="contiguous"), rank) for rank in range(2)]
    assert [part.labels.tolist() for part in plain] == [[[2, 3, 4, 5]], [[6, 7, 8, IGNORED]]]
    zigzag = [take(whole_row, LayoutSection(cp=2), rank) for rank in range(2)]
    assert [part.positions.tolist() for part in zigzag] == [[[0, 1, 6, 7]], [[2, 3, 4, 5]]]
    assert [part.labels.tolist() for part in zigzag] == [[[2, 3, 8, IGNORED]], [[4, 5, 6, 7]]]
    assert sum(part.num_targets() for part in zigzag) == sum(part.num_targets() for part in plain) == 7


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_further_predictions_read_is_shifted_on_whole_rows(name: str) -> None:
    """ids are 1, 2, …: of a real place the token that depth k joins is k more, and its target one more still."""
    layout, batch = LayoutSection(**LAYOUTS[name]), batch_of(3, 1, 7)
    parts = [take(batch, layout, rank, depths=2) for rank in range(layout.cp)]
    for part in parts:
        assert part.real is None or torch.equal(part.real, part.index >= 0)
        assert part.num_real().tolist() == [11, 11] and len(part.further) == 2
    for depth in (1, 2):
        found = [part.further[depth - 1] for part in parts]
        real = [other.real for _, other in found]
        each = sum(max(size - depth, 0) for size in (3, 1, 7))  # places of a row whose document goes on so far
        assert sum(int(marks.sum()) for marks in real if marks is not None) == 2 * each
        for part, (ids, other), marks in zip(parts, found, real, strict=True):
            assert marks is not None and torch.equal(ids[marks], part.ids[marks] + depth)
            targets = other.labels[other.labels != IGNORED]
            assert torch.equal(targets, part.ids[other.labels != IGNORED] + depth + 1)
            assert not (other.labels != IGNORED)[~marks].any() and other.num_real().tolist() == [each, each]


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("lengths", [(8,), (13,), (3, 1, 7), (1, 1, 1, 1)])
def test_each_token_lies_on_one_rank_with_all_that_belongs_to_it(name: str, lengths: tuple[int, ...]) -> None:
    layout, batch = LayoutSection(**LAYOUTS[name]), batch_of(*lengths)
    parts = [take(batch, layout, rank) for rank in range(layout.cp)]
    size = -(-batch.ids.shape[1] // layout.cp)
    assert {tuple(part.ids.shape) for part in parts} == {(2, size)}
    assert all(part.mask is None and part.context is not None and not part.mixed for part in parts)
    columns = {name: torch.cat([getattr(part, name) for part in parts], dim=1) for name in FIELDS}
    assert all(part.numbers is not None and torch.equal(part.numbers, columns["index"]) for part in parts)
    for row in range(2):
        real = columns["index"][row] >= 0
        order = columns["index"][row][real].argsort()
        for name in FIELDS:
            assert torch.equal(columns[name][row][real][order], getattr(batch, name)[row]), name
        assert (columns["labels"][row][~real] == IGNORED).all()
        assert not set(columns["documents"][row][~real].tolist()) & set(batch.documents[row].tolist())


FIELDS = ("ids", "labels", "positions", "documents", "index")


def test_one_rank_holds_the_batch_itself_and_a_part_moves_with_all_it_has() -> None:
    batch = batch_of(3, 4)
    assert take(batch, LayoutSection(), 0) is batch
    part = take(batch, LayoutSection(cp=2), 1)
    moved = part.to(torch.device("meta"))
    assert moved.context is part.context and moved.numbers is not None and moved.numbers.device.type == "meta"


def gathered(rank: int, section: LayoutSection, batch: Batch) -> list[Tensor]:
    mesh = Mesh(Layout.of(section), rank, [("cp",)], torch.device("cpu"))
    part = take(batch, section, rank)
    assert part.context is not None
    outputs = part.ids.unsqueeze(-1) * torch.tensor([1, 1000])  # [B, n, 2]
    length = batch.ids.shape[1]
    return [whole(tensor, part.context, length, mesh.group("cp"), "sample") for tensor in (part.ids, outputs)]


@pytest.mark.parametrize("name", LAYOUTS)
def test_c_031_the_same_permutation_leads_back(name: str) -> None:
    section, batch = LayoutSection(**LAYOUTS[name]), batch_of(4, 9)
    for ids, outputs in forked(section.cp, gathered, section, batch):
        assert torch.equal(ids, batch.ids)
        assert torch.equal(outputs, batch.ids.unsqueeze(-1) * torch.tensor([1, 1000]))


def test_cutting_packed_rows_never_makes_their_mask() -> None:
    documents = torch.tensor([[0, 0, 1, 1, 1, 2, 2]])
    ids = torch.arange(7).unsqueeze(0)
    batch = Batch(ids, ids, ids, documents, ids, step=1)
    part = take(batch.to(torch.device("cpu")), LayoutSection(cp=2), 0)
    assert batch.mixed and batch._mask is None and part.mask is None
    assert batch.mask is batch.mask and batch.mask is not None
