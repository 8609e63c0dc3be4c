"""A rank's device and its default process group.

The device follows from the *local* rank (C-059), the backend from the device: gloo on CPU; NCCL on CUDA with gloo
beside it for what is decided on the CPU. Read next: `local.py` (who starts ranks), `mesh/device.py` (the groups made
of them).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from heptad.launch.environ import RankInfo

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # malloc.h


def device_of(
    info: RankInfo, kind: str, select: Callable[[torch.device], None] = torch.cuda.set_device
) -> torch.device:
    """This rank's device: "cpu", or the CUDA device of the local rank, made current by `select`."""
    if kind == "cpu":
        return torch.device("cpu")
    device = torch.device(kind, info.local_rank)
    select(device)
    return device


def keep_freed_memory() -> None:
    """Let the C library keep what this process frees (glibc; elsewhere nothing is changed).

    A step frees and takes the same large buffers again and again; handed back to the system each time, they cost 4,000
    to 16,000 page faults a step: 10 % of the default job's time. The price: memory once used stays with the rank.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for option, value in ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, -1)):
            mallopt(option, value)


@contextmanager
def process_group(info: RankInfo, device: torch.device, timeout_s: float) -> Iterator[None]:
    """The default process group of all ranks while the block runs; a collective fails after `timeout_s`.

    A process on its own gets a group of one, without a port. After an error in one of several ranks the group is left
    as it is: its end would wait for ranks that may be gone, and the process is about to end anyway.
    """
    timeout = timedelta(seconds=timeout_s)
    if not info.launched:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    elif device.type == "cpu":
        dist.init_process_group("gloo", timeout=timeout)
    else:
        dist.init_process_group(f"cpu:gloo,{device.type}:nccl", timeout=timeout, device_id=device)
    try:
        yield
    except BaseException:
        if info.world == 1:
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()
