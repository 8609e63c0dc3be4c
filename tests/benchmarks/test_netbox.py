"""A cluster in a box counts what crosses its links, and leaves nothing behind. Where none can be made, that is what is
shown.
"""

from __future__ import annotations

import subprocess

import pytest
import torch
from benchmarks.netbox import Netbox, NoNetbox
from benchmarks.ranks import launch


def _exchange(rank: int) -> float:
    value = torch.full((250_000,), float(rank + 1))
    torch.distributed.all_reduce(value)
    return float(value[0])


def test_two_nodes_exchange_over_counted_links_and_all_is_removed() -> None:
    box = Netbox(2, "1gbit")
    try:
        with box:
            assert launch(2, _exchange, box=box) == [3.0, 3.0]
            box.run(1, ["true"])
            with pytest.raises(RuntimeError, match="ended with 1"):
                box.run(1, ["false"])
            assert all(1e6 < sent < 1.1e6 for sent in box.sent_bytes())  # 2 (N-1)/N · S and headers
    except NoNetbox as problem:
        assert str(problem)  # no root, no iproute2, or a sandbox without namespaces: said, not crashed into
        return
    assert box.namespace(0) not in subprocess.run(["ip", "netns"], capture_output=True, text=True).stdout
