"""What a person sees while a job trains: on stderr, live on a terminal, a plain line every few seconds elsewhere.

Colour adds nothing that the words do not say, and NO_COLOR is honoured. Only rank 0 shows anything.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Column

from heptad.units import human_seconds

LINE_EVERY_S = 10.0
WIDTH_WITH_BAR = 130
"""Narrower terminals give the room to the figures, which wrap rather than being cut off."""


class Display:
    """A context: `step` after each step, `say` for a sentence. `shown` False (other ranks) shows nothing."""

    def __init__(
        self, total_steps: int, shown: bool, console: Console | None = None, line_every_s: float = LINE_EVERY_S
    ) -> None:
        self.total_steps, self.shown, self._line_every_s = total_steps, shown, line_every_s
        self._console = console or Console(stderr=True, highlight=False, soft_wrap=True)
        self._live: Progress | None = None
        self._task: TaskID | None = None
        self._last_line_s: float | None = None

    def __enter__(self) -> Display:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def say(self, sentence: str) -> None:
        """One line, above the live one."""
        if self.shown:
            self._console.print(sentence, markup=False)

    def step(self, step: int, figures: Mapping[str, float | int | bool | None], seconds_left: float | None) -> None:
        """Figures (names of METRICS) of the step that ended."""
        if not self.shown:
            return
        line = describe(step, self.total_steps, figures, seconds_left)
        if self._console.is_terminal:
            self._show(step, line)
            return
        now = time.monotonic()
        due = self._last_line_s is None or now - self._last_line_s >= self._line_every_s or step == self.total_steps
        if due:
            self._last_line_s = now
            self._console.print(line, markup=False)

    def _show(self, step: int, line: str) -> None:
        if self._live is None or self._task is None:
            text = TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=False, overflow="fold"))
            columns = (BarColumn(bar_width=24), text) if self._console.width >= WIDTH_WITH_BAR else (text,)
            self._live = Progress(*columns, console=self._console, auto_refresh=False)
            self._live.start()
            self._task = self._live.add_task("", total=self.total_steps)
        self._live.update(self._task, completed=step, description=line, refresh=True)


def describe(
    step: int, total_steps: int, figures: Mapping[str, float | int | bool | None], seconds_left: float | None
) -> str:
    """One line: step, loss, tokens/s, gradient norm before clipping and its factor, the busiest expert's load, dropped
    choices, learning rate, time left."""
    width = len(str(total_steps))
    parts = [f"step {step:>{width}}/{total_steps}"]
    loss, norm, factor, rate, lr = (
        figures.get(name) for name in ("loss", "grad_norm_pre_clip", "clip_factor", "tokens_per_s", "lr")
    )
    if loss is not None:
        parts.append(f"loss {loss:.3f}")
    if rate is not None:
        parts.append(f"{rate:,.0f} tokens/s")
    if norm is not None:
        clipped = f" (clipped ×{factor:.2g})" if factor is not None and factor < 1 else ""
        parts.append(f"grad norm {norm:.3g}{clipped}")
    busiest, dropped = figures.get("expert_load_max"), figures.get("dropped_share")
    if busiest is not None:
        parts.append(f"busiest expert ×{busiest:.2f}" + (f", {dropped:.1%} dropped" if dropped is not None else ""))
    if figures.get("skipped"):
        parts.append("SKIPPED: no update")
    if lr is not None:
        parts.append(f"lr {lr:.2e}")
    if seconds_left is not None and step < total_steps:
        parts.append(f"{human_seconds(seconds_left)} left")
    return "  ".join(parts)
