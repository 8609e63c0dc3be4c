"""Forked gloo ranks for benchmarks: on this machine's loopback, or spread over the nodes of a `Netbox`.

`heptad.launch.forked` does the work (0.1 s for 4 ranks, one thread each); here each rank first enters its node. The
parent must have run no torch operation on several threads and has no process group. Read next: `measure.py`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

from benchmarks.netbox import Netbox

from heptad.launch.forked import forked
from heptad.launch.ranks import keep_freed_memory


def launch(
    num_ranks: int,
    fn: Callable[..., Any],
    *args: Any,
    box: Netbox | None = None,
    timeout_s: float = 300.0,
    first: bool = False,
) -> list[Any]:
    """`fn(rank, *args)` on `num_ranks` ranks, in rank order; `box`: an equal share of the ranks on each of its nodes.

    first: before other processes where the system allows it (root), for ranks that mostly sleep and must wake on time.
    Raises RankFailed with the traceback of the first rank that failed; leaves no process behind.
    """

    def prepare(rank: int) -> None:
        if first:
            _wake_on_time()
        keep_freed_memory()  # as `heptad train` does; every contender of a process has it
        interface = "lo"
        if box is not None:
            node = rank * box.nodes // num_ranks
            box.enter(node)
            interface = box.interface(node)
        os.environ["GLOO_SOCKET_IFNAME"] = interface  # gloo's own way of being told

    return forked(num_ranks, fn, *args, timeout_s=timeout_s, prepare=prepare)


def _wake_on_time() -> None:
    """Real-time priority for this process and the threads it will start; without the right to it, nothing."""
    with contextlib.suppress(PermissionError, AttributeError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
