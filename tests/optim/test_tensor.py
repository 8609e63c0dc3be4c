"""Norm and updates of parameters that a tensor axis cuts, copies or pads."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from tests.optim.fixtures import section
from tests.optim.tensor import SECTION, held_ranges, set_grads, shards_of, specs, values, world_group

from heptad.axes.data.buckets import _bucket, ranges_of, tiles_of
from heptad.axes.data.shard import Shard
from heptad.launch.forked import forked
from heptad.mesh.collectives import Group
from heptad.mesh.ledger import Ledger
from heptad.models.cut import cuts
from heptad.models.spec import Init, ParamSpec
from heptad.optim.build import build_optimizer
from heptad.optim.cost import gather_rounds, muon_traffic, norm_traffic
from heptad.optim.muon import orthogonalise
from heptad.optim.norm import clip_, total_norm
from heptad.trace import Transfer, total

LAYOUTS = [(1, 1), (1, 2), (1, 4), (2, 2), (2, 4), (3, 2)]
STEPS = 3
OPTIONS = {"name": "muon", "muon_lr": 0.3, "lr": 0.1, "weight_decay": 0.2, "muon_momentum": 0.8, "schedule": "linear"}


def c_013(rank: int, size: int) -> tuple[float, float, int]:
    """A matrix of squared norm 9 cut over the axis, a norm's weight of squared norm 16 on every rank of it."""
    group = world_group(rank, size)
    rows = torch.full((12, 3), 0.5, dtype=torch.float64).chunk(size)[rank].reshape(-1)
    ranges = tuple((at * rows.numel(), (at + 1) * rows.numel()) for at in range(size))
    matrix = ParamSpec("w", (12, 3), ("mlp", "width"), "matrix", Init("normal", 1.0))
    weight = ParamSpec("n", (1,), ("width",), "norm", Init("constant", 1.0))
    shared = torch.tensor([4.0], dtype=torch.float64)
    whole = tuple((0, int(at == 0)) for at in range(size))
    shards = [
        Shard(matrix, *ranges[rank], rows, rows, group, ranges),
        Shard(weight, 0, 1, shared, shared, group, whole, owner=rank == 0),
    ]
    return total_norm(shards).item(), total_norm(shards, math.inf).item(), len(group.ledger.transfers())


@pytest.mark.parametrize("size", [1, 2, 4])
def test_c_013_a_replicated_parameter_counts_once(size: int) -> None:
    for norm, largest, kinds in forked(size, c_013, size):
        assert norm == pytest.approx(5.0, rel=1e-12) and largest == 4.0
        assert kinds == (size > 1)


def norms(rank: int, dp: int, tp: int) -> tuple[float, float, list[Transfer], list[float]]:
    group = world_group(rank, dp * tp)
    shards = shards_of(values(0), group, dp, tp)
    set_grads(shards, values(5))
    norm, largest = total_norm(shards), total_norm(shards, math.inf)
    transfers = group.ledger.transfers()
    clip_(shards, 1.0, norm)
    return norm.item(), largest.item(), transfers, total_norm(shards).reshape(1).tolist()


@pytest.mark.parametrize(("dp", "tp"), LAYOUTS)
def test_c_013_padding_and_copied_kv_heads_count_once(dp: int, tp: int) -> None:
    flat = torch.cat([grad.reshape(-1) for grad in values(5).values()])
    for norm, largest, transfers, clipped in forked(dp * tp, norms, dp, tp):
        assert norm == pytest.approx(flat.norm().item(), rel=1e-12) and largest == flat.abs().max().item()
        assert total(transfers) == total(norm_traffic("dp_shard*tp", dp * tp) * 2 if dp * tp > 1 else [])
        assert clipped == pytest.approx([1.0], rel=1e-12)


def test_the_stand_in_copies_pads_and_tiles() -> None:
    for dp, tp in LAYOUTS:
        for spec in specs():
            held = held_ranges(dp, tp)[spec.name]
            owned = sorted((a, b) for cut, a, b in held if cut.owner and a < b)
            assert [a for a, _ in owned] == [0, *(b for _, b in owned[:-1])] and owned[-1][1] == spec.numel
    key = [(cut.owner, a, b) for cut, a, b in held_ranges(1, 4)["blocks.0.attention.k.weight"]]
    assert key == [(True, 0, 60), (False, 0, 60), (True, 60, 120), (False, 60, 120)]
    assert [b for _, _, b in held_ranges(1, 4)["embed.tokens.weight"]] == [30, 60, 90, 110]


Trained = tuple[dict[str, tuple[int, int, list[float], list[float]]], list[Transfer], list[Transfer]]


def train(rank: int, dp: int, tp: int) -> Trained:
    """Parameter -> (start, stop, master, state) after STEPS updates; what was counted, what was predicted."""
    group = world_group(rank, dp * tp)
    shards = shards_of(values(0), group, dp, tp)
    optimizer = build_optimizer(section(**OPTIONS), shards, STEPS)
    for step in range(1, STEPS + 1):
        set_grads(shards, values(step))
        optimizer.step(step)
    cuts = [shard.ranges for shard in shards if shard.spec.role == "matrix"]
    predicted = muon_traffic(cuts, "dp_shard*tp", 8) * STEPS if group.size > 1 else []
    state = {piece.name.partition("/")[2]: piece.tensor.tolist() for piece in optimizer.pieces()}
    found = {s.spec.name: (s.start, s.stop, s.master.tolist(), state[s.spec.name]) for s in shards}
    return found, group.ledger.transfers(), predicted


@pytest.mark.parametrize(("dp", "tp"), LAYOUTS[1:])
def test_updates_equal_one_process_and_replicas_each_other_bit_for_bit(dp: int, tp: int) -> None:
    """Muon's matrices are the single process's bits; torch's AdamW rounds the end of a range otherwise."""
    (want, _, _), *_ = forked(1, train, 1, 1)
    by_range: dict[tuple[str, int, int], tuple[list[float], list[float]]] = {}
    roles = {spec.name: spec.role for spec in specs()}
    for found, counted, predicted in forked(dp * tp, train, dp, tp):
        assert total(counted) == total(predicted) and counted
        for name, (start, stop, master, state) in found.items():
            right = want[name][2][start:stop], want[name][3][start:stop]
            for got, expected in zip((master, state), right, strict=True):
                assert got == (expected if roles[name] == "matrix" else pytest.approx(expected, rel=1e-12)), name
            assert by_range.setdefault((name, start, stop), (master, state)) == (master, state), name


def test_what_one_rank_owns_is_not_sent_though_all_hold_it() -> None:
    copied, cut = ((0, 6), (0, 0)), ((0, 3), (3, 6))
    assert [item.members for item in gather_rounds([copied, cut])] == [(1,)]


@pytest.mark.parametrize("shape", [(24, 10), (10, 24), (7, 7)])
def test_a_matrix_stored_input_first_is_updated_as_its_transpose(shape: tuple[int, int]) -> None:
    """shape: (out, in). The scale grows with out/in, whichever way the weight lies."""
    made = torch.Generator().manual_seed(7)
    weight, grad = (torch.randn(shape, generator=made) for _ in range(2))
    usual = ParamSpec("w", shape, ("mlp", "width"), "matrix", Init("normal", 1.0))
    flipped = replace(usual, shape=(shape[1], shape[0]), dims=("mlp", "width"), input_first=True)
    results = []
    for spec, lay in ((usual, lambda t: t), (flipped, lambda t: t.T)):
        master = lay(weight).reshape(-1).clone()
        shard = Shard(spec, 0, spec.numel, master, lay(grad).reshape(-1).clone(), None)
        build_optimizer(section(**OPTIONS), [shard], STEPS).step(1)
        results.append(lay(master.view(spec.shape)).contiguous())
    assert torch.equal(*results)
    scale = max(1.0, shape[0] / shape[1]) ** 0.5
    direction = (grad * 0.2).lerp(torch.zeros_like(grad).lerp(grad, 0.2), 0.8)
    want = weight * (1 - 0.3 * 0.2) - 0.3 * scale * orthogonalise(direction)
    torch.testing.assert_close(results[1], want, rtol=1e-5, atol=1e-5)


def test_a_rank_that_owns_nothing_takes_part_in_the_norm() -> None:
    group = Group("tp", (0, 1), 1, None, Ledger())
    spec = ParamSpec("n", (3,), ("width",), "norm", Init("constant", 1.0))
    shard = Shard(spec, 0, 3, torch.ones(3), torch.ones(3), group, ((0, 3), (0, 0)), owner=False)
    assert total_norm([shard]).item() == 0.0 and total_norm([shard], math.inf).item() == 0.0
    assert len(group.ledger.transfers()) == 1


@pytest.mark.parametrize(("dp", "tp"), LAYOUTS)
def test_predicted_ranges_are_what_ranks_own(dp: int, tp: int) -> None:
    by_rank = cuts(specs(), SECTION, tp, False)
    bucket = _bucket(0, [cut.local for cut in by_rank[0].values()], dp, True)
    for slot in bucket.slots:
        found = tiles_of(ranges_of(bucket, slot), [held[slot.spec.name] for held in by_rank])
        assert list(found) == [(a, b if cut.owner else a) for cut, a, b in held_ranges(dp, tp)[slot.spec.name]]
