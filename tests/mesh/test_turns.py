"""Turns: one order whatever takes how long, what torch keeps by thread, errors on either side."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from heptad.mesh.meter import MemoryMeter
from heptad.mesh.turns import give, together


def party(log: list[str], name: str, turns: int, seconds: float = 0.0) -> Any:
    def run() -> None:
        for turn in range(turns):
            time.sleep(seconds)
            log.append(f"{name}{turn}")
            give()
        log.append(name)

    return run


@pytest.mark.parametrize("slow", [(0.0, 0.0), (0.003, 0.0), (0.0, 0.003)])
def test_the_order_does_not_depend_on_time(slow: tuple[float, float]) -> None:
    log: list[str] = []
    together(party(log, "a", 2, slow[0]), party(log, "b", 4, slow[1]), lambda at: log.append("01"[at]))
    assert " ".join(log) == "0 a0 1 b0 0 a1 1 b1 0 a 1 b2 b3 b"
    assert threading.active_count() == 1


def test_alone_give_does_nothing() -> None:
    give()
    log: list[str] = []
    together(party(log, "a", 0), party(log, "b", 2))
    give()
    assert log == ["a", "b0", "b1", "b"]


class _Waits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, log: list[str], name: str) -> Tensor:
        ctx.log, ctx.name = log, name
        return x * 2

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        ctx.log.append(f"{ctx.name} starts")
        give()
        ctx.log.append(f"{ctx.name} has waited")
        return dy * 2, None, None


def test_a_backward_is_left_half_way() -> None:
    log: list[str] = []
    x = torch.tensor(3.0, requires_grad=True)
    y = _Waits.apply(_Waits.apply(x, log, "lower"), log, "upper")
    found: list[Tensor] = []
    together(lambda: found.extend(torch.autograd.grad(y, x)), party(log, "f", 2))
    assert log == ["upper starts", "f0", "upper has waited", "lower starts", "f1", "lower has waited", "f"]
    assert found[0] == 4


def test_what_torch_keeps_by_thread_is_that_of_the_caller() -> None:
    meter, seen = MemoryMeter(), list[Any]()

    def first() -> None:
        seen.extend([torch.is_grad_enabled(), torch.get_num_threads(), torch.ones(1000)])

    with torch.no_grad(), FakeTensorMode():
        together(first, lambda: None)
    with meter:
        together(first, lambda: None)
    assert seen[:2] == [False, torch.get_num_threads()] and isinstance(seen[2], FakeTensor)
    assert seen[3] and meter.peak_bytes >= 4000


@pytest.mark.parametrize("fails", [0, 1])
@pytest.mark.parametrize("before", [True, False])
def test_an_error_ends_both(fails: int, before: bool) -> None:
    """At its place in the order; the other one ends where it gave, and its own cleaning up runs."""
    log: list[str] = []

    def bad() -> None:
        if not before:
            give()
        raise ValueError("it broke here")

    def good() -> None:
        try:
            for _ in range(3):
                give()
            log.append("went on")
        finally:
            log.append("cleaned")

    parties = (bad, good) if fails == 0 else (good, bad)
    with pytest.raises(ValueError, match="it broke here") as error:
        together(*parties)
    assert any(entry.name == "bad" for entry in error.traceback)
    assert log == ([] if (fails, before) == (0, True) else ["cleaned"])
    assert threading.active_count() == 1
    give()
    together(party(log, "a", 1), party(log, "b", 1))  # and another pair may follow


def test_an_error_through_a_backward() -> None:
    """What ends a backward that waits passes autograd's C++."""
    x = torch.tensor(3.0, requires_grad=True)
    y = _Waits.apply(x, [], "it")

    def fails() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        together(lambda: torch.autograd.grad(y, x), fails)
    assert threading.active_count() == 1


@pytest.mark.gpu
def test_on_a_gpu_autograds_own_thread_gives_the_turn() -> None:
    """A backward runs on a thread of the device there; stream and device are the caller's on both sides."""
    log, seen = list[str](), list[Any]()
    x = torch.tensor(3.0, requires_grad=True, device="cuda")
    y = _Waits.apply(_Waits.apply(x, log, "lower"), log, "upper")

    def first() -> None:
        seen.append(torch.cuda.current_stream())
        seen.append(torch.autograd.grad(y, x)[0])

    with torch.cuda.stream(torch.cuda.Stream()):
        here = torch.cuda.current_stream()
        together(first, party(log, "f", 2))
    torch.cuda.synchronize()
    assert seen[0] == here and seen[1] == 4
    assert log == ["upper starts", "f0", "upper has waited", "lower starts", "f1", "lower has waited", "f"]
