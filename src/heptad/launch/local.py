"""`heptad train`: as many ranks as the layout has, on this machine, started by torch's elastic launcher.

Under torchrun (RANK is set) this process is one rank of a job that others started; a layout of one rank runs right
here; else this process becomes the launcher. The rendezvous listens on a port that the system picks and the listener
keeps, so two jobs never meet (C-097). Ranks are forked: torch is loaded once, 4 ranks start in 0.15 s (spawned: over
10 s on two cores), and the launcher never creates a process group; where CUDA is used they are spawned, as CUDA cannot
be forked. A failing rank ends the job within seconds and is named once, first (C-098): `failure.py`, `watch.py`.

Exit codes: 0 trained, 1 a rank failed, 2 a bad job, 128 + signal when stopped. The program of a rank is given by name
("heptad.train.main:run_rank"), as spawned ranks need it, and since `launch` stands left of `train`.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from heptad.config.schema import Job
from heptad.errors import ConfigError
from heptad.launch import failure
from heptad.launch.environ import SPEAKS_AFTER_S, RankInfo, check_compiler, check_world, rank_info
from heptad.launch.watch import STOPPED, Guard, Watch, enter
from heptad.mesh.layout import Layout

ENTRY = "heptad.train.main:run_rank"
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_STOP_TIMEOUT_S = 600  # a stopping rank ends its step and saves; a second Ctrl-C ends all at once


def train(job: Job, as_json: bool, ledger: bool, trace: bool, *, entry: str = ENTRY, port: int = 0) -> int:
    """Train `job` and return the exit code. Messages go to stderr; with `as_json` rank 0's result is printed to stdout.

    entry: "module:function", called as function(job, info, as_json, ledger, trace) -> dict on every rank.
    port: where the local ranks meet; 0 takes a free one.
    """
    info = RankInfo(0, 1, 0, 1, launched=False)
    try:
        info = rank_info()
        world = Layout.of(job.layout).world
        if info.launched:
            check_world(info, world)
        if _on_cpu(job):
            check_compiler(job)
        call = (entry, job, as_json, ledger, trace)
        return _here(info, call) if info.launched or world == 1 else _ranks(world, call, port)
    except ConfigError as error:
        if info.rank:
            time.sleep(SPEAKS_AFTER_S)
        _say(str(error))
        return 2


def _on_cpu(job: Job) -> bool:
    return job.cluster.preset == "cpu" or not torch.cuda.is_available()


def _run(info: RankInfo, call: tuple[Any, ...]) -> Any:
    entry, job, *flags = call
    module, _, function = entry.partition(":")
    return getattr(importlib.import_module(module), function)(job, info, *flags)


def _here(info: RankInfo, call: tuple[Any, ...]) -> int:
    """Run one rank in this process."""
    try:
        with _terminable() if not info.launched else _as_default():
            result = _run(info, call)
    except ConfigError:
        raise
    except (KeyboardInterrupt, _Terminated) as stop:
        number = stop.number if isinstance(stop, _Terminated) else signal.SIGINT
        return _stop(number, info.diary) if info.rank == 0 else 128 + number
    except BaseException as error:
        failed = failure.of_exception(info.rank, error, info.diary.step)
        if failed.consequence and info.launched:
            time.sleep(SPEAKS_AFTER_S)  # by then torchrun has ended this rank, and the cause stands alone
        _say(failure.block([failed], info.world))
        if info.launched:
            _leave(1)  # tearing down the group would wait for the other ranks
        return 1
    if info.rank == 0:
        _print(result, call[2])
    return 0


def _ranks(world: int, call: tuple[Any, ...], port: int) -> int:
    """Start `world` local ranks and see them through."""
    if port and _taken(port):
        _say(f"port {port} is in use on this machine: choose another, or give none and a free one is taken")
        return 2
    folder = Path(tempfile.mkdtemp(prefix="heptad-"))
    guard = Guard(folder)
    watch = Watch(folder, world)
    try:
        with _as_they_were(), watch.watching():
            results = _launch(world, call, port, folder, guard)
    except (KeyboardInterrupt, SignalException) as stop:
        number = stop.sigval if isinstance(stop, SignalException) else signal.SIGINT
        return _stop(number, failure.Diary.read(folder / "diary-0"))
    except ChildFailedError as error:
        deaths = failure.known(watch.deaths, {rank: child.exitcode for rank, child in error.failures.items()})
        if all(status == STOPPED for _, status in deaths.values()):
            return _stop(signal.SIGINT, failure.Diary.read(folder / "diary-0"))
        failures = failure.collect(folder, deaths)
        _say(failure.block(failures, world))
        return 2 if failures[0].bad_job else 1
    finally:
        guard.finish()
    _print(json.loads(results[0]), call[2])
    return 0


def _launch(world: int, call: tuple[Any, ...], port: int, folder: Path, guard: Guard) -> dict[int, str]:
    fork = _on_cpu(call[1])
    if fork:
        importlib.import_module(call[0].partition(":")[0])  # once, here, not once a rank
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=world,
        run_id=folder.name,
        max_restarts=0,
        rdzv_backend="c10d",
        rdzv_endpoint=f"localhost:{port}",
        rdzv_configs={"is_host": True},
        local_addr="localhost",
        start_method="fork" if fork else "spawn",
        logs_specs=DefaultLogsSpecs(log_dir=str(folder / "elastic")),
        shutdown_timeout=_STOP_TIMEOUT_S,
    )
    return elastic_launch(config, _rank)(str(folder), guard.pipe if fork else None, call)


def _rank(folder: str, guard: int | None, call: tuple[Any, ...]) -> str:
    """A rank's whole life in its own process; the result as JSON."""
    info = rank_info()
    enter(Path(folder), info.rank, guard)
    info = replace(info, diary=failure.Diary(Path(folder) / f"diary-{info.rank}"))
    try:
        torch.set_num_threads(1)  # ranks share the cores, and a forked process has no thread pool to share
        result = _run(info, call)
        sys.stdout.flush()
        return json.dumps(result) if info.rank == 0 else ""
    except KeyboardInterrupt:
        _leave(STOPPED)  # a stop that was asked for, after the step under way
    except BaseException as error:
        failure.leave(Path(folder), failure.of_exception(info.rank, error, info.diary.step))
        _leave(1)


class _Terminated(BaseException):
    """A signal asked this process to end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    raise _Terminated(number)


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM raises `_Terminated` meanwhile (in a main thread: others cannot set handlers)."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _as_default() -> Iterator[None]:
    """Signals end this process at once: a Python handler would wait for the collective that the rank is stuck in."""
    main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, signal.SIG_DFL) for number in SIGNALS[:2]} if main else {}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _as_they_were() -> Iterator[None]:
    """Elastic's log lines kept from the user, who gets one block of ours; its signal handlers taken back afterwards."""
    main = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    names = ("torch.distributed.elastic", "torch.distributed.launcher", "torch.multiprocessing")
    loggers = [logging.getLogger(name) for name in list(logging.root.manager.loggerDict) if name.startswith(names)]
    disabled = [logger.disabled for logger in loggers]
    try:
        for logger in loggers:
            logger.disabled = True
        yield
    finally:
        for logger, was in zip(loggers, disabled, strict=True):
            logger.disabled = was
        for number, handler in handlers.items() if main else ():
            signal.signal(number, handler)


def _taken(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return True
    return False


def _stop(number: int, diary: failure.Diary) -> int:
    cause = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
    _say(failure.stopped(cause, diary))
    return 128 + number


def _print(result: Any, as_json: bool) -> None:
    if as_json:
        print(json.dumps(result), flush=True)


def _say(text: str) -> None:
    print(f"\n{text}", file=sys.stderr, flush=True)


def _leave(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
