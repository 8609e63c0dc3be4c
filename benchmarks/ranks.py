"""Forked gloo ranks for benchmarks: on this machine's loopback, or spread over the nodes of a `Netbox`.

Like `heptad.launch.forked` (0.1 s for 4 ranks), and each child first enters its node. The parent must have run no
torch operation on several threads and has no process group. Every rank has one thread. Read next: `measure.py`.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.netbox import Netbox

from heptad.launch.ranks import keep_freed_memory


def launch(
    num_ranks: int, fn: Callable[..., Any], *args: Any, box: Netbox | None = None, timeout_s: float = 300.0
) -> list[Any]:
    """`fn(rank, *args)` on `num_ranks` ranks, in rank order; `box`: an equal share of the ranks on each of its nodes.

    Raises RuntimeError with the traceback of the first rank found to have failed; leaves no process behind.
    """
    context = mp.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(num_ranks)]
        ranks = [
            context.Process(target=_rank, args=(rank, num_ranks, f"{folder}/store", pipes[rank][1], box, fn, args))
            for rank in range(num_ranks)
        ]
        try:
            for process in ranks:
                process.start()
            for _, writer in pipes:
                writer.close()
            return _collect([reader for reader, _ in pipes], timeout_s)
        finally:
            for process in ranks:
                process.kill()
                process.join()


def _collect(readers: list[Connection], timeout_s: float) -> list[Any]:
    deadline, results = time.monotonic() + timeout_s, {}
    while len(results) < len(readers):
        for rank, reader in enumerate(readers):
            if rank not in results and reader.poll(0.05):
                fine, value = pickle.loads(reader.recv_bytes())
                if not fine:
                    raise RuntimeError(f"rank {rank}:\n{value}")
                results[rank] = value
        if time.monotonic() > deadline:
            late = sorted(set(range(len(readers))) - set(results))
            raise RuntimeError(f"ranks {late} were still running after {timeout_s} s")
    return [results[rank] for rank in range(len(readers))]


def _rank(
    rank: int, world: int, store: str, pipe: Connection, box: Netbox | None, fn: Callable[..., Any], args: Any
) -> None:
    torch.set_num_threads(1)
    keep_freed_memory()  # as `heptad train` does; every contender of a process has it
    try:
        interface = "lo"
        if box is not None:
            node = rank * box.nodes // world
            box.enter(node)
            interface = box.interface(node)
        os.environ["GLOO_SOCKET_IFNAME"] = interface  # gloo's own way of being told
        dist.init_process_group(
            "gloo", store=dist.FileStore(store, world), rank=rank, world_size=world, timeout=timedelta(seconds=120)
        )
        report = (True, fn(rank, *args))
        dist.barrier()
    except BaseException:
        report = (False, traceback.format_exc())
    pipe.send_bytes(pickle.dumps(report))
    pipe.close()
    os._exit(0)  # skips the teardown of process groups
