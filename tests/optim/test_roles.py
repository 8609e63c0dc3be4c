"""Which optimizer and which decay, and settings that could have no effect."""

from __future__ import annotations

import pytest
from tests.optim.fixtures import section, specs

from heptad.config.optimizer import problems
from heptad.optim.cost import state_bytes
from heptad.optim.roles import describe, kind_of


def test_muon_takes_matrices_and_adamw_the_rest() -> None:
    kinds = {spec.name: kind_of(section(name="muon"), spec) for spec in specs()}
    assert {name for name, kind in kinds.items() if kind == "muon"} == {"q.weight", "up.weight", "down.weight"}
    assert {kind for name, kind in kinds.items() if kinds[name] != "muon"} == {"adamw"}
    mixed = section(name="sgd", roles={"head": "adamw", "matrix": "muon"}, momentum=0.5)
    assert [kind_of(mixed, spec) for spec in specs()] == ["sgd", "muon", "sgd", "sgd", "muon", "muon", "adamw"]


def test_c_053_groups_are_printed() -> None:
    assert describe(section(name="muon"), specs()) == [
        "adamw, lr 0.0003, decay 0: bias, norm (2 tensors, 18 elements)",
        "adamw, lr 0.0003, decay 0.1: embedding, head (2 tensors, 182 elements)",
        "muon, lr 0.02, decay 0.1: matrix (3 tensors, 171 elements)",
    ]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"momentum": 0.9}, "optimizer.momentum"),
        ({"muon_lr": 0.1}, "optimizer.muon_lr"),
        ({"muon_momentum": 0.9}, "optimizer.muon_momentum"),
        ({"name": "sgd", "betas": [0.8, 0.9]}, "optimizer.betas"),
        ({"name": "sgd", "eps": 1e-6}, "optimizer.eps"),
        ({"schedule": "constant", "decay_steps": 3}, "optimizer.decay_steps"),
        ({"schedule": "constant", "min_lr_ratio": 0.3}, "optimizer.min_lr_ratio"),
        ({"roles": {"norm": "muon"}}, "optimizer.roles.norm"),
        ({"warmup_steps": 5, "decay_steps": 6}, "optimizer.decay_steps"),
        ({"decay_roles": []}, "optimizer.weight_decay"),
    ],
)
def test_c_120_an_option_without_effect_is_refused(options: dict[str, object], field: str) -> None:
    if "betas" in options:
        options = options | {"betas": (0.8, 0.9)}
    if "decay_roles" in options:
        options = options | {"decay_roles": ()}
    assert [problem.field for problem in problems(section(**options), 10)] == [field]


def test_defaults_are_accepted() -> None:
    for name in ("adamw", "sgd", "muon"):
        assert list(problems(section(name=name), 10)) == []


def test_state_bytes() -> None:
    assert state_bytes(section(), specs(), 4) == 2 * 4 * (182 + 18 + 171)
    assert state_bytes(section(name="muon"), specs(), 4) == 4 * (2 * (182 + 18) + 171)
    assert state_bytes(section(name="sgd"), specs(), 4) == 0
    assert state_bytes(section(name="sgd", momentum=0.9), specs(), 4) == 4 * (182 + 18 + 171)
