"""Multi-token prediction: from each token's last hidden state also the tokens after the next one.

Depth k joins depth k-1's hidden state of position i with the embedding of token i+k (both normalised), runs a block of
its own, and predicts token i+k+1 by the model's own head. It belongs to the last unit, which therefore reads the token
table too; in training its losses are added to the main one, each times mtp_weight / mtp_depth. All are sums that the
step divides by the number of *main* targets, as the paper's 1/T is. Positions whose token i+k lies in another document,
or behind the row, predict nothing and are sent to no expert. Of a batch that is a part of its rows the tokens further
on lie elsewhere, so the whole rows were shifted before they were cut (`Batch.further`). Evaluation and text use the
main prediction alone.

Cost of a depth, for each token forward: 4·D² FLOPs of the joining linear, a block, a pass of the head; it sends what
block and head send.
Source: DeepSeek-V3, arXiv 2412.19437, §2.2 (Gloeckle et al., arXiv 2404.19737). Read next: `decoder.py` (`Head`).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from heptad.config.schema import ModelSection
from heptad.models.attention import linear_of, norm_of
from heptad.models.batch import IGNORED, Batch
from heptad.models.parallel import TokenTable


class Prediction(nn.Module):
    """One depth. `tokens` is the model's own table (tied by the decoder); `block`, one like the model's last."""

    def __init__(self, section: ModelSection, block: nn.Module) -> None:
        super().__init__()
        width = section.width
        self.stream_norm, self.token_norm = norm_of(section, width), norm_of(section, width)
        self.join = linear_of("join", 2 * width, width, bias=False)
        self.block = block
        self.norm = norm_of(section, width)
        self.tokens = TokenTable(section.vocab, width)

    def forward(self, x: Tensor, ids: Tensor, batch: Batch) -> Tensor:
        """x [B, L, D] of one depth less, ids [B, L] the tokens to join -> [B, L, D], the norm not applied."""
        both = torch.cat([self.stream_norm(x), self.token_norm(self.tokens(ids))], dim=-1)
        out: Tensor = self.block(self.join(both), batch)
        return out


def shifted(batch: Batch, depth: int) -> tuple[Tensor, Batch]:
    """What depth `depth` of `batch` joins and predicts: of a part what was cut with it."""
    if batch.context is not None:
        return batch.further[depth - 1]
    _ = batch.mask  # all depths have the same one
    return further_on(batch, depth)


def further_on(batch: Batch, depth: int) -> tuple[Tensor, Batch]:
    """The tokens `depth` places on [B, L] (anything where there is none), and the batch that depth predicts."""
    ids, labels = batch.ids.roll(-depth, 1), batch.labels.roll(-depth, 1)
    there = batch.documents == batch.documents.roll(-depth, 1)
    there[:, max(there.shape[1] - depth, 0) :] = False
    real = there if batch.real is None else there & batch.real
    return ids, batch.aimed(labels.masked_fill(~there, IGNORED), real)
