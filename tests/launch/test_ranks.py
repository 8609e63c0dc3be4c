"""Who a process is, and which device it takes."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from tests.checkpoint.ranks import assert_holds, save_all

import heptad.launch.environ as environ_module
from heptad.checkpoint.read import Reader
from heptad.errors import ConfigError
from heptad.launch.environ import RankInfo, check_world, rank_info
from heptad.launch.ranks import device_of

NODES, PER_NODE = 2, 2


def test_c_059_the_device_follows_from_the_local_rank(tmp_path: Path) -> None:
    path = save_all(tmp_path, 3, NODES * PER_NODE).path
    selected = []

    def select(device: torch.device) -> None:
        assert device.index < PER_NODE, "invalid device ordinal"
        selected.append(device.index)

    for rank in range(NODES * PER_NODE):
        environ = {
            "RANK": str(rank),
            "WORLD_SIZE": str(NODES * PER_NODE),
            "LOCAL_RANK": str(rank % PER_NODE),
            "LOCAL_WORLD_SIZE": str(PER_NODE),
        }
        info = rank_info(environ)
        assert device_of(info, "cuda", select) == torch.device("cuda", rank % PER_NODE)
        with Reader(path) as reader:
            assert reader.step == 3
    assert selected == [0, 1, 0, 1]
    assert_holds(path, 3, NODES * PER_NODE)


def test_a_process_on_its_own_is_rank_0_of_1() -> None:
    assert rank_info({"HOME": "/"}) == RankInfo(0, 1, 0, 1, launched=False)
    assert device_of(rank_info({}), "cpu") == torch.device("cpu")


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"RANK": "0"}, "environment WORLD_SIZE = ''"),
        ({"RANK": "0", "WORLD_SIZE": "two", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}, "WORLD_SIZE = 'two'"),
        ({"RANK": "2", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}, "RANK=2 WORLD_SIZE=2"),
    ],
)
def test_half_an_environment_is_refused(environ: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        rank_info(environ)
    assert said in str(caught.value)


def test_a_wrong_world_names_both_numbers() -> None:
    with pytest.raises(ConfigError, match=r"layout has 8 ranks .* but 4 were started"):
        check_world(RankInfo(0, 4, 0, 4, launched=True), 8)
    check_world(RankInfo(0, 4, 0, 4, launched=True), 4)


def test_one_file_reads_the_ranks_environment() -> None:
    package = Path(environ_module.__file__).parents[1]
    names = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    for source in package.rglob("*.py"):
        found = {node.value for node in ast.walk(ast.parse(source.read_text())) if isinstance(node, ast.Constant)}
        assert not found & names or source == Path(environ_module.__file__), source
