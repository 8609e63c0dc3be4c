"""Shared by all tests: one thread a process, no time limits from hypothesis, verbatim snapshots."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import hypothesis
import pytest

SNAPSHOTS = Path(__file__).parent / "snapshots"

# The machine's load is not a property under test, so hypothesis keeps no deadline; the same examples every run.
hypothesis.settings.register_profile("heptad", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("heptad")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-snapshots", action="store_true", help="rewrite tests/snapshots/*.txt from what is printed"
    )


@pytest.fixture(autouse=True)
def one_thread(request: pytest.FixtureRequest) -> None:
    """Several workers and forked ranks share the cores: torch gets one thread, where a test uses torch at all."""
    import sys

    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() != 1:
        torch.set_num_threads(1)


@pytest.fixture
def snapshot(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """`snapshot(name, text)`: text equals tests/snapshots/<name>.txt verbatim; `--update-snapshots` writes it."""

    def compare(name: str, text: str) -> None:
        path = SNAPSHOTS / f"{name}.txt"
        text = text if text.endswith("\n") else text + "\n"
        if request.config.getoption("--update-snapshots"):
            path.write_text(text, encoding="utf-8")
        assert path.exists(), f"no snapshot {path.name}: run pytest --update-snapshots and read what it wrote"
        assert text == path.read_text(encoding="utf-8")

    return compare


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Lines that tests recorded as `record_property("summary", line)`, also from xdist's workers."""
    for report in terminalreporter.getreports("passed"):
        for name, line in report.user_properties:
            if name == "summary":
                terminalreporter.write_line(line)
