"""From a job to a model that the executor and the data axis can drive: Heptad's decoder or a class of the user's own.

A model is built on the meta device (no memory); the data axis gives its parameters storage (`Model.bind`) and `init.py`
their values. A custom class is called with the `ModelSection` and has `units() -> list[nn.Module]` (the first is called
with (None, batch), the last returns the sum of token losses, those between map x to x) and, if the derived ones do not
fit, `param_specs()` and `unit_specs()`. A module may be listed twice: its parameters are shared.

Its nn.Linear, nn.Embedding, nn.LayerNorm and nn.RMSNorm become tapped ones in place. Any other parameter is loose: its
gradient finishes in I. So does that of a weight used by hand, as in `F.linear(x, self.table.weight)`: what a unit does
with its weights cannot be known, so autograd is asked for all of them, and its backward is said to read all of them
(`unit_specs()` can say less). A weight must be registered in each unit that uses it.

Read next: `taps.py`, `layers.py`, `decoder.py`, `examples/custom_model.py`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from heptad.config import pipedream
from heptad.config.effect import is_set
from heptad.config.schema import Job, ModelSection
from heptad.errors import ConfigError
from heptad.models import init, spec
from heptad.models.batch import Batch
from heptad.models.decoder import Block, Decoder, Embed, Head
from heptad.models.experts import Experts
from heptad.models.layers import Embedding, Linear
from heptad.models.norms import LayerNorm, RMSNorm
from heptad.models.parallel import RowLinear
from heptad.models.router import Gate, routers
from heptad.models.spec import Init, ParamSpec, UnitSpec

TAPPED = (Linear, RowLinear, Embedding, RMSNorm, LayerNorm, Gate, Experts)
TappedModule = Linear | RowLinear | Embedding | RMSNorm | LayerNorm | Gate | Experts


class Model:
    """A decoder or a custom model, seen alike. `params`: by owner's name, a tied one once, in the order of `specs`."""

    def __init__(
        self, module: nn.Module, units: list[nn.Module], specs: tuple[ParamSpec, ...], unit_specs: tuple[UnitSpec, ...]
    ) -> None:
        assert len(units) == len(unit_specs)
        self.module, self.units, self.specs, self.unit_specs = module, units, specs, unit_specs
        self.params = {item.name: module.get_parameter(item.name) for item in specs}

    def bind(self, params: dict[str, nn.Parameter]) -> None:
        """Replace parameters by these, wherever the model holds them; tied ones stay one object."""
        init.bind(self.module, params)
        self.params.update(params)

    def materialise(self, seed: int, device: torch.device, dtype: torch.dtype) -> None:
        """Memory and initial values for the whole model on one device."""
        self.params.update(init.materialise(self.module, self.specs, seed, device, dtype))
        self.place(device, dtype)

    def place(self, device: torch.device, dtype: torch.dtype) -> None:
        """Memory for what is state and no parameter: the biases of routers."""
        for router in routers(self.module).values():
            router.place(device, dtype)

    def loss(self, batch: Batch) -> Tensor:
        """The sum of the token losses of `batch`: all units in order, with ordinary autograd."""
        x: Tensor | None = None
        for unit in self.units:
            x = unit(x, batch)
        assert x is not None
        return x


def build(job: Job) -> Model:
    """The job's model on the meta device. Raises ConfigError for a class that cannot be used."""
    if job.model.class_ is None:
        module: nn.Module = Decoder(job.model, job.train.seed)
    else:
        with torch.device("meta"):
            module = _load(job.model.class_)(job.model)
    if isinstance(module, Decoder):
        module.head.loss_chunk = job.train.loss_chunk
        for router in routers(module).values():
            router.num_sequences = sequences_an_update(job)
    else:
        _check_own(job)
    return wrap(module, job.model)


def sequences_an_update(job: Job) -> int:
    """Sequences that one update of the parameters reads: over which the losses a sequence are averaged."""
    layout, train = job.layout, job.train
    if layout.pp > 1 and layout.schedule == pipedream.NAME:  # each micro-batch of all data ranks
        return layout.dp_replicate * layout.dp_shard * train.micro_batch
    return train.global_batch


def _check_own(job: Job) -> None:
    """What needs a decoder's inside: which linears to cut, what lies between units, a loss in parts."""
    base = "or a class that subclasses heptad.models.decoder.Decoder"
    if job.train.loss_chunk != "auto":
        rule = f"it would have no effect: {job.model.class_} computes its own loss"
        raise ConfigError.of("train.loss_chunk", job.train.loss_chunk, rule, "remove it")
    if job.model.window is not None:
        rule = f"it would have no effect: {job.model.class_} computes its own attention"
        raise ConfigError.of("model.window", job.model.window, rule, f"window in model.options, {base}")
    for name in ("attention_kind", "experts", "mtp_depth"):
        if is_set(job.model, name):
            rule = f"it would have no effect: {job.model.class_} has blocks of its own"
            raise ConfigError.of(f"model.{name}", getattr(job.model, name), rule, f"remove it, {base}")
    if job.layout.tp > 1:
        rule = f"of {job.model.class_} it is not known which linears to cut, and how"
        raise ConfigError.of("layout.tp", job.layout.tp, rule, f"tp = 1, {base}")
    if job.layout.cp > 1:
        rule = f"of {job.model.class_} it is not known where a token looks at others"
        raise ConfigError.of("layout.cp", job.layout.cp, rule, f"cp = 1, {base}")
    if job.layout.pp > 1:
        rule = f"of {job.model.class_} it is not known what passes from one unit to the next"
        raise ConfigError.of("layout.pp", job.layout.pp, rule, f"pp = 1, {base}")


def wrap(module: nn.Module, section: ModelSection) -> Model:
    """A custom module as a `Model`: linears tapped in place, specs its own or derived, `frozen` patterns applied.

    Values the module holds are not kept: initial ones come from its specs, so that every layout starts from the same.
    """
    if isinstance(module, Decoder):
        return Model(module, module.unit_list(), module.param_specs(), module.unit_specs())
    name = section.class_ or type(module).__name__
    if not callable(getattr(module, "units", None)):
        raise ConfigError.of("model.class", name, "must have units() -> list of modules", "list the model's blocks")
    for buffer, _ in module.named_buffers():
        fix = f"compute {buffer!r} in forward, or make it a parameter with requires_grad=False"
        raise ConfigError.of("model.class", name, "must hold no buffers: it is built without memory", fix)
    tap_linears(module)
    units: list[nn.Module] = list(module.units())  # type: ignore[operator]
    specs = _own(module, "param_specs") or specs_of(module, section.init_std)
    _check_specs(module, units, specs, name)
    specs = _frozen(specs, section.frozen)
    for item in specs:
        module.get_parameter(item.name).requires_grad_(item.trainable)
    return Model(module, units, specs, _own(module, "unit_specs") or unit_specs_of(module, units))


def _frozen(specs: tuple[ParamSpec, ...], patterns: tuple[str, ...]) -> tuple[ParamSpec, ...]:
    """`specs` with what a pattern names no longer trainable; each pattern names something, and something is left."""
    for pattern in patterns:
        if not any(fnmatchcase(item.name, pattern) for item in specs):
            fix = f"a name such as {specs[0].name!r}; * matches anything"
            raise ConfigError.of("model.frozen", pattern, "each pattern must match a parameter's name", fix)
    specs = tuple(
        replace(item, trainable=item.trainable and not any(fnmatchcase(item.name, pattern) for pattern in patterns))
        for item in specs
    )
    if not any(item.trainable for item in specs):
        raise ConfigError.of("model.frozen", list(patterns), "something is left to train", "freeze less")
    return specs


def _own(module: nn.Module, method: str) -> tuple[Any, ...]:
    found = getattr(module, method, None)
    return tuple(found()) if callable(found) else ()


def _load(path: str) -> Callable[[ModelSection], nn.Module]:
    """The class "pkg.mod:Name"."""
    package, _, name = path.partition(":")
    try:
        found = getattr(importlib.import_module(package), name)
    except (ImportError, AttributeError, ValueError) as error:
        fix = f"give an importable 'package.module:ClassName' ({error})"
        raise ConfigError.of("model.class", path, "must name a class that can be imported", fix) from error
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise ConfigError.of("model.class", path, "must be a subclass of torch.nn.Module", "name the model's class")
    return found


def _check_specs(module: nn.Module, units: list[nn.Module], specs: tuple[ParamSpec, ...], name: str) -> None:
    shapes = {key: tuple(param.shape) for key, param in module.named_parameters()}
    stated = {item.name: item.shape for item in specs}
    if shapes != stated:
        wrong = sorted(set(shapes.items()) ^ set(stated.items()))[0][0]
        rule = f"param_specs() must list every parameter with its shape; {wrong!r} differs"
        raise ConfigError.of("model.class", name, rule, f"the module has {shapes.get(wrong)}")
    used = {id(param) for unit in units for param in unit.parameters()}
    for key, param in module.named_parameters():
        if id(param) not in used:
            rule = f"every parameter must belong to a unit; {key!r} does not"
            raise ConfigError.of("model.class", name, rule, "register it in the module that uses it")


def tap_linears(module: nn.Module) -> None:
    """Turn plain torch layers into tapped ones in place; subclasses and variants with other rules stay loose."""
    for child in module.modules():
        if type(child) is nn.Linear:
            child.__class__ = Linear
        elif type(child) is nn.Embedding:
            special = child.padding_idx is not None or child.max_norm is not None
            if not (special or child.sparse or child.scale_grad_by_freq):
                child.__class__ = Embedding
        elif type(child) is nn.RMSNorm:
            if child.elementwise_affine and len(child.normalized_shape) == 1 and child.eps is not None:
                child.__class__ = RMSNorm
        elif type(child) is nn.LayerNorm and child.elementwise_affine and len(child.normalized_shape) == 1:
            child.__class__ = LayerNorm


def tapped_modules(unit: nn.Module) -> list[TappedModule]:
    """The modules of `unit` that take a tape, each once."""
    return [module for module in unit.modules() if isinstance(module, TAPPED)]


def loose_params(unit: nn.Module) -> list[nn.Parameter]:
    """Trainable parameters whose gradients autograd must be asked for in I, each once; unused ones give None.

    None of the decoder's: its weights are only used through taps. All of a custom unit's (see the module's docstring):
    one that is only used through taps has no path to its leaf, so asking costs nothing and never counts twice.
    """
    if isinstance(unit, Embed | Block | Head):
        return []
    return [param for param in unit.parameters() if param.requires_grad]


def specs_of(module: nn.Module, std: float = 0.02) -> tuple[ParamSpec, ...]:
    """ParamSpecs of a custom module: norms' weights start at 1, biases at 0, all else from normal(0, std).

    A parameter's role follows from the module that owns it; its dims have no names an axis would cut.
    """
    owners = {id(param): child for child in module.modules() for param in child.parameters(recurse=False)}
    return tuple(_spec(name, param, owners[id(param)], std) for name, param in module.named_parameters())


def _spec(name: str, param: nn.Parameter, owner: nn.Module, std: float) -> ParamSpec:
    role: spec.Role = "matrix"
    start = Init("normal", std)
    if isinstance(owner, nn.Embedding):
        role = "embedding"
    elif name.rpartition(".")[2] == "bias":
        role, start = "bias", Init("constant", 0.0)
    elif isinstance(owner, nn.LayerNorm | nn.RMSNorm | nn.GroupNorm):
        role, start = "norm", Init("constant", 1.0)
    elif param.dim() < 2:
        role = "bias"
    elif isinstance(owner, Linear) and owner.role == "head":
        role = "head"
    dims = tuple(f"dim{i}" for i in range(param.dim()))
    return ParamSpec(name, tuple(param.shape), dims, role, start, param.requires_grad)


def unit_specs_of(module: nn.Module, units: list[nn.Module]) -> tuple[UnitSpec, ...]:
    """UnitSpecs of a custom module: the first unit that holds a parameter owns it, later ones borrow it.

    Its backward reads all it holds (see the module's docstring).
    """
    param_names = {id(param): name for name, param in module.named_parameters()}
    module_names = {id(child): name for name, child in module.named_modules()}
    seen: dict[str, int] = {}
    owned: set[str] = set()
    result = []
    for unit in units:
        name = module_names.get(id(unit)) or type(unit).__name__
        seen[name] = seen.get(name, 0) + 1
        label = name if seen[name] == 1 else f"{name}#{seen[name]}"
        here = tuple(dict.fromkeys(param_names[id(param)] for param in unit.parameters()))
        params, borrowed = tuple(n for n in here if n not in owned), tuple(n for n in here if n in owned)
        owned.update(here)
        result.append(UnitSpec(label, "custom", ("forward",), params, borrowed, here))
    return tuple(result)
