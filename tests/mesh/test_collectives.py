"""Every collective's result, its ledger entry, the order of sums, and what happens when ranks disagree."""

from __future__ import annotations

import pytest
import torch

from heptad.config.schema import LayoutSection
from heptad.launch.forked import RankFailed, forked
from heptad.mesh import collectives
from heptad.mesh.collectives import Group
from heptad.mesh.device import Mesh
from heptad.mesh.layout import Layout
from heptad.units import sent_bytes

AXIS = ("dp_shard",)


def group_of(rank: int, num_ranks: int) -> Group:
    return Mesh(Layout.of(LayoutSection(dp_shard=num_ranks)), rank, [AXIS], torch.device("cpu")).group(*AXIS)


def every_collective(rank: int, num_ranks: int, length: int) -> list[tuple[str, int]]:
    group = group_of(rank, num_ranks)
    mine = torch.arange(length, dtype=torch.float64) + 1000 * rank
    everyone = torch.stack([torch.arange(length, dtype=torch.float64) + 1000 * r for r in range(num_ranks)])

    full = torch.empty(num_ranks * length, dtype=torch.float64)
    work = collectives.all_gather(full, mine, group, "test")
    work.wait()
    work.wait_sent()
    assert torch.equal(full.view(num_ranks, -1), everyone)

    in_place = torch.zeros_like(full)
    own = in_place.view(num_ranks, -1)[rank]
    own.copy_(mine)
    collectives.all_gather(in_place, own, group, "test").wait()
    assert torch.equal(in_place, full)

    shard = torch.ones(length, dtype=torch.float64)
    for accumulate, start in ((False, 0.0), (True, 1.0)):
        shard.fill_(1.0)
        work = collectives.reduce_scatter(shard, full.clone() * (rank + 1), group, "test", accumulate)
        work.wait()
        work.wait_sent()
        assert torch.equal(shard, everyone[rank] * sum(range(1, num_ranks + 1)) + start)

    for op, want in (("sum", everyone.sum(0)), ("max", everyone.max(0).values), ("min", everyone.min(0).values)):
        tensor = mine.clone()
        collectives.all_reduce(tensor, group, "test", op).wait()  # type: ignore[arg-type]
        assert torch.equal(tensor, want)

    tensor = mine.clone()
    collectives.broadcast(tensor, num_ranks - 1, group, "test").wait()
    assert torch.equal(tensor, everyone[-1])

    out = torch.empty_like(full)
    collectives.all_to_all(out, full * (rank + 1), group, "test").wait()
    assert torch.equal(out.view(num_ranks, -1), torch.stack([everyone[rank] * (r + 1) for r in range(num_ranks)]))

    if num_ranks > 1:
        received = torch.empty(length, dtype=torch.float64)
        get = collectives.recv(received, (rank - 1) % num_ranks, group, tag=7)
        put = collectives.send(mine, (rank + 1) % num_ranks, group, "test", tag=7)
        get.wait()
        put.wait_sent()
        assert torch.equal(received, everyone[(rank - 1) % num_ranks])
    collectives.barrier(group, timeout_s=10)
    return [(transfer.op, transfer.num_bytes) for transfer in group.ledger.transfers()]


def summed(rank: int, num_ranks: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    group, generator = group_of(rank, num_ranks), torch.Generator().manual_seed(rank)
    tensor = torch.randn(shape, generator=generator, dtype=dtype)
    later = torch.full((3,), float(rank))
    works = [collectives.all_reduce(tensor, group, "test"), collectives.all_reduce(later, group, "test", "max")]
    for work in reversed(works):  # two under way, waited for in another order
        work.wait()
    assert torch.equal(later, torch.full((3,), float(num_ranks - 1)))
    return tensor


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("shape", [(), (7, 5), (collectives.EXCHANGE_BYTES // 4, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_all_reduce_has_the_same_bits_on_every_rank(
    num_ranks: int, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    first, *others = forked(num_ranks, summed, num_ranks, shape, dtype)
    assert all(torch.equal(first, other) for other in others)
    parts = [torch.randn(shape, generator=torch.Generator().manual_seed(r), dtype=dtype) for r in range(num_ranks)]
    if num_ranks == 2:
        assert torch.equal(first, parts[0] + parts[1])


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_results_and_ledger(num_ranks: int) -> None:
    length = 13
    shard, full = 8 * length, 8 * length * num_ranks
    times = {"all_gather": 2, "reduce_scatter": 2, "all_reduce": 3, "broadcast": 1, "all_to_all": 1, "send": 1}
    sizes = {"all_reduce": shard, "broadcast": shard, "send": shard}
    want = [(op, times[op] * sent_bytes(op, sizes.get(op, full), num_ranks)) for op in sorted(times)]
    for counted in forked(num_ranks, every_collective, num_ranks, length):
        assert counted == (want if num_ranks > 1 else [])


def sum_of_ones(rank: int, num_ranks: int, dtype: torch.dtype) -> float:
    group = group_of(rank, num_ranks)
    shard = torch.zeros(1, dtype=torch.float32)
    work = collectives.reduce_scatter(
        shard, torch.full((num_ranks,), 256.0 if rank == 0 else 1.0, dtype=dtype), group, "t"
    )
    work.wait()
    work.wait_sent()
    return shard.item()


def rows_of(source: int, target: int, number: int, dtype: torch.dtype) -> torch.Tensor:
    """[number, 3] of which every element says where it comes from and where it goes."""
    return (torch.arange(3 * number).view(number, 3) + 100 * source + 1000 * target).to(dtype)


def variable_rows(rank: int, counts: list[list[int]], dtype: torch.dtype) -> list[tuple[str, int, int]]:
    """counts[source][target] rows from each rank to each."""
    number = len(counts)
    group, ranks = group_of(rank, number), range(number)
    sent, come = counts[rank], [row[rank] for row in counts]
    going = torch.cat([rows_of(rank, target, sent[target], dtype) for target in ranks])
    works, outs = [], []
    for _ in range(2):  # two under way, waited for in another order
        outs.append(torch.full((sum(come), 3), -1).to(dtype))
        works.append(collectives.all_to_all_rows(outs[-1], going, sent, come, group, "rows"))
    for work in reversed(works):
        work.wait()
        work.wait_sent()
    expected = torch.cat([rows_of(source, rank, come[source], dtype) for source in ranks])
    assert all(torch.equal(out, expected) for out in outs)

    held = [row[0] for row in counts]
    every = torch.full((sum(held), 3), -1).to(dtype)
    work = collectives.all_gather_rows(every, rows_of(rank, 0, held[rank], dtype), held, group, "rows")
    work.wait()
    work.wait_sent()
    assert torch.equal(every, torch.cat([rows_of(source, 0, held[source], dtype) for source in ranks]))

    mine = torch.full((held[rank], 3), -1).to(dtype)
    work = collectives.reduce_scatter_rows(mine, every * 2**rank, held, group, "rows")
    work.wait()
    work.wait_sent()
    assert torch.equal(mine, (rows_of(rank, 0, held[rank], dtype).double() * (2**number - 1)).to(dtype))
    return [(item.op, item.num_bytes, item.count) for item in group.ledger.transfers()]


COUNTS = {
    "one rank": [[3]],
    "two ranks": [[2, 5], [1, 0]],
    "all to the first": [[4, 0, 0], [3, 0, 0], [5, 0, 0]],
    "nothing at all": [[0, 0], [0, 0]],
    "four ranks": [[1, 0, 7, 2], [0, 0, 0, 0], [3, 5, 0, 1], [2, 2, 2, 0]],
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("name", COUNTS)
def test_rows_in_numbers_that_differ(name: str, dtype: torch.dtype) -> None:
    counts = COUNTS[name]
    number, row = len(counts), 3 * dtype.itemsize
    held = [row_[0] for row_ in counts]
    for rank, counted in enumerate(forked(number, variable_rows, counts, dtype)):
        leave = sum(counts[rank]) - counts[rank][rank]
        others = sum(held) - held[rank]
        want = [
            ("all_gather", (number - 1) * held[rank] * row, 1),
            ("all_to_all", 2 * leave * row, 2),
            ("reduce_scatter", others * row, 1),
        ]
        assert counted == (want if number > 1 else [])


def gathered_along_two_axes(rank: int, section: LayoutSection) -> tuple[tuple[int, ...], list[float]]:
    axes = ("dp_shard", "cp")
    group = Mesh(Layout.of(section), rank, [axes], torch.device("cpu")).group(*axes)
    full = torch.empty(group.size, dtype=torch.float64)
    work = collectives.all_gather(full, torch.tensor([float(rank)], dtype=torch.float64), group, "test")
    work.wait()
    work.wait_sent()
    return group.ranks, full.tolist()


def test_a_group_along_two_axes_has_its_own_order_whatever_that_of_the_ranks() -> None:
    """`cp` outside of `dp_shard`: the group is ordered by dp_shard first, its ranks do not ascend."""
    section = LayoutSection(dp_shard=2, cp=2, order="pp-dp_replicate-cp-dp_shard-tp")
    for ranks, values in forked(4, gathered_along_two_axes, section):
        assert list(ranks) == values == [0, 2, 1, 3]


def test_c_045_sixteen_bit_transport_is_summed_in_fp32() -> None:
    """A running bf16 sum of 256 and ones stays at 256; ours has every one of them."""
    assert torch.tensor(256.0, dtype=torch.bfloat16) + 1 == 256
    assert forked(4, sum_of_ones, 4, torch.bfloat16) == [259.0] * 4


def another_order(rank: int) -> None:
    group = group_of(rank, 2)
    a, b = torch.full((2,), 1.0), torch.full((2,), 2.0)
    full = torch.empty(4)
    if rank == 0:
        collectives.all_gather(full, a, group, "t").wait()
    else:
        group.tag()  # this rank believes one collective is already over
        collectives.all_gather(full, b, group, "t").wait()


def test_ranks_that_disagree_on_the_order_time_out_instead_of_mixing_values() -> None:
    with pytest.raises(RankFailed, match=r"(?i)timed? ?out|still running"):
        forked(2, another_order, timeout_s=2.0)


def group_count(rank: int) -> int:
    import torch.distributed as dist

    before = len(dist.distributed_c10d._world.pg_map)
    axes = [
        AXIS,
        ("dp_replicate",),
        ("dp_replicate", "dp_shard"),
        ("dp_shard", "cp"),
        ("dp_replicate", "dp_shard", "cp"),
    ]
    Mesh(Layout.of(LayoutSection(dp_replicate=2, dp_shard=2)), rank, axes, torch.device("cpu"))
    return len(dist.distributed_c10d._world.pg_map) - before


def test_groups_are_made_once_a_set_of_ranks() -> None:
    """Two shard groups, two replica groups and the whole; a rank is a member of three of them."""
    assert forked(4, group_count) == [3] * 4


def exits(rank: int, how: str) -> None:
    if rank == 1:
        raise ValueError("the first error") if how == "raise" else SystemExit(3)
    torch.distributed.barrier()


@pytest.mark.parametrize("how", ["raise", "exit"])
def test_a_failing_rank_ends_all_and_is_named(how: str) -> None:
    with pytest.raises(RankFailed, match=r"rank 1 failed:\n(.|\n)*(the first error|SystemExit)"):
        forked(3, exits, how, timeout_s=20)
