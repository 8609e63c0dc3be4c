"""Parameters counted: in all, by role, and those that multiply. Never imports torch. Read next: `flops.py`.

"Multiply" are the entries of matrices that every token is multiplied by: all linears and the head (a tied table counts
as the head), not the lookups, norms and biases. Llama 3 405B: 405,853,388,800 in all, 403.75 B multiply.

Of routed experts a token meets K of E: "active" are a model's parameters less the E - K that it does not meet, the
lookup included and without multi-token prediction, as DeepSeek-V3's 37.55 of 671.03 B are counted. What multiplies is
counted as a training step does it: active experts only, and for each depth of multi-token prediction its own matrices
and the head once more.
"""

from __future__ import annotations

from collections.abc import Iterable

from heptad.config.schema import ModelSection
from heptad.models.spec import ParamSpec, Role, param_specs

PREDICTIONS = "head.predictions."
"""What names of multi-token prediction's parameters begin with."""


def total(specs: Iterable[ParamSpec], trainable_only: bool = False) -> int:
    """Number of parameters, a tied one once."""
    return sum(item.numel for item in specs if item.trainable or not trainable_only)


def by_role(specs: Iterable[ParamSpec]) -> dict[Role, int]:
    """Number of parameters of each role that occurs, in order of appearance."""
    counts: dict[Role, int] = {}
    for item in specs:
        counts[item.role] = counts.get(item.role, 0) + item.numel
    return counts


def multiplying(section: ModelSection) -> int:
    """Number of the decoder's parameters that multiply each token (see the module's docstring)."""
    specs = param_specs(section)
    head = section.vocab * section.width * (1 + section.mtp_depth)
    return by_role(specs)["matrix"] - _idle(section, specs) + head


def main(section: ModelSection) -> tuple[ParamSpec, ...]:
    """The model without multi-token prediction."""
    return tuple(item for item in param_specs(section) if not item.name.startswith(PREDICTIONS))


def active(section: ModelSection) -> int:
    """Number of the main model's parameters that a token meets."""
    specs = main(section)
    return total(specs) - _idle(section, specs)


def _idle(section: ModelSection, specs: Iterable[ParamSpec]) -> int:
    """Parameters of routed experts that a token does not go to."""
    if section.experts is None:
        return 0
    stacked = sum(item.numel for item in specs if item.dims[0] == "experts" and len(item.dims) == 3)
    return stacked // section.experts * (section.experts - section.experts_per_token)
