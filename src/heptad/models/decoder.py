"""The decoder: GPT, Llama 3, Qwen3, Mixtral and DeepSeek-V3 are settings of one model, written for a single device.

A model is a list of units (embedding, blocks, head); a block is a list of named segments, run in order; every linear
has a role; core attention is a seam. Parallelism is applied from outside. The head returns the *sum* of the token
losses: the division by the number of targets of the whole global batch is the step's (one normalisation).

Legend: B sequences, L tokens, D width, V vocabulary.
Cost: see `account/parameters.py` and `account/flops.py`. Read next: `layers.py`, `attention.py`, `mla.py`, `moe.py`,
`mtp.py`, `spec.py`, `build.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from heptad.config.experts import routes
from heptad.config.schema import ModelSection
from heptad.mesh.regions import SINGLE, Stream
from heptad.models import spec
from heptad.models.activation import Activate, activate
from heptad.models.attention import Attention, MaskBias, linear_of, norm_of
from heptad.models.batch import IGNORED, Batch
from heptad.models.columns import columns, normed_columns
from heptad.models.dropout import Dropout
from heptad.models.gated import activated, gated
from heptad.models.init import materialise
from heptad.models.layers import Embedding
from heptad.models.loss import LossKernels, TokenLoss, whole_logits
from heptad.models.mla import LatentAttention
from heptad.models.moe import MoE
from heptad.models.mtp import Prediction, shifted
from heptad.models.parallel import RowLinear, TokenTable
from heptad.models.rotary import Rotary
from heptad.models.router import routers

Segment = Callable[[Tensor, Batch], Tensor]


class Embed(nn.Module):
    """The first unit: (None, batch) -> the stream; tokens, and learned positions where the model has them."""

    stream: Stream = SINGLE

    def __init__(self, section: ModelSection, dropout: Dropout | None) -> None:
        super().__init__()
        self.dropout = dropout
        self.tokens = TokenTable(section.vocab, section.width)
        learned = section.positions == "learned"
        self.positions = Embedding(section.max_positions, section.width) if learned else None

    def forward(self, x: None, batch: Batch) -> Tensor:
        """The stream of `batch.ids`."""
        y: Tensor = self.tokens(batch.ids)
        if self.positions is not None:
            y = y + self.positions(self.stream.local(batch.positions))
        if self.dropout is None or not self.training:
            return y
        return self.dropout.features(y, self.stream.local(batch.index), batch.step)


class Mlp(nn.Module):
    """The stream -> the stream, its norm included (but of shared experts), the residual not.

    gated: down(act(gate x) · up x) (Shazeer, arXiv 2002.05202); plain: down(act(up x)). reruns: gate and up are kept,
    and the activation runs again in the backward. joined: the activation of a gated one, which `down` takes on itself
    where the backward is whole (None: never).
    """

    stream: Stream = SINGLE  # a seam, as is the attribute `activate`
    reruns: bool = False

    def __init__(self, section: ModelSection, shared: int = 0) -> None:
        super().__init__()
        width, inner, bias = section.width, section.mlp_width, section.mlp_bias
        if shared:  # experts that every token passes: one MLP of their widths together, behind another's norm
            assert section.expert_width is not None
            inner = shared * section.expert_width
        self.activate: Activate = activate(section.activation, section.mlp == "gated")
        self.joined = section.activation if section.mlp == "gated" else None
        self.norm = None if shared else norm_of(section, width)
        self.gate = linear_of("gate", width, inner, bias) if section.mlp == "gated" else None
        self.up = linear_of("up", width, inner, bias)
        self.down = RowLinear("down", inner, width, bias)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """[B, L, D], or this rank's [n, D] of it, to the same."""
        linears = (self.up,) if self.gate is None else (self.gate, self.up)
        num_tokens = batch.ids.numel()
        if self.norm is None:
            parts = columns(x, linears, self.stream, num_tokens)
        else:
            parts = normed_columns(self.norm, x, linears, self.stream, num_tokens)
        if self.reruns:
            return activated(self.down, self.activate, parts)
        tape = self.down.tape
        if self.joined is not None and tape is not None and tape.sink is not None:
            return gated(self.down, self.joined, *parts)
        out: Tensor = self.down(self.activate(*parts))
        return out


class Block(nn.Module):
    """(x, batch) -> x, the stream. `segments` names its parts; running them in order is its forward.

    routed: its MLP is a mixture of experts.
    """

    stream: Stream = SINGLE

    def __init__(
        self,
        section: ModelSection,
        rotary: Rotary | None,
        mask_bias: MaskBias,
        seed: int,
        name: str,
        routed: bool = False,
    ) -> None:
        super().__init__()
        scores, rate = section.attention_dropout, section.dropout
        dropout = Dropout(scores, seed, f"{name}.scores") if scores else None
        attention = LatentAttention if section.attention_kind == "mla" else Attention
        self.attention: Attention | LatentAttention = attention(section, rotary, mask_bias, dropout)
        self.mlp: Mlp | MoE = Mlp(section)
        if routed:
            shared = Mlp(section, section.shared_experts) if section.shared_experts else None
            self.mlp = MoE(section, shared, seed, f"{name}.mlp")
        self.attention_dropout = Dropout(rate, seed, f"{name}.attention") if rate else None
        self.mlp_dropout = Dropout(rate, seed, f"{name}.mlp") if rate else None

    @property
    def segments(self) -> tuple[tuple[str, Segment], ...]:
        """Named parts, each (x, batch) -> x."""
        return (("attention", self._attend), ("mlp", self._transform))

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """All segments in order."""
        for _, segment in self.segments:
            x = segment(x, batch)
        return x

    def _attend(self, x: Tensor, batch: Batch) -> Tensor:
        return x + self._dropped(self.attention(x, batch), self.attention_dropout, batch)

    def _transform(self, x: Tensor, batch: Batch) -> Tensor:
        return x + self._dropped(self.mlp(x, batch), self.mlp_dropout, batch)

    def _dropped(self, y: Tensor, dropout: Dropout | None, batch: Batch) -> Tensor:
        if dropout is None or not self.training:
            return y
        return dropout.features(y, self.stream.local(batch.index), batch.step)


class Head(nn.Module):
    """The last unit: (the stream, batch) -> sum of the token losses, a scalar of at least fp32.

    vocabulary: the rows of the whole vocabulary that `out.weight` has, padding behind them. loss_chunk: see `chunk.py`.
    predictions: of tokens after the next (`mtp.py`), in training, each loss times `prediction_weight`.
    """

    stream: Stream = SINGLE
    loss_chunk: int | Literal["auto"] = "auto"
    kernels: LossKernels = LossKernels()

    def __init__(self, section: ModelSection, predictions: Sequence[Prediction] = ()) -> None:
        super().__init__()
        self.norm = norm_of(section, section.width)
        self.out = linear_of("head", section.width, section.vocab, bias=False)
        self.predictions = nn.ModuleList(predictions)
        self.prediction_weight = section.mtp_weight / max(section.mtp_depth, 1)
        self.vocab = section.vocab
        self.vocabulary = range(section.vocab)

    def logits(self, x: Tensor, batch: Batch) -> Tensor:
        """The stream of `batch` -> [B, L, V] on every rank, in x's dtype."""
        full = self.stream.gather(self.norm(x), batch.ids.numel()).wait()
        return whole_logits(self.out(full), self.stream.group, self.vocab).view(*batch.ids.shape, -1)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """The loss of `batch`, summed over its targets; on one rank torch's cross-entropy for ordinary autograd."""
        loss = self._loss(self.norm(x), batch)
        if not self.training:
            return loss
        prediction: Any
        for depth, prediction in enumerate(self.predictions, 1):
            ids, further = shifted(batch, depth)
            x = prediction(x, ids, further)
            loss = loss + self.prediction_weight * self._loss(prediction.norm(x), further)
        return loss

    def _loss(self, x: Tensor, batch: Batch) -> Tensor:
        """Of x after a norm."""
        tape = self.out.tape
        if tape is None and torch.is_grad_enabled() and self.stream.size == 1:
            return loss_sum(self.out(x), batch.labels)
        labels = batch.labels.flatten()
        return TokenLoss(self.out, self.stream, self.vocabulary, self.loss_chunk, labels, tape, self.kernels)(x)


def loss_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Σ of -log softmax(logits)[label] over the labels that are not `IGNORED`; exactly 0 where all are (C-008, C-009).

    logits [..., V], labels [...] int64. Computed in at least fp32. A mean would be 0/0 for a batch without targets.
    """
    return F.cross_entropy(
        _at_least_fp32(logits).flatten(0, -2), labels.flatten(), ignore_index=IGNORED, reduction="sum"
    )


def _at_least_fp32(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


class Decoder(nn.Module):
    """The whole model of a `ModelSection`. On the meta device (no memory) unless `device` says otherwise.

    seed keys initial values and dropout. On a real device the parameters get their initial values in `dtype`.
    Raises ConfigError when the section's sizes do not fit each other.
    """

    def __init__(
        self,
        section: ModelSection,
        seed: int = 0,
        device: torch.device | str = "meta",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        section = spec.complete(section)
        self.section, rate = section, section.dropout
        assert section.head_dim is not None
        rotary, mask_bias = None, MaskBias(section.window)
        if section.positions == "rotary":
            rotary = _rotary(section)
        with torch.device("meta"):
            self.embed = Embed(section, Dropout(rate, seed, "embed") if rate else None)
            names = [f"blocks.{i}" for i in range(section.layers)]
            self.blocks = nn.ModuleList(
                Block(section, rotary, mask_bias, seed, name, routes(section, i)) for i, name in enumerate(names)
            )
            names = [f"head.predictions.{depth}" for depth in range(section.mtp_depth)]
            routed = section.experts is not None
            blocks = [Block(section, rotary, mask_bias, seed, f"{name}.block", routed) for name in names]
            predictions = [Prediction(section, block) for block in blocks]
            self.head = Head(section, predictions)
        if section.tied:
            self.head.out.weight = self.embed.tokens.weight
        for prediction in predictions:
            prediction.tokens.weight = self.embed.tokens.weight
        trainable = {item.name: item.trainable for item in self.param_specs()}
        for name, param in self.named_parameters():
            param.requires_grad_(trainable[name])
        if torch.device(device).type != "meta":
            materialise(self, self.param_specs(), seed, torch.device(device), dtype)
            for router in routers(self).values():
                router.place(torch.device(device), dtype)

    def unit_list(self) -> list[nn.Module]:
        """Units in program order: embedding, blocks, head."""
        return [self.embed, *self.blocks, self.head]

    def param_specs(self) -> tuple[spec.ParamSpec, ...]:
        """Every parameter, a tied one once, in the order of `named_parameters`."""
        return spec.param_specs(self.section)

    def unit_specs(self) -> tuple[spec.UnitSpec, ...]:
        """One for each entry of `unit_list`."""
        return spec.unit_specs(self.section)

    def hidden(self, batch: Batch) -> Tensor:
        """The last block's output [B, L, D]."""
        x: Tensor = self.embed(None, batch)
        for block in self.blocks:
            x = block(x, batch)
        return x

    def logits(self, batch: Batch) -> Tensor:
        """[B, L, V], in the parameters' dtype."""
        return self.head.logits(self.hidden(batch), batch)

    def forward(self, batch: Batch) -> Tensor:
        """The sum of the token losses of `batch`."""
        loss: Tensor = self.head(self.hidden(batch), batch)
        return loss


def _rotary(section: ModelSection) -> Rotary:
    """The rotation of a head, or under latent attention of the part of a head that has positions."""
    if section.attention_kind == "gqa":
        assert section.head_dim is not None
        return Rotary(section.head_dim, section.rope_theta, section.rope_scaling)
    assert section.qk_rope_head_dim is not None
    rotary = Rotary(section.qk_rope_head_dim, section.rope_theta, section.rope_scaling)
    rotary.amplitude = 1.0  # it stands at the scores (`mla.py`)
    return rotary
