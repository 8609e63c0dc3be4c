"""Presets: every one loads and passes the check, published sizes are right, unknown names are refused."""

from __future__ import annotations

import pytest
from tests.published import PUBLISHED

from heptad.config.check import problems
from heptad.config.load import load
from heptad.config.presets import expand, job_presets, model_preset, model_presets
from heptad.config.schema import ModelSection
from heptad.errors import ConfigError
from heptad.models.spec import param_specs


@pytest.mark.parametrize("name", sorted(job_presets()))
def test_every_job_preset_loads_and_breaks_no_rule(name: str) -> None:
    assert problems(load(name)) == []


def test_default_and_debug_are_what_the_documents_say() -> None:
    default, debug = load("default"), load("debug")
    assert (default.layout.dp_shard, default.layout.pp, default.cluster.preset) == (2, 2, "cpu")
    model = expand(debug.model)
    assert (model.layers, model.heads, model.kv_heads, model.vocab % 2) == (8, 8, 4, 1)
    assert (debug.train.global_batch, debug.train.micro_batch, debug.cluster.preset) == (24, 1, "cpu")


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_published_totals(name: str) -> None:
    section = expand(ModelSection(preset=name))
    assert sum(spec.numel for spec in param_specs(section)) == PUBLISHED[name]


def test_every_published_preset_is_checked() -> None:
    assert {name for name in model_presets() if not name.startswith("debug")} == set(PUBLISHED)


def test_what_is_given_stands_over_the_preset() -> None:
    section = expand(ModelSection(preset="gpt2-small", layers=3))
    assert (section.layers, section.width, section.tied, section.preset) == (3, 768, True, "gpt2-small")
    assert expand(section) == section


def test_an_unknown_model_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'llama3-405b'"):
        model_preset("llama-405b")
