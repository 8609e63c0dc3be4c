"""Who this process is among the ranks: the one file that reads RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE.

`torchrun` and our own launcher set them; a process without them is rank 0 of 1. Never imports torch, so that a bad
job is refused at once. Read next: `ranks.py` (device and process group), `local.py` (who starts ranks).
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from heptad.config.schema import Job
from heptad.errors import ConfigError
from heptad.launch.failure import Diary

SPEAKS_AFTER_S = 3.0
"""Under torchrun the first rank to end ends the others, maybe before they spoke. So a rank whose news rank 0 may have
too waits this long before it speaks and ends: it is ended meanwhile where they are the same."""


@dataclass(frozen=True, slots=True)
class RankInfo:
    """Rank among `world`; `local_rank` among the `local_world` here; `launched`: by torchrun or our launcher.

    `diary`: the rank notes there which step it has reached and what it has saved, for messages when it fails.
    """

    rank: int
    world: int
    local_rank: int
    local_world: int
    launched: bool
    diary: Diary = field(default_factory=Diary, compare=False)


def rank_info(environ: Mapping[str, str] | None = None) -> RankInfo:
    """What the environment says (`environ`: this process's own). Raises ConfigError when it says half of it."""
    environ = os.environ if environ is None else environ
    if "RANK" not in environ:
        return RankInfo(0, 1, 0, 1, launched=False)
    rank, world = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
    local_rank, local_world = _number(environ, "LOCAL_RANK"), _number(environ, "LOCAL_WORLD_SIZE")
    if not (0 <= rank < world and 0 <= local_rank < local_world <= world):
        value = f"RANK={rank} WORLD_SIZE={world} LOCAL_RANK={local_rank} LOCAL_WORLD_SIZE={local_world}"
        raise ConfigError.of("environment", value, "ranks lie below their counts", "start the job with torchrun")
    return RankInfo(rank, world, local_rank, local_world, launched=True)


def check_world(info: RankInfo, world: int) -> None:
    """Raises ConfigError unless as many ranks were started as the layout has."""
    if info.world != world:
        rule = f"the layout has {world} ranks (the product of its degrees), but {info.world} were started (WORLD_SIZE)"
        fix = f"start {world} ranks, or change the layout; plain `heptad train` starts as many as the layout has"
        raise ConfigError.of("layout", f"{world} ranks", rule, fix)


def check_compiler(job: Job, environ: Mapping[str, str] | None = None) -> None:
    """Raises ConfigError where `train.compile` is on and the C++ compiler that a job on CPUs needs is not found."""
    environ = os.environ if environ is None else environ
    compiler = environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")  # as torch.compile looks for it
    if job.train.compile and shutil.which(compiler, path=environ.get("PATH", "")) is None:
        rule = f"on CPUs torch.compile needs a C++ compiler, and {compiler} is not found"
        fix = "install g++, or name another in the environment variable CXX; or compile = false"
        raise ConfigError.of("train.compile", True, rule, fix)


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "")
    if not text.isdigit():
        rule = f"RANK is set, so {name} must be a number too"
        raise ConfigError.of(f"environment {name}", text, rule, "start the job with torchrun, or unset RANK")
    return int(text)
