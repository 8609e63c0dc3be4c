"""The machines a job runs on: peaks, memory and links, each number with its source.

A preset and a measured cluster file have one form (`config/presets/clusters/*.toml`), so a user copies a preset and
corrects it. A figure that nobody published (a CPU's peak, loopback) is absent, never guessed: what needs it says so.
Bandwidths are one direction of one device. Read next: `config/presets.py` (the files), `mesh/layout.py` (what crosses).
"""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import Field, ValidationError

from heptad.config.presets import cluster_table
from heptad.config.schema import ClusterSection, Section
from heptad.errors import ConfigError, Problem


class Device(Section):
    """One kind of device as data sheets or a measurement give it; None: not known."""

    name: str
    devices_per_node: int | None = Field(default=None, ge=1)
    memory_bytes: int | None = Field(default=None, ge=1)
    peak_flops_per_s: dict[str, float] = Field(default={})
    intra_node_bytes_per_s: float | None = Field(default=None, gt=0)
    inter_node_bytes_per_s: float | None = Field(default=None, gt=0)
    sources: dict[str, str] = Field(default={})

    def peak(self, dtype: str) -> float | None:
        """Dense peak of matrix products in `dtype` ("bf16", "fp8", "fp32"), FLOP/s of one device."""
        return self.peak_flops_per_s.get(dtype)


@dataclass(frozen=True, slots=True)
class Cluster:
    """`nodes` machines with `devices_per_node` devices each (None: as many as the layout has ranks)."""

    device: Device
    nodes: int
    devices_per_node: int | None

    @property
    def world(self) -> int | None:
        """Number of devices, None when it follows from the layout."""
        return None if self.devices_per_node is None else self.nodes * self.devices_per_node

    def bandwidth_bytes_per_s(self, crosses_nodes: bool) -> float | None:
        """Bytes a second that one device sends, inside a node or across nodes."""
        return self.device.inter_node_bytes_per_s if crosses_nodes else self.device.intra_node_bytes_per_s


def cluster(section: ClusterSection) -> Cluster:
    """The cluster of [cluster]: its preset or file, this machine's CPUs when it names neither.

    ConfigError for an unknown preset (with the nearest) and for a file that lacks a field or has a wrong one.
    """
    table = cluster_table(section)
    try:
        device = Device.model_validate(table)
    except ValidationError as error:
        found = section.file or section.preset
        raise ConfigError(
            *(
                Problem(f"{found}: {'.'.join(map(str, item['loc']))}", item["input"], item["msg"], "correct the file")
                for item in error.errors(include_url=False)
            )
        ) from None
    return Cluster(device, section.nodes, section.devices_per_node or device.devices_per_node)
