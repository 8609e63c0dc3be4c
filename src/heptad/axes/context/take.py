"""From a whole micro-batch to the tokens of it that one context rank holds, and from all ranks' outputs back to whole.

Every context rank reads the same batch and cuts it alike, by one placement; nothing is sent. Labels were shifted on the
whole rows before (C-026), so a target across an edge stays. What fills up a row (`split.py`) has id 0, no label and the
token number -1, and is not real. What depth k of multi-token prediction joins and predicts is shifted on the whole rows
too, and cut alike. The way back is a gather of equal parts and the inverse of the same permutation (C-031). Read next:
`split.py`, `models/batch.py`, `train/step.py`.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from heptad.axes.context.split import place
from heptad.config.context import degrees
from heptad.config.schema import LayoutSection
from heptad.mesh.collectives import Group, all_gather
from heptad.models.batch import IGNORED, Batch
from heptad.models.mtp import further_on
from heptad.models.placement import Placement

PADDING = -1
"""Token number of what fills up a row."""


def take(batch: Batch, layout: LayoutSection, rank: int, depths: int = 0) -> Batch:
    """What rank `rank` of the context axis holds of `batch` [B, L]: a batch [B, ⌈L/C⌉] without a mask, with `further`
    ones for `depths` depths of multi-token prediction. One rank: `batch` itself.
    """
    if layout.cp == 1:
        return batch
    assert batch.context is None, "a part is not cut again"
    ring, dealt = degrees(layout)
    placement = place(batch.documents.cpu().numpy(), ring, dealt, layout.context_split)
    index = torch.from_numpy(placement.index).to(batch.ids.device)
    mine = torch.from_numpy(placement.part(rank, layout.cp)).to(batch.ids.device)
    missing = index.shape[1] - batch.ids.shape[1]
    own_document = batch.documents.max() + 1
    numbers = _filled(batch.index, missing, PADDING).gather(1, index)
    part = Batch(
        ids=_filled(batch.ids, missing, 0).gather(1, mine),
        labels=_filled(batch.labels, missing, IGNORED).gather(1, mine),
        positions=_counted(batch.positions, missing).gather(1, mine),
        documents=_filled(batch.documents, missing, own_document).gather(1, mine),
        index=numbers[:, rank * mine.shape[1] : (rank + 1) * mine.shape[1]].contiguous(),
        step=batch.step,
        mixed=False,
        context=placement,
        numbers=numbers,
        real=_real(batch, missing, mine),
        lengths=batch.num_real(),
    )
    return replace(part, further=tuple(_further(batch, depth, missing, mine, part) for depth in range(1, depths + 1)))


def _further(batch: Batch, depth: int, missing: int, mine: Tensor, part: Batch) -> tuple[Tensor, Batch]:
    """Of the places `mine` of padded rows: the tokens that this depth joins, and the batch it predicts."""
    ids, other = further_on(batch, depth)
    labels = _filled(other.labels, missing, IGNORED).gather(1, mine)
    return _filled(ids, missing, 0).gather(1, mine), part.aimed(labels, _real(other, missing, mine), other.num_real())


def _real(batch: Batch, missing: int, mine: Tensor) -> Tensor | None:
    """Which of the places `mine` of padded rows are real; None: all of every rank's."""
    if batch.real is None and not missing:
        return None
    real = torch.ones_like(batch.ids, dtype=torch.bool) if batch.real is None else batch.real
    return _filled(real, missing, False).gather(1, mine)


def _filled(tensor: Tensor, missing: int, value: int | Tensor) -> Tensor:
    """tensor [B, L] with `missing` times `value` behind each row."""
    if not missing:
        return tensor
    return torch.cat([tensor, tensor.new_zeros(tensor.shape[0], missing) + value], dim=1)


def _counted(positions: Tensor, missing: int) -> Tensor:
    """What fills up a row is a document of its own: positions 0, 1, …"""
    if not missing:
        return positions
    behind = torch.arange(missing, device=positions.device).expand(positions.shape[0], -1)
    return torch.cat([positions, behind], dim=1)


def whole(part: Tensor, placement: Placement, length: int, group: Group, phase: str) -> Tensor:
    """Every context rank's part [B, n, ...] put together, in natural order, without padding: [B, length, ...].

    Collective over `group`, all context ranks.
    """
    full = part.new_empty(group.size, *part.shape)
    work = all_gather(full.view(-1), part.contiguous().view(-1), group, phase)
    work.complete()
    places = torch.from_numpy(placement.inverse[:, :length]).to(part.device)
    rows = torch.arange(part.shape[0], device=part.device).unsqueeze(1)
    return full.transpose(0, 1).flatten(1, 2)[rows, places]  # [B, R·tokens, ...] -> [B, length, ...]
