"""The job files of configs/: each loads, passes every rule and resolves to the sizes its first line states."""

from __future__ import annotations

from pathlib import Path

import pytest

from heptad.config.check import check
from heptad.config.load import load
from heptad.mesh.layout import Layout
from heptad.models.resolve import derived, resolve

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
EXPECTED = {
    "gpt2-small": dict(parameters=124_439_808, data_ranks=8, micro_batches=4, tokens_per_step=524_288),
    "llama3-8b": dict(parameters=8_030_261_248, data_ranks=32, micro_batches=16, tokens_per_step=4_194_304),
}


def test_every_config_has_expectations() -> None:
    assert sorted(path.stem for path in CONFIGS.glob("*.toml")) == sorted(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_a_config_is_a_job_that_can_run(name: str) -> None:
    job = load(str(CONFIGS / f"{name}.toml"))
    check(job)
    job = resolve(job)
    assert EXPECTED[name].items() <= derived(job).items()
    assert Layout.of(job.layout).world == EXPECTED[name]["data_ranks"]


def test_hsdp_keeps_the_shards_of_llama3_8b_inside_a_node() -> None:
    layout = Layout.of(load(str(CONFIGS / "llama3-8b.toml")).layout)
    assert not layout.crosses_nodes(("dp_shard",), 8)
    assert layout.crosses_nodes(("dp_replicate",), 8)
