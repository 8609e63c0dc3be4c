"""Ctrl-C: the step under way ends, all ranks agree to stop after it, and what can be saved is saved.

SIGINT only sets a flag; the flag travels in the step's own all-reduce, so every rank leaves the loop after the same
step. A second signal `AGAIN_S` later or more ends at once (a launcher may pass the first one on, which is no second).
SIGTERM keeps ending the process at once: it is what a launcher sends to ranks that wait for a dead one.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

AGAIN_S = 3.0


class StopRequest:
    """A context in which SIGINT sets `asked`. Handlers belong to the main thread: elsewhere none is set."""

    def __init__(self) -> None:
        self._first_s: float | None = None
        self._before: Callable[[int, FrameType | None], Any] | int | None = None

    @property
    def asked(self) -> bool:
        """Whether somebody asked this rank to stop."""
        return self._first_s is not None

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._first_s is None:
            self._first_s = now
        elif now - self._first_s >= AGAIN_S:
            raise KeyboardInterrupt
