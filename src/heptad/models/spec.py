"""Every parameter of a model as data: name, shape, a logical name for each dim, role, unit, initial value.

Ownership, reduction, gradient norm, optimizer group, memory and checkpoint of a parameter follow from its `ParamSpec`.
This module never imports torch. Read next: `decoder.py` (the torch model these specs must equal), `resolve.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Literal

from heptad.config import experts as rules
from heptad.config.schema import ModelSection
from heptad.errors import ConfigError, Problem

Role = Literal["matrix", "embedding", "head", "norm", "bias"]


@dataclass(frozen=True, slots=True)
class Init:
    """`normal`: value = normal(0, std) keyed by (seed, name, flat index); `constant`: value = std for every element."""

    kind: Literal["normal", "constant"]
    value: float


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """One parameter of the whole model, before any axis cuts it.

    dims: logical name of each dim, e.g. ("heads", "width"); dim 0 is the one an axis may cut (`cut.py`). role decides
    optimizer and decay. trainable False: no gradient, no optimizer state, no reduction. input_first: a weight stored
    (in, out), since it is its input features that are cut. stream: it acts on the residual stream, token by token.
    """

    name: str
    shape: tuple[int, ...]
    dims: tuple[str, ...]
    role: Role
    init: Init
    trainable: bool = True
    input_first: bool = False
    stream: bool = False

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class UnitSpec:
    """One unit of the step's program: `params` it owns and `borrowed` ones of other units it reads (a tied head).

    Reads-in-backward are those that the input gradient needs: a linear's weight yes, an embedding's table no.
    """

    name: str
    kind: Literal["embed", "block", "head", "custom"]
    segments: tuple[str, ...]
    params: tuple[str, ...]
    borrowed: tuple[str, ...] = ()
    backward_reads: tuple[str, ...] = ()


def pairs(length: int, window: int | None) -> int:
    """Pairs of tokens of one document that are less than `window` apart, both orders counted; None: all pairs.

    A causal mask leaves (pairs + length) / 2 of them.
    """
    beyond = max(length - window, 0) if window is not None else 0
    return length * length - beyond * (beyond + 1)


def complete(section: ModelSection) -> ModelSection:
    """`section` with kv_heads, head_dim, expert_width and router_group_limit filled and its sizes checked; a complete
    one comes back equal.

    Raises ConfigError naming every size that does not fit.
    """
    problems = list(rules.sizes(section))
    head_dim, kv_heads = section.head_dim, section.kv_heads or section.heads
    latent = section.attention_kind == "mla"
    if latent:
        head_dim = (section.qk_nope_head_dim or 0) + (section.qk_rope_head_dim or 0)
    if head_dim is None:
        head_dim = max(section.width // section.heads, 1)
        if section.width % section.heads:
            problems.append(
                Problem(
                    "model.heads",
                    section.heads,
                    f"must divide model.width = {section.width} when model.head_dim is not given",
                    "change one of them, or give model.head_dim",
                )
            )
    if section.heads % kv_heads:
        problems.append(
            Problem(
                "model.kv_heads",
                kv_heads,
                f"must divide model.heads = {section.heads}: each key/value head serves as many query heads",
                f"take one of {[n for n in range(1, section.heads + 1) if section.heads % n == 0]}",
            )
        )
    if section.positions == "rotary" and head_dim % 2 and not latent and not problems:
        problems.append(
            Problem(
                "model.head_dim",
                head_dim,
                "must be even with rotary positions: features turn in pairs",
                f"take {head_dim + 1}, or model.positions = 'learned'",
            )
        )
    if problems:
        raise ConfigError(*problems)
    filled: dict[str, object] = {"head_dim": head_dim, "kv_heads": kv_heads}
    if section.experts is not None:
        filled["expert_width"] = section.expert_width or section.mlp_width
        if section.router == "deepseek":
            filled["router_group_limit"] = section.router_group_limit or section.router_groups
    return section.model_copy(update=filled)


def param_specs(section: ModelSection) -> tuple[ParamSpec, ...]:
    """Every parameter of the decoder, a tied one once under its owner's name, in program order.

    Matrices and embeddings start from normal(0, init_std), those that write into the residual stream from
    init_std / sqrt(2·layers) (GPT-2's rule); norms at 1, biases at 0. Spreads never depend on how a parameter is cut.
    """
    section = complete(section)
    specs = _embed(section)
    for i in range(section.layers):
        specs += _block(section, f"blocks.{i}", rules.routes(section, i))
    specs += _norm(section, "head.norm", "width", section.width)
    if not section.tied:
        specs.append(_normal("head.out.weight", (section.vocab, section.width), ("vocab", "width"), "head", section))
    for depth in range(section.mtp_depth):
        specs += _prediction(section, f"head.predictions.{depth}")
    return tuple(replace(item, trainable=not _frozen(item.name, section)) for item in specs)


def unit_specs(section: ModelSection) -> tuple[UnitSpec, ...]:
    """The units of the decoder in program order, with what each reads again in its backward."""
    names = [item.name for item in param_specs(section)]
    units = [UnitSpec("embed", "embed", ("embed",), _of("embed", names))]
    for i in range(section.layers):
        params = _of(f"blocks.{i}", names)
        units.append(UnitSpec(f"blocks.{i}", "block", ("attention", "mlp"), params, (), _weights(params)))
    params, borrowed = _of("head", names), ("embed.tokens.weight",) if section.tied or section.mtp_depth else ()
    reads = _weights(params) + (borrowed if section.tied else ())
    units.append(UnitSpec("head", "head", ("head",), params, borrowed, reads))
    return tuple(units)


def _of(unit: str, names: list[str]) -> tuple[str, ...]:
    return tuple(name for name in names if name.startswith(f"{unit}."))


def _weights(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in names if name.endswith(".weight"))


def _frozen(name: str, section: ModelSection) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in section.frozen)


def _normal(
    name: str, shape: tuple[int, ...], dims: tuple[str, ...], role: Role, section: ModelSection, shrink: float = 1.0
) -> ParamSpec:
    return ParamSpec(name, shape, dims, role, Init("normal", section.init_std * shrink))


def _linear(
    section: ModelSection, name: str, out: tuple[str, int], into: tuple[str, int], bias: bool
) -> list[ParamSpec]:
    """Column-parallel: its output features are cut."""
    specs = [_normal(f"{name}.weight", (out[1], into[1]), (out[0], into[0]), "matrix", section)]
    return specs + (_bias(name, out) if bias else [])


def _stream_linear(
    section: ModelSection, name: str, out: tuple[str, int], into: tuple[str, int], bias: bool
) -> list[ParamSpec]:
    """Whole on every rank, for the tokens that the stream has there."""
    return [replace(spec, stream=True) for spec in _linear(section, name, out, into, bias)]


def _row_linear(
    section: ModelSection, name: str, out: tuple[str, int], into: tuple[str, int], bias: bool
) -> list[ParamSpec]:
    """Row-parallel: its input features are cut, so it is stored input first. It writes into the residual stream."""
    shrink = 1 / math.sqrt(2 * section.layers)
    weight = _normal(f"{name}.weight", (into[1], out[1]), (into[0], out[0]), "matrix", section, shrink)
    return [replace(weight, input_first=True)] + (_bias(name, out) if bias else [])


def _bias(name: str, out: tuple[str, int]) -> list[ParamSpec]:
    return [ParamSpec(f"{name}.bias", (out[1],), (out[0],), "bias", Init("constant", 0.0))]


def _norm(section: ModelSection, name: str, dim: str, size: int) -> list[ParamSpec]:
    stream = dim in ("width", "q_latent", "kv_latent")
    specs = [ParamSpec(f"{name}.weight", (size,), (dim,), "norm", Init("constant", 1.0), stream=stream)]
    if section.norm == "layer":
        specs.append(ParamSpec(f"{name}.bias", (size,), (dim,), "bias", Init("constant", 0.0), stream=stream))
    return specs


def _embed(section: ModelSection) -> list[ParamSpec]:
    width = section.width
    specs = [_normal("embed.tokens.weight", (section.vocab, width), ("vocab", "width"), "embedding", section)]
    if section.positions == "learned":
        shape = (section.max_positions, width)
        positions = _normal("embed.positions.weight", shape, ("positions", "width"), "embedding", section)
        specs.append(replace(positions, stream=True))
    return specs


def _block(section: ModelSection, name: str, routes: bool) -> list[ParamSpec]:
    attention = _latent if section.attention_kind == "mla" else _attention
    mlp = _experts if routes else _mlp
    return attention(section, f"{name}.attention") + mlp(section, f"{name}.mlp")


def _prediction(section: ModelSection, name: str) -> list[ParamSpec]:
    """One depth of multi-token prediction: two norms, what joins them, a block, the norm before the shared head."""
    width = ("width", section.width)
    specs = _norm(section, f"{name}.stream_norm", *width) + _norm(section, f"{name}.token_norm", *width)
    specs += _stream_linear(section, f"{name}.join", width, ("joined", 2 * section.width), bias=False)
    specs += _block(section, f"{name}.block", section.experts is not None)
    return specs + _norm(section, f"{name}.norm", *width)


def _latent(section: ModelSection, name: str) -> list[ParamSpec]:
    """Multi-head latent attention; what makes and normalises a latent is whole on every rank."""
    nope, rope, value = section.qk_nope_head_dim, section.qk_rope_head_dim, section.v_head_dim
    q_rank, kv_rank = section.q_lora_rank, section.kv_lora_rank
    assert nope is not None and rope is not None and value is not None and kv_rank is not None
    width, queries = ("width", section.width), ("heads", section.heads * (nope + rope))
    specs = _norm(section, f"{name}.norm", *width)
    if q_rank is None:
        specs += _linear(section, f"{name}.q", queries, width, section.qkv_bias)
    else:
        specs += _stream_linear(section, f"{name}.q_a", ("q_latent", q_rank), width, section.qkv_bias)
    specs += _stream_linear(section, f"{name}.kv_a", ("kv_latent", kv_rank + rope), width, section.qkv_bias)
    if q_rank is not None:
        specs += _norm(section, f"{name}.q_norm", "q_latent", q_rank)
        specs += _linear(section, f"{name}.q_b", queries, ("q_latent", q_rank), bias=False)
    specs += _norm(section, f"{name}.kv_norm", "kv_latent", kv_rank)
    out = ("heads", section.heads * (nope + value))
    specs += _linear(section, f"{name}.kv_b", out, ("kv_latent", kv_rank), bias=False)
    return specs + _row_linear(section, f"{name}.out", width, ("heads", section.heads * value), section.attention_bias)


def _attention(section: ModelSection, name: str) -> list[ParamSpec]:
    assert section.head_dim is not None and section.kv_heads is not None
    width, d = ("width", section.width), section.head_dim
    heads, kv_heads = ("heads", section.heads * d), ("kv_heads", section.kv_heads * d)
    specs = _norm(section, f"{name}.norm", *width)
    for part, out in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
        specs += _linear(section, f"{name}.{part}", out, width, section.qkv_bias)
    if section.qk_norm:
        specs += _norm(section, f"{name}.q_norm", "head_dim", d) + _norm(section, f"{name}.k_norm", "head_dim", d)
    return specs + _row_linear(section, f"{name}.out", width, heads, section.attention_bias)


def _mlp(section: ModelSection, name: str) -> list[ParamSpec]:
    return _norm(section, f"{name}.norm", "width", section.width) + _linears(section, name, section.mlp_width)


def _linears(section: ModelSection, name: str, inner_width: int) -> list[ParamSpec]:
    """An MLP without its norm."""
    width, inner, specs = ("width", section.width), ("mlp", inner_width), list[ParamSpec]()
    for part in ("gate", "up") if section.mlp == "gated" else ("up",):
        specs += _linear(section, f"{name}.{part}", inner, width, section.mlp_bias)
    return specs + _row_linear(section, f"{name}.down", width, inner, section.mlp_bias)


def _experts(section: ModelSection, name: str) -> list[ParamSpec]:
    """Norm, router, the routed experts' matrices stacked [E, ...], the shared experts as one MLP."""
    experts, inner = section.experts, section.expert_width
    assert experts is not None and inner is not None
    specs = _norm(section, f"{name}.norm", "width", section.width)
    specs += _linear(section, f"{name}.router.gate", ("experts", experts), ("width", section.width), bias=False)
    dims, shape = ("experts", "expert_mlp", "width"), (experts, inner, section.width)
    for part in ("gate", "up") if section.mlp == "gated" else ("up",):
        specs.append(_normal(f"{name}.experts.{part}.weight", shape, dims, "matrix", section))
    shrink = 1 / math.sqrt(2 * section.layers)
    down = _normal(f"{name}.experts.down.weight", shape, dims, "matrix", section, shrink)
    specs.append(replace(down, input_first=True))
    if section.shared_experts:
        specs += _linears(section, f"{name}.shared", section.shared_experts * inner)
    return specs
