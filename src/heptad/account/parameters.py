"""Parameters counted: in all, by role, and those that multiply. Never imports torch. Read next: `flops.py`.

"Multiply" are the entries of matrices that every token is multiplied by: all linears and the head (a tied table counts
as the head), not the lookups, norms and biases. Llama 3 405B: 405,853,388,800 in all, 403.75 B multiply.
"""

from __future__ import annotations

from collections.abc import Iterable

from heptad.config.schema import ModelSection
from heptad.models.spec import ParamSpec, Role, param_specs


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
    counts = by_role(param_specs(section))
    head = section.vocab * section.width if section.tied else counts["head"]
    return counts["matrix"] + head
