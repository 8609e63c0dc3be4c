from __future__ import annotations

import gc

import torch

from heptad.mesh.meter import MemoryMeter, everything_alive


def test_known_allocations_and_their_end() -> None:
    with MemoryMeter() as meter:
        a = torch.zeros(1000, dtype=torch.float64)
        assert meter.current_bytes() == meter.peak_bytes == 8000
        view = a.view(10, 100)[3:]
        assert meter.current_bytes() == 8000  # one storage, counted once
        b = a + 1
        assert meter.current_bytes() == meter.peak_bytes == 16000
        del a
        assert meter.current_bytes() == 16000  # the view keeps the storage
        del view
        assert (meter.current_bytes(), meter.peak_bytes) == (8000, 16000)
        meter.reset_peak()
        assert meter.peak_bytes == 8000
        del b
    assert meter.current_bytes() == 0


def test_a_storage_resized_in_place_is_followed() -> None:
    meter = MemoryMeter()
    with meter:
        full = torch.ones(512)
        full.untyped_storage().resize_(0)
        assert meter.current_bytes() == 0
        full.untyped_storage().resize_(2048)
        assert meter.sample() == 2048 == meter.peak_bytes
        full.fill_(2.0)
    assert meter.current_bytes() == 2048


def test_what_autograd_keeps_is_seen_and_freed() -> None:
    weight = torch.ones(64, 64, requires_grad=True)
    with MemoryMeter([weight]) as meter:
        before = meter.current_bytes()
        assert before == weight.nbytes
        loss = (weight.exp() * 2).sum()
        assert meter.current_bytes() >= before + weight.nbytes  # exp keeps its output
        loss.backward()
        del loss
        gc.collect()
        assert weight.grad is not None and meter.current_bytes() == before + weight.grad.nbytes


def test_meta_tensors_hold_nothing() -> None:
    with MemoryMeter() as meter:
        torch.zeros(1 << 20, device="meta") + 1
        assert meter.peak_bytes == 0


def test_a_storage_that_an_operator_meets_at_another_size_counts_into_the_peak() -> None:
    """As a sharded engine does it: memory again, a copy into it, memory gone; no storage is new."""
    source, full = torch.ones(512), torch.ones(512)
    meter = MemoryMeter([source, full])
    full.untyped_storage().resize_(0)
    meter.reset_peak()
    with meter:
        full.untyped_storage().resize_(2048)
        full.copy_(source)
        full.untyped_storage().resize_(0)
    assert (meter.peak_bytes, meter.current_bytes()) == (4096, 2048)


def test_everything_alive_counts_a_process_whole() -> None:
    before = MemoryMeter(everything_alive()).current_bytes()
    held = torch.ones(1000)
    meter = MemoryMeter(everything_alive())
    assert meter.current_bytes() == before + 4000
    del held
    assert meter.current_bytes() == before
