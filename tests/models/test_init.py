"""Initial values depend on seed, name and index only, never on how a parameter is cut."""

from __future__ import annotations

import itertools
import math
import tracemalloc

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.models.helpers import LLAMA

from heptad.models.init import BLOCK, fill
from heptad.models.keyed import GOLDEN, key_of, mix_
from heptad.models.spec import Init, ParamSpec, param_specs

SPEC = ParamSpec("blocks.0.mlp.up.weight", (131, 379), ("mlp", "width"), "matrix", Init("normal", 0.02))


def values(spec: ParamSpec, start: int, stop: int, seed: int = 7, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    out = torch.empty(stop - start, dtype=dtype)
    fill(out, spec, start, stop, seed)
    return out


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7, 8, 13])
def test_c_024_every_cut_gives_the_same_full_tensor(ranks: int, dtype: torch.dtype) -> None:
    whole = values(SPEC, 0, SPEC.numel, dtype=dtype)
    size = math.ceil(SPEC.numel / ranks)
    bounds = [min(i * size, SPEC.numel) for i in range(ranks + 1)]
    parts = [values(SPEC, a, b, dtype=dtype) for a, b in itertools.pairwise(bounds)]
    assert torch.equal(torch.cat(parts), whole)


@given(st.integers(0, SPEC.numel), st.integers(0, SPEC.numel), st.integers(1, 4))
def test_c_024_any_range_equals_its_slice(one: int, two: int, threads: int) -> None:
    start, stop = sorted((one, two))
    torch.set_num_threads(threads)
    part = values(SPEC, start, stop)
    torch.set_num_threads(1)
    assert torch.equal(part, values(SPEC, 0, SPEC.numel)[start:stop])


def test_c_025_spread_follows_global_sizes() -> None:
    """A quarter of a row-parallel matrix has the whole one's spread."""
    down = next(item for item in param_specs(LLAMA) if item.name == "blocks.0.mlp.down.weight")
    assert down.init.value == pytest.approx(0.3 / 2)  # two layers: 1 / sqrt(2 · 2), whatever the shape
    wide = ParamSpec("w", (1024, 1024), ("width", "mlp"), "matrix", Init("normal", 1 / 32))
    whole = values(wide, 0, wide.numel, dtype=torch.float64)
    quarter = values(wide, 0, wide.numel // 4, dtype=torch.float64)
    assert float(whole.std()) == pytest.approx(1 / 32, rel=5e-3)
    assert float(quarter.std()) == pytest.approx(1 / 32, rel=5e-3)


def test_values_are_normal_and_independent() -> None:
    spec = ParamSpec("w", (1 << 20,), ("width",), "matrix", Init("normal", 1.0))
    x = values(spec, 0, spec.numel, dtype=torch.float64)
    n = spec.numel
    assert abs(float(x.mean())) < 4 / math.sqrt(n)
    assert abs(float(x.var()) - 1) < 4 * math.sqrt(2 / n)
    assert abs(float((x**4).mean()) - 3) < 4 * math.sqrt(96 / n)
    assert abs(float((x[1:] * x[:-1]).mean())) < 4 / math.sqrt(n)
    for other in (values(spec, 0, n, seed=8, dtype=torch.float64), values(SPEC, 0, SPEC.numel, dtype=torch.float64)):
        length = min(n, len(other))
        scaled = other[:length] / other.std()
        assert abs(float((x[:length] * scaled).mean())) < 4 / math.sqrt(length)
    assert bool(x.isfinite().all()) and x.unique().numel() > 0.999 * n


def test_the_hash_is_splitmix64() -> None:
    """Steele et al.: the stream of seed 1234567 starts with these (the reference implementation's own values)."""
    stream = mix_(torch.arange(1, 4).mul_(GOLDEN).add_(1234567))
    assert [int(x) % 2**64 for x in stream] == [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert key_of(1, "a") == key_of(1, "a") != key_of(2, "a") != key_of(1, "b")


def test_constants_are_filled() -> None:
    one = ParamSpec("norm.weight", (13,), ("width",), "norm", Init("constant", 1.0))
    assert torch.equal(values(one, 3, 11), torch.ones(8))


def test_memory_is_the_shard_plus_blocks() -> None:
    huge = ParamSpec("w", (128_256, 16_384), ("vocab", "width"), "head", Init("normal", 0.02))
    out = torch.empty(3 * BLOCK)
    with torch.profiler.profile(profile_memory=True) as profile:
        fill(out, huge, huge.numel - 3 * BLOCK, huge.numel, 0)
    largest = max(event.cpu_memory_usage for event in profile.events())
    assert 0 < largest <= 16 * BLOCK
    tracemalloc.start()
    fill(out, huge, huge.numel - 3 * BLOCK, huge.numel, 0)
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    tracemalloc.stop()
