"""Progress is readable without a terminal and without colour."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from heptad.train.progress import Display, describe

FIGURES = {"loss": 3.25, "tokens_per_s": 12345.6, "grad_norm_pre_clip": 5.0, "clip_factor": 0.2, "lr": 3e-4}


def test_c_121_norm_before_clipping_and_factor_are_shown() -> None:
    line = describe(7, 200, FIGURES, 75.0)
    assert line == "step   7/200  loss 3.250  12,346 tokens/s  grad norm 5 (clipped ×0.2)  lr 3.00e-04  1 min 15 s left"
    assert "clipped" not in describe(7, 200, FIGURES | {"clip_factor": 1.0}, None)
    experts = {"expert_load_max": 1.7314, "dropped_share": None}
    assert "  busiest expert ×1.73  lr" in describe(7, 200, FIGURES | experts, None)
    assert "  busiest expert ×1.73, 2.5% dropped  lr" in describe(
        7, 200, FIGURES | experts | {"dropped_share": 0.025}, None
    )
    assert "SKIPPED" in describe(7, 200, {"loss": None, "skipped": True}, None)


def test_without_a_terminal_a_line_now_and_then() -> None:
    out = io.StringIO()
    with Display(100, True, Console(file=out, soft_wrap=True), line_every_s=1000.0) as display:
        display.say("[bold] stays as it is")
        for step in range(1, 101):
            display.step(step, FIGURES, 1.0)
    lines = out.getvalue().splitlines()
    assert lines[0] == "[bold] stays as it is"
    assert [line.split("  ")[0].strip() for line in lines[1:]] == ["step   1/100", "step 100/100"] or len(lines) == 3
    assert "\x1b" not in out.getvalue()


def test_on_a_terminal_without_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    out = io.StringIO()
    with Display(3, True, Console(file=out, force_terminal=True, width=160)) as display:
        display.say("before")
        display.step(1, FIGURES, 1.0)
        display.say("between")
        display.step(2, FIGURES, 1.0)
    text = out.getvalue()
    assert "before" in text and "between" in text and "step 2/3" in text
    assert not re.search(r"\x1b\[[0-9;]*3[0-9][0-9;]*m", text)


def test_other_ranks_show_nothing() -> None:
    out = io.StringIO()
    with Display(3, False, Console(file=out, force_terminal=True)) as display:
        display.say("x")
        display.step(1, FIGURES, None)
    assert out.getvalue() == ""


@pytest.mark.parametrize("width", [60, 80, 130])
def test_no_figure_is_cut_off_on_a_narrow_terminal(width: int) -> None:
    out = io.StringIO()
    with Display(200, True, Console(file=out, force_terminal=True, width=width, no_color=True)) as display:
        display.step(7, FIGURES, 75.0)
    words = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", " ", out.getvalue()).split()
    assert {"7/200", "3.250", "12,346", "×0.2)", "3.00e-04", "left"} <= set(words) and "…" not in out.getvalue()
