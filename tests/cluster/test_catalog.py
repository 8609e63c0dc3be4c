"""The device catalogue: figures as published, a source for each, unknown names and broken files refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from heptad.cluster.catalog import cluster
from heptad.config.presets import cluster_presets
from heptad.config.schema import ClusterSection
from heptad.errors import ConfigError

PEAKS = {"a100": 312e12, "h100": 989e12, "h200": 989e12, "h800": 989e12, "b200": 2250e12}
LINKS = {
    "a100": (300e9, 25e9),
    "h100": (450e9, 50e9),
    "h200": (450e9, 50e9),
    "h800": (200e9, 50e9),
    "b200": (900e9, 50e9),
}


@pytest.mark.parametrize("name", sorted(PEAKS))
def test_peaks_and_links(name: str) -> None:
    found = cluster(ClusterSection(preset=name, nodes=3))
    assert found.device.peak("bf16") == PEAKS[name]
    assert found.device.peak("fp8") == (None if name == "a100" else 2 * PEAKS[name])
    assert (found.bandwidth_bytes_per_s(False), found.bandwidth_bytes_per_s(True)) == LINKS[name]
    assert (found.devices_per_node, found.world) == (8, 24)


@pytest.mark.parametrize("name", sorted(cluster_presets()))
def test_each_number_has_a_source(name: str) -> None:
    device = cluster(ClusterSection(preset=name)).device
    numbers = {key for key, value in device.model_dump().items() if value and key not in ("name", "sources")}
    assert numbers == set(device.sources)
    assert all(len(source) > 10 for source in device.sources.values())


def test_a_cpu_has_no_published_figures_and_follows_the_layout() -> None:
    found = cluster(ClusterSection(nodes=2))
    assert found.device.name == "cpu" and found.device.peak("bf16") is None and found.world is None
    assert cluster(ClusterSection(preset="cpu", devices_per_node=5, nodes=3)).world == 15


def test_an_unknown_preset_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'h100'"):
        cluster(ClusterSection(preset="h10"))


def test_a_measured_file_has_the_presets_form(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('name = "mine"\ninter_node_bytes_per_s = 25e6\n[peak_flops_per_s]\nfp32 = 1e11\n')
    found = cluster(ClusterSection(file=str(path)))
    assert found.device.peak("fp32") == 1e11 and found.bandwidth_bytes_per_s(True) == 25e6
    path.write_text('name = "mine"\nintra_node_bytes_per_s = -1\nmemory = 3\n')
    with pytest.raises(ConfigError) as error:
        cluster(ClusterSection(file=str(path)))
    assert len(error.value.problems) == 2
    path.write_text("name = ")
    with pytest.raises(ConfigError, match=r"cluster\.file"):
        cluster(ClusterSection(file=str(path)))
