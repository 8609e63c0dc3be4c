"""docs/schedules.md: its table is what is simulated, its picture what the command draws."""

from __future__ import annotations

from pathlib import Path

from heptad.axes.pipeline.formulas import FORMULAS
from heptad.axes.pipeline.generate import GENERATORS, generate
from heptad.cli.schedules import Wanted, show
from heptad.simulate.pipeline import PairMode, simulate
from heptad.simulate.times import Links, Times

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_table_is_what_is_simulated() -> None:
    page = (DOCS / "schedules.md").read_text(encoding="utf-8").splitlines()
    for name in GENERATORS:
        schedule = generate(name, 8, None, 20)
        stages, part = schedule.num_stages, schedule.num_ranks / schedule.num_stages
        idle = [
            simulate(schedule, Times.uniform(stages, part, part, part), Links.uniform(stages, comm), mode).idle_fraction
            for comm in (0.0, 0.1)
            for mode in (PairMode.BLOCK, PairMode.EARLY)
        ]
        cells = [name, FORMULAS[name].text, FORMULAS[name].where, *(f"{value:.1%}" for value in idle)]
        assert f"| {' | '.join(cells)} |" in page


def test_the_picture_is_what_the_command_draws(tmp_path: Path) -> None:
    wanted = Wanted("dualpipe", None, 4, None, 10, {}, None, False)
    show(wanted, actions=False, as_json=True, output=str(tmp_path / "x.svg"))
    assert (tmp_path / "x.svg").read_bytes() == (DOCS / "pictures" / "dualpipe.svg").read_bytes()
