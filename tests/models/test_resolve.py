"""What only the resolved model can tell: frozen patterns and roles that no parameter has."""

from __future__ import annotations

import pytest

from heptad.config.load import load
from heptad.errors import ConfigError
from heptad.models.resolve import resolve


@pytest.mark.parametrize(
    ("field", "sets"),
    [
        ("model.frozen", ["model.frozen=['embed.token.weight']"]),
        ("model.frozen", ["model.frozen=['*']"]),
        ("optimizer.roles.bias", ["optimizer.roles.bias=sgd"]),
        ("optimizer.roles.head", ["optimizer.roles.head=sgd", "model.tied=true"]),
        ("optimizer.roles.embedding", ["optimizer.roles.embedding=sgd", "model.frozen=['embed.*']"]),
        ("optimizer.decay_roles", ["optimizer.decay_roles=['bias']"]),
    ],
)
def test_c_120_what_no_parameter_has_is_refused(field: str, sets: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        resolve(load("debug", sets))
    assert [problem.field for problem in refused.value.problems] == [field]


@pytest.mark.parametrize(
    "sets",
    [
        ["model.frozen=['embed.*', 'blocks.*']", "optimizer.roles.head=sgd"],
        ["model.frozen=['embed.*', 'blocks.*', 'head.out.*']"],
        ["model.mlp_bias=true", "optimizer.decay_roles=['bias']", "optimizer.roles.bias=sgd"],
    ],
)
def test_what_some_parameter_has_passes(sets: list[str]) -> None:
    assert resolve(load("debug", sets)).model.layers == 8
