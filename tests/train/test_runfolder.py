"""The run's name is one on all ranks, and its job file is the job."""

from __future__ import annotations

from pathlib import Path

import torch
from tests.tiny import tiny_job

from heptad.config.load import load
from heptad.launch.forked import forked
from heptad.mesh.device import Mesh
from heptad.mesh.layout import Layout
from heptad.train.runfolder import open_folder


def opened(rank: int, folder: str, name: str | None) -> tuple[str, str]:
    job = tiny_job(dp_shard=2)
    job = job.model_copy(update={"log": job.log.model_copy(update={"dir": folder, "name": name})})
    layout = Layout.of(job.layout)
    world = Mesh(layout, rank, [layout.axes], torch.device("cpu")).group(*layout.axes)
    found = open_folder(job, world, torch.device("cpu"))
    return found.name, str(found.checkpoints)


def test_ranks_agree_on_a_free_name(tmp_path: Path) -> None:
    names = []
    for _ in range(2):
        (first, checkpoints), second = forked(2, opened, str(tmp_path), None)
        assert (first, checkpoints) == second and checkpoints == str(tmp_path / first / "checkpoints")
        names.append(first)
    assert len(set(names)) == 2


def test_a_given_name_and_the_job_file(tmp_path: Path) -> None:
    assert forked(2, opened, str(tmp_path), "mine")[1][0] == "mine"
    job = load(str(tmp_path / "mine" / "job.toml"))
    assert (job.log.name, job.log.dir, job.layout.dp_shard) == ("mine", str(tmp_path), 2)
    assert job.model == tiny_job().model
