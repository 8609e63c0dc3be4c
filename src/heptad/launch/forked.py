"""Forked gloo ranks on this machine: what `verify` and the tests run on.

Four ranks start in 0.14 s (spawned ones in over 10 s on two cores). The parent must not have a process group of its
own: children of such a parent hang when they end. Every rank gets one thread. The first rank that fails ends all of
them.
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
from multiprocessing.connection import Connection, wait
from typing import Any, cast

import torch
import torch.distributed as dist


class RankFailed(RuntimeError):
    """`rank` raised (its traceback is the message), died, or was still running at the time limit."""

    def __init__(self, rank: int, report: str) -> None:
        super().__init__(f"rank {rank} failed:\n{report}")
        self.rank = rank


def forked(
    num_ranks: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout_s: float = 60.0,
    prepare: Callable[[int], None] = lambda rank: None,
) -> list[Any]:
    """Run `fn(rank, *args)` on `num_ranks` forked gloo ranks; returns their results in rank order.

    prepare: called with the rank in each new process, before it meets the others. Raises RankFailed for the first rank
    that raises or dies, or for the slowest after `timeout_s`; no process is left.
    """
    assert not dist.is_initialized(), "the parent of forked ranks must not have a process group"
    context = mp.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(num_ranks)]
        ranks = [
            context.Process(
                target=_rank, args=(rank, num_ranks, f"{folder}/store", pipes[rank][1], timeout_s, prepare, fn, args)
            )
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
    results: dict[int, Any] = {}
    deadline = time.monotonic() + timeout_s
    while len(results) < len(readers):
        open_readers = [reader for rank, reader in enumerate(readers) if rank not in results]
        ready = cast(list[Connection], wait(open_readers, timeout=max(0.0, deadline - time.monotonic())))
        if not ready:
            raise RankFailed(readers.index(open_readers[0]), f"still running after {timeout_s} s")
        failures = []
        for reader in ready:
            rank = readers.index(reader)
            try:
                fine, when, value = pickle.loads(reader.recv_bytes())
            except EOFError:
                raise RankFailed(rank, "the process died without a report") from None
            if fine:
                results[rank] = value
            else:
                failures.append((when, rank, value))
        if failures:
            _, rank, report = min(failures)
            raise RankFailed(rank, report)
    return [results[rank] for rank in range(len(readers))]


def _rank(
    rank: int,
    world: int,
    store: str,
    pipe: Connection,
    timeout_s: float,
    prepare: Callable[[int], None],
    fn: Callable[..., Any],
    args: Any,
) -> None:
    torch.set_num_threads(1)
    try:
        prepare(rank)
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store, world),
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=timeout_s),
        )
        report: tuple[bool, float, Any] = (True, time.monotonic(), fn(rank, *args))
        dist.barrier()
    except BaseException:
        report = (False, time.monotonic(), traceback.format_exc())
    pipe.send_bytes(pickle.dumps(report))  # by value: torch's own way shares memory that dies with this process
    pipe.close()
    os._exit(0)  # skips teardown of process groups and of what the parent had registered at exit
