"""The run's name is one on all ranks, and its job file is the job."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.tiny import tiny_job

from heptad.config.load import load
from heptad.errors import ConfigError
from heptad.launch.forked import forked
from heptad.mesh.device import Mesh
from heptad.mesh.layout import Layout
from heptad.train.runfolder import RunFolder, open_folder


def opened(rank: int, folder: str, name: str | None) -> tuple[str, str]:
    job = tiny_job(dp_shard=2)
    job = job.model_copy(update={"log": job.log.model_copy(update={"dir": folder, "name": name})})
    layout = Layout.of(job.layout)
    world = Mesh(layout, rank, [layout.axes], torch.device("cpu")).group(*layout.axes)
    found = open_folder(job, world, torch.device("cpu"))
    if rank == 0:
        found.write_job()
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


def refused(rank: int, log_dir: str, checkpoint_dir: str | None) -> str:
    job = tiny_job()
    job = job.model_copy(
        update={
            "log": job.log.model_copy(update={"dir": log_dir, "name": "mine"}),
            "checkpoint": job.checkpoint.model_copy(update={"dir": checkpoint_dir, "every": 2}),
        }
    )
    layout = Layout.of(job.layout)
    world = Mesh(layout, rank, [layout.axes], torch.device("cpu")).group(*layout.axes)
    with pytest.raises(ConfigError) as error:
        open_folder(job, world, torch.device("cpu"))
    return str(error.value)


def test_a_folder_that_cannot_be_written_is_a_bad_job_before_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    taken = str(tmp_path / "file")
    assert "log.dir = " in forked(1, refused, taken, None)[0]
    (message,) = forked(1, refused, str(tmp_path / "runs"), taken)
    assert "checkpoint.dir = " in message and "a run writes here, and cannot" in message


def test_one_job_at_a_time_trains_a_run(tmp_path: Path) -> None:
    """A second job of the same name is refused while the first trains, and goes on afterwards."""
    folder = RunFolder(tmp_path, "mine", tiny_job())
    with folder.held(0), folder.held(1):
        with pytest.raises(ConfigError, match=r"log\.name = 'mine'[\s\S]*another one does"), folder.held(0):
            raise AssertionError("held twice")
    with folder.held(0):
        pass
