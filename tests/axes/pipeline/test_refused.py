"""What a schedule cannot do is refused at once with the nearest numbers that it can; files are proven before use."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.schedule.messages import messages

from heptad.axes.pipeline.generate import GENERATORS, claimed_live, generate, problems
from heptad.errors import ConfigError
from heptad.schedule.pipeline import format_schedule, placement, singles
from heptad.schedule.pipeline_check import check_schedule

Snapshot = Callable[[str, str], None]

REFUSED = [
    ("1F1B", 4, None, 8),
    ("zig", 4, None, 8),
    ("1f1b", 4, 2, 8),
    ("pipedream", 4, 3, 8),
    ("zbv", 4, 1, 8),
    ("zbv", 4, 3, 8),
    ("dualpipe", 4, 2, 8),
    ("dualpipe", 3, None, 6),
    ("dualpipe", 1, None, 2),
    ("dualpipe", 3, None, 7),
    ("dualpipe", 4, None, 6),
    ("dualpipe", 4, None, 9),
    ("dualpipev", 4, None, 7),
    ("dualpipev", 4, 4, 2),
    ("gpipe", 0, None, 2),
    ("interleaved", 2, 0, -1),
]


def test_messages(snapshot: Snapshot) -> None:
    text = []
    for case in REFUSED:
        with pytest.raises(ConfigError) as error:
            generate(*case)
        text.append(f"{case}\n{error.value}")
    snapshot("schedule_numbers", "\n\n".join(text))


@pytest.mark.parametrize("name", sorted(GENERATORS))
def test_problems_are_those_of_generate(name: str) -> None:
    """What is not refused can be generated and is correct, over every small P, V and M."""
    for num_ranks in range(1, 6):
        for chunks in (None, 1, 2, 3):
            for num_microbatches in (1, 2, 3, 5, 8, 11):
                case = (name, num_ranks, chunks, num_microbatches)
                if list(problems(*case)):
                    with pytest.raises(ConfigError):
                        generate(*case)
                else:
                    check_schedule(generate(*case), claimed_live(*case))


@pytest.mark.parametrize("name", sorted(GENERATORS))
def test_c_090_fewer_micro_batches_than_stages(name: str) -> None:
    """P = 4, M = 2: a proven schedule or an error with numbers, before anything is sent."""
    if name.startswith("dualpipe"):
        with pytest.raises(ConfigError, match="at least 2 × 4 = 8"):
            generate(name, 4, None, 2)
    else:
        check_schedule(generate(name, 4, None, 2), claimed_live(name, 4, None, 2))


def test_c_090_two_directions_need_even_numbers() -> None:
    with pytest.raises(ConfigError, match=r"half of the micro-batches from each end[\s\S]*8 or 10"):
        generate("dualpipe", 4, None, 9)
    with pytest.raises(ConfigError, match=r"so pp is even[\s\S]*pp = 2, or 4"):
        generate("dualpipe", 3, None, 8)


@pytest.mark.parametrize("name", sorted(GENERATORS))
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_c_039_every_stage_is_there(name: str, num_ranks: int) -> None:
    """Each stage on one rank, or on two in dualpipe; the stages of all ranks together are all stages."""
    chunks = 2 if GENERATORS[name].any_chunks else None
    case = (name, num_ranks + num_ranks % 2 if name == "dualpipe" else num_ranks, chunks, 8)
    schedule = generate(*case)
    held = [stage for line in schedule.lines for stage in {action.stage for action in singles(line)}]
    assert sorted(held) == sorted([*range(schedule.num_stages)] * (2 if name == "dualpipe" else 1))


def test_c_018_where_a_tied_pair_of_stages_is() -> None:
    """V-shaped: first and last stage on rank 0, one tensor. Looped: on the first and the last rank, one sync."""
    for name in ("zbv", "dualpipev"):
        (where,) = placement(generate(name, 2, None, 4))
        assert where == (0, 1, 1, 0)
        sent = messages(generate(name, 2, None, 4))
        turn = [m for row in sent for step in row for m in step if {m.made_by.stage} <= {1, 2} and m.source == m.target]
        assert not turn  # stages 1 and 2 are neighbours on one rank: nothing is sent between them
    for name in ("gpipe", "interleaved", "zbh1"):
        (where,) = placement(generate(name, 2, 2, 4))
        assert where == (0, 1, 0, 1)
    assert placement(generate("dualpipe", 4, None, 8)) == ((0, 1, 2, 3), (3, 2, 1, 0))


def test_a_file_is_a_schedule(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text("# two directions\n" + format_schedule(generate("dualpipe", 4, None, 8)) + "\n", encoding="utf-8")
    schedule = generate(f"file:{path}", 4, None, 8)
    assert schedule.lines == generate("dualpipe", 4, None, 8).lines
    assert schedule.name == f"file:{path}" and claimed_live(schedule.name, 4, None, 8) is None
    assert generate(f"file:{path}", 4, 1, 8) == schedule
    for wrong in ((2, None, 8), (4, None, 10), (4, 2, 8)):
        with pytest.raises(ConfigError, match="the file has 4 ranks, 4 stages and 8 micro-batches, the job"):
            generate(f"file:{path}", *wrong)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("0F0 0B0\n1F0", "1B0 is missing"),
        ("0F0 0X0", "'0X0' is no stage action"),
        ("", "at least one action"),
        ("0F0&0F1", "is no pair"),
    ],
)
def test_a_broken_file_is_refused_with_the_place(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "mine.txt"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=says):
        generate(f"file:{path}", 2, None, 1)


def test_nothing_of_it_needs_torch() -> None:
    modules = ("axes.pipeline.generate", "schedule.pipeline_check", "schedule.slots")
    load = "; ".join(f"import heptad.{module}" for module in modules)
    subprocess.run([sys.executable, "-c", f"{load}; import sys; assert 'torch' not in sys.modules"], check=True)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can be read"):
        generate(f"file:{tmp_path}/none.txt", 2, None, 1)
