"""Initial values as a function of (seed, parameter's name, flat index): the same for any layout (C-024).

Values are made in aligned blocks of 16,384 on the CPU, whole blocks always, and sliced: which elements a rank asks for
changes no bit, and memory is the rank's shard plus a block. (The block is below the size at which torch splits an
elementwise operation over threads.) Cost: about 20 ns an element on one core. Read next: `keyed.py`, `spec.py`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from heptad.models.keyed import GOLDEN, key_of, mix_
from heptad.models.spec import ParamSpec

BLOCK = 16_384


def fill(out: Tensor, spec: ParamSpec, start: int, stop: int, seed: int) -> None:
    """Write the initial values of `spec`'s flat indices [start, stop) into `out`, 1-D, any float dtype and device.

    normal: std · √2 · erfinv(u), u uniform in (-1, 1) from 52 bits of a hash, in float64, rounded once to `out`'s.
    """
    assert out.dim() == 1 and out.numel() == stop - start and 0 <= start <= stop <= spec.numel
    if spec.init.kind == "constant":
        out.detach().fill_(spec.init.value)
        return
    key, scale = key_of(seed, spec.name), spec.init.value * math.sqrt(2)
    for first in range(start // BLOCK * BLOCK, stop, BLOCK):
        low, high = max(first, start), min(first + BLOCK, stop)
        out.detach()[low - start : high - start].copy_(_block(key, first, scale)[low - first : high - first])


def _block(key: int, first: int, scale: float) -> Tensor:
    """float64 [BLOCK]: the values of flat indices [first, first + BLOCK)."""
    bits = mix_(torch.arange(first, first + BLOCK).mul_(GOLDEN).add_(key))
    uniform = (bits >> 12).bitwise_and_((1 << 52) - 1).to(torch.float64).add_(0.5).mul_(2.0**-51).sub_(1.0)
    return uniform.erfinv_().mul_(scale)


def materialise(
    module: nn.Module, specs: tuple[ParamSpec, ...], seed: int, device: torch.device, dtype: torch.dtype
) -> dict[str, nn.Parameter]:
    """Give every parameter of `module` (built on meta) memory and its initial values; returns them by owner's name."""
    params = {}
    for spec in specs:
        values = torch.empty(spec.shape, dtype=dtype, device=device)
        fill(values.view(-1), spec, 0, spec.numel, seed)
        params[spec.name] = nn.Parameter(values, requires_grad=spec.trainable)
    bind(module, params)
    return params


def bind(module: nn.Module, params: dict[str, nn.Parameter]) -> None:
    """Put `params` in place of the module's of these names, under *every* name each has: tied stays tied (C-019).

    A parameter of the meta device cannot be given memory in place (`.data` refuses another device type), and replacing
    name by name would untie: so the old object is looked for everywhere and the new one takes its place.
    """
    new = {id(module.get_parameter(name)): param for name, param in params.items()}
    for owner in module.modules():
        for name, old in list(owner._parameters.items()):
            if old is not None and id(old) in new:
                owner._parameters[name] = new[id(old)]
