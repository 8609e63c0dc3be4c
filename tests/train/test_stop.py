"""Ctrl-C asks once and insists the second time."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from heptad.train import stop
from heptad.train.stop import StopRequest


def test_a_signal_sets_the_flag_and_handlers_are_given_back() -> None:
    before = signal.getsignal(signal.SIGINT)
    with StopRequest() as request:
        assert not request.asked
        os.kill(os.getpid(), signal.SIGINT)
        assert request.asked
        os.kill(os.getpid(), signal.SIGINT)  # the launcher passing the same one on
    assert signal.getsignal(signal.SIGINT) is before


def test_a_later_second_signal_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop, "AGAIN_S", 0.0)
    with pytest.raises(KeyboardInterrupt), StopRequest():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)


def test_outside_the_main_thread_no_handler_is_set() -> None:
    before = signal.getsignal(signal.SIGINT)
    seen = []

    def work() -> None:
        with StopRequest():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]
