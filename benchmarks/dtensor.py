"""The peer of the tensor axis: a plain torch Llama under `parallelize_module`, as torchtitan's users write it.

The model has `nn.Linear`s, `nn.RMSNorm`s, torch's fused attention and cross-entropy, and starts from Heptad's keyed
weights. Two plans, both with the head's loss on cut logits (`loss_parallel`) and with `PrepareModuleInput`, so that q,
k, v share one gather (or one all-reduce of their input gradients), and gate and up another:

* whole stream: attention and MLP column- and row-parallel, the stream and the norms plain tensors on every rank;
* cut stream: `SequenceParallel` norms, gathers and reduce-scatters around attention and MLP.

Read next: `tensor.py` (the lines), `peers.py` (what every contender shares).
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from benchmarks.peers import CLIP, Peer, Size, decoder
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from heptad.models.batch import Batch
from heptad.models.rotary import frequencies
from heptad.models.spec import complete


class Attention(nn.Module):
    """Causal attention with rotary positions; heads follow from the width of what the linears give."""

    def __init__(self, width: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[B, L, D], or this rank's tokens of it, to the same."""
        parts = [linear(x) for linear in (self.q, self.k, self.v)]
        q, k, v = (part.view(*part.shape[:2], -1, self.head_dim) for part in parts)
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        mixed = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, L, H, d] turned by cos and sin [L, 1, d] (half rotation, sine signed)."""
    return x * cos + x.roll(x.shape[-1] // 2, -1) * sin


class Mlp(nn.Module):
    """down(silu(gate x) · up x)."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, L, D], or this rank's tokens of it, to the same."""
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class Block(nn.Module):
    """Norm before, residual around."""

    def __init__(self, width: int, head_dim: int, inner: int, eps: float) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(width, eps=eps), nn.RMSNorm(width, eps=eps)
        self.attention, self.mlp = Attention(width, head_dim), Mlp(width, inner)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """The stream to the stream."""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class Llama(nn.Module):
    """A batch -> the sum of its tokens' losses. Weights and rotary frequencies are those of Heptad's model."""

    cos: Tensor
    sin: Tensor

    def __init__(self, size: Size) -> None:
        super().__init__()
        section = complete(size.section())
        assert section.head_dim is not None
        self.embed = nn.Embedding(size.vocab, size.width)
        self.blocks = nn.ModuleList(
            Block(size.width, section.head_dim, size.mlp_width, section.norm_eps) for _ in range(size.layers)
        )
        self.norm = nn.RMSNorm(size.width, eps=section.norm_eps)
        self.head = nn.Linear(size.width, size.vocab, bias=False)
        steps = torch.tensor(frequencies(section.head_dim, section.rope_theta, section.rope_scaling))
        angles = (torch.arange(size.seq_len).unsqueeze(-1) * steps).unsqueeze(1)  # [L, 1, d/2]
        self.register_buffer("cos", torch.cat([angles.cos()] * 2, -1))
        self.register_buffer("sin", torch.cat([-angles.sin(), angles.sin()], -1))
        self._copy(size)

    def _copy(self, size: Size) -> None:
        """Heptad's keyed initial values; its row-parallel weights lie input first."""
        values = {name: param.detach() for name, param in decoder(size).named_parameters()}
        with torch.no_grad():
            for name, param in self.named_parameters():
                value = values[_theirs(name)]
                param.copy_(value.t() if name.endswith(("attention.out.weight", "mlp.down.weight")) else value)

    def forward(self, batch: Batch) -> Tensor:
        """Σ of the token losses, 0-d."""
        x = self.embed(batch.ids)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="sum")


def _theirs(name: str) -> str:
    """Heptad's name of a parameter."""
    if name.startswith("blocks."):
        return name.replace("_norm.", ".norm.")
    return {"embed": "embed.tokens", "norm": "head.norm", "head": "head.out"}[name.split(".")[0]] + ".weight"


def _plans(sequence: bool) -> tuple[dict[str, ParallelStyle], dict[str, ParallelStyle]]:
    """(of the model, of a block)."""
    held = Shard(1) if sequence else Replicate()
    norm: dict[str, ParallelStyle] = {"norm": SequenceParallel()} if sequence else {}
    norms = {f"{part}_{name}": style for part in ("attention", "mlp") for name, style in norm.items()}
    outside: dict[str, ParallelStyle] = norm | {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=held),
        "head": ColwiseParallel(input_layouts=held, output_layouts=Shard(-1), use_local_output=False),
    }
    whole = Replicate()
    block: dict[str, ParallelStyle] = norms | {
        "attention": PrepareModuleInput(input_layouts=(held, None, None), desired_input_layouts=(whole, None, None)),
        **{f"attention.{name}": ColwiseParallel() for name in "qkv"},
        "attention.out": RowwiseParallel(output_layouts=held),
        "mlp": PrepareModuleInput(input_layouts=(held,), desired_input_layouts=(whole,)),
        **{f"mlp.{name}": ColwiseParallel() for name in ("gate", "up")},
        "mlp.down": RowwiseParallel(output_layouts=held),
    }
    return outside, block


def parallel(model: Llama, mesh: DeviceMesh, sequence: bool) -> Llama:
    """Cut over the ranks of `mesh`."""
    outside, block = _plans(sequence)
    for layer in model.blocks:
        parallelize_module(layer, mesh, block)
    parallelize_module(model, mesh, outside)
    return model


class TensorPeer(Peer):
    """The step its users write: the loss of cut logits, a norm over DTensors, fused AdamW. Reads rank 0's batches."""

    def __init__(self, name: str, size: Size, sequence: bool) -> None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        super().__init__(name, size, 0, parallel(Llama(size), mesh, sequence))
        self.cut = [param for param in self.params if isinstance(param, DTensor)]
        self.whole = [param for param in self.params if not isinstance(param, DTensor)]

    def step(self, number: int) -> float:
        with loss_parallel():
            loss: Tensor = self.module(self._batches[number % 4]) / (self.size.sequences * self.size.seq_len)
            loss.backward()
        self._clip()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return (loss.full_tensor() if isinstance(loss, DTensor) else loss).item()

    def _clip(self) -> None:
        """At the norm over all parameters; DTensors and plain tensors cannot share one foreach call."""
        norm = get_total_norm([param.grad for param in self.cut if param.grad is not None])
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        if self.whole:
            norm = torch.hypot(norm, get_total_norm([param.grad for param in self.whole if param.grad is not None]))
        for params in (self.cut, self.whole):
            if params:
                clip_grads_with_norm_(params, CLIP, norm)
