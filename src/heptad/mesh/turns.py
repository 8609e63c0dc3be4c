"""Two parties in turns: while what one has sent is on its way, the other computes. Never both at once.

An overlapped pair is a forward of one micro-batch and a backward of another. Each runs as if it were alone and calls
`give` right before it waits for a transfer that it has started; then the other has the turn, until its own `give` or
its end. Autograd's backward cannot be left half-way on one thread, so the party that begins runs on a thread of its
own. There is one baton: which of the two runs never depends on time, so the order of everything they do, collectives
included, is that of the program and the same on every rank, and results are bit-equal to running one after the other.

Outside of a pair `give` does nothing. Cost: a handover between threads a `give`, some 30 µs, and 0.1 ms for a thread.
Read next: `schedule/in_turns.py` (who pairs), `axes/expert/transfer.py` (who gives).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode, _push_mode


def give() -> None:
    """Right before waiting for a transfer that has been started: the other party's turn, if there is one.

    May be called from any thread of the party that has the turn (autograd's own on CUDA).
    """
    if _under_way:
        _under_way[-1].give()


def together(first: Callable[[], None], second: Callable[[], None], turn: Callable[[int], None] | None = None) -> None:
    """Run both to their ends in turns, `first` (on a thread of its own) before `second`.

    turn: told which of them, 0 or 1, whenever one begins or goes on, by itself. What one of them raises ends the other
    at its `give` and is raised here; no thread is left behind.
    """
    assert not _under_way, "a party of a pair is no pair"
    pair = _Pair(turn)
    _under_way.append(pair)
    thread = threading.Thread(target=_Context.here().run, args=(pair, first), name="first of a pair", daemon=True)
    try:
        thread.start()
        try:
            pair.batons[1].acquire()
            pair.go_on(1)
            second()
        except BaseException:
            pair.over = True
            raise
        finally:
            pair.leave(1)
            thread.join()
    except _Over:
        assert pair.error is not None
        raise pair.error from None
    finally:
        _under_way.clear()
    if pair.error is not None:
        raise pair.error


class _Over(BaseException):
    """The other party has failed."""


class _Pair:
    """Who has the turn. A party that waits is blocked on its own baton, a lock that the other one releases."""

    def __init__(self, turn: Callable[[int], None] | None) -> None:
        self.turn, self.at = turn, 0
        self.batons = threading.Lock(), threading.Lock()
        self.ended = [False, False]
        self.over = False  # a party has failed
        self.error: BaseException | None = None  # of the first party
        for baton in self.batons:
            baton.acquire()

    def give(self) -> None:
        """Called by the party that has the turn."""
        me = self.at
        if self.over:
            raise _Over
        if self.ended[1 - me]:
            return
        self.at = 1 - me
        self.batons[1 - me].release()
        self.batons[me].acquire()
        self.go_on(me)

    def go_on(self, me: int) -> None:
        """This party has the turn again."""
        if self.over:
            raise _Over
        if self.turn is not None:
            self.turn(me)

    def leave(self, me: int) -> None:
        """This party has ended: what is left of the other runs alone."""
        self.ended[me] = True
        self.at = 1 - me
        if not self.ended[1 - me]:
            self.batons[1 - me].release()


@dataclass(frozen=True)
class _Context:
    """What torch keeps by thread, as it is where the pair begins."""

    grad: bool
    num_threads: int
    modes: Sequence[Any]
    device: int | None
    stream: torch.cuda.Stream | None

    @classmethod
    def here(cls) -> _Context:
        assert not torch.is_inference_mode_enabled() and not torch.is_autocast_enabled(), "of a training step"
        cuda = torch.cuda.is_initialized()
        return cls(
            torch.is_grad_enabled(),
            torch.get_num_threads(),
            _get_current_dispatch_mode_stack(),
            torch.cuda.current_device() if cuda else None,
            torch.cuda.current_stream() if cuda else None,
        )

    def run(self, pair: _Pair, party: Callable[[], None]) -> None:
        """The first party's thread."""
        try:
            torch.set_num_threads(self.num_threads)
            with ExitStack() as stack:
                if self.device is not None:
                    stack.enter_context(torch.cuda.device(self.device))
                    stack.enter_context(torch.cuda.stream(self.stream))
                for mode in self.modes:  # not entered again: what a mode does on entering it has done
                    _push_mode(mode)
                    stack.callback(_pop_mode)
                stack.enter_context(torch.set_grad_enabled(self.grad))
                pair.go_on(0)
                party()
        except _Over:
            pass
        except BaseException as error:
            pair.error, pair.over = error, True
        finally:
            pair.leave(0)


_under_way: list[_Pair] = []
"""The pair that this process runs, at most one: `give` is called deep inside models, which know of no pairs."""
