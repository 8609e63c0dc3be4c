"""The lines of the table that need a slow link: two nodes in a box (`netbox.py`), 200 Mbit/s, 1 or 2 ranks each.

How much a rank computes is set so that compute alone takes about twice what communication alone takes, both
measured here: compute is Heptad's step of one rank, run by all ranks at once without a process group; communication
is the step's own program with its compute actions left out. The bound no engine can beat is then max(compute,
communication) plus the first gather and the last reduction, which nothing can hide.
"""

from __future__ import annotations

import statistics
from dataclasses import replace

import torch
from benchmarks.lines import Effort, Row, launches, row_of
from benchmarks.measure import Times, alternate, ratio
from benchmarks.netbox import Netbox
from benchmarks.peers import Contender, Ours, Size, check, ddp, fsdp2, job_of
from benchmarks.ranks import launch

from heptad.mesh.collectives import Group, all_gather, all_reduce, reduce_scatter
from heptad.mesh.ledger import Ledger
from heptad.schedule.action import COMPUTE, Action, Kind

RATE = "200mbit"
LINK = Size(layers=6, width=128, heads=4, mlp_width=344, vocab=2048, seq_len=128, sequences=8)
WANTED = 2.0  # compute ÷ communication
BUCKET = {"bucket_mb": 0.0, "prefetch": 2}
"""One block a bucket (the default joins blocks below 1 MB): what is exposed at both ends of a step is shorter."""


class Communication:
    """The communication actions of Heptad's step (or some of them) without its compute."""

    def __init__(self, ours: Ours, name: str, part: str = "all") -> None:
        self.name, self.engine = name, ours.trainer.engine
        actions = [action for action in ours.trainer.program if action.kind not in COMPUTE | {Kind.UPDATE}]
        if part == "first gather":
            bucket = actions[0].index
            self.actions = [Action(kind, bucket, 0) for kind in (Kind.GATHER, Kind.WAIT_GATHER, Kind.DROP)]
        elif part == "last reduction":
            bucket = [action.index for action in actions if action.kind is Kind.REDUCE][-1]
            self.actions = [Action(kind, bucket, 0) for kind in (Kind.REDUCE, Kind.WAIT_REDUCE)]
        else:
            self.actions = actions

    def step(self, number: int) -> float:
        self.engine.begin_step()
        for action in self.actions:
            self.engine.act(action, "backward")
        return 0.0


def _bounds(rank: int, size: Size) -> list[Contender]:
    """What bounds a step: compute alone, communication alone, its two ends that cannot be hidden."""
    moving = Ours(replace(size, sequences=1), rank, job_of(size, torch.distributed.get_world_size(), 3, **BUCKET))
    return [
        Ours(size, 0, job_of(size, 1, 3), name="compute"),
        Communication(moving, "communication"),
        *(Communication(moving, part, part) for part in ("first gather", "last reduction")),
    ]


def _calibrate(rank: int, size: Size) -> Times:
    return alternate(_bounds(rank, size), rounds=3, steps=1, warmup=1)


def fitted(per_node: int, box: Netbox) -> Size:
    """LINK with as many sequences a rank as make compute WANTED times communication."""
    probe = LINK.tokens(LINK.seq_len, 16 // per_node)
    seen = launch(per_node * box.nodes, _calibrate, probe, box=box)[0]
    share = statistics.median(seen["compute"]) / statistics.median(seen["communication"])
    return LINK.tokens(LINK.seq_len, max(1, round(probe.sequences * WANTED / share)))


def _all(rank: int, size: Size) -> list[Contender]:
    world = torch.distributed.get_world_size()
    ours = Ours(size, rank, job_of(size, world, 3, **BUCKET))
    return [ours, fsdp2(size, rank), ddp(size, rank, 5), ddp(size, rank, 25)]


def _with_bounds(rank: int, size: Size, rounds: int) -> Times:
    contenders = _all(rank, size)
    check(contenders, steps=1)
    return alternate([*contenders, *_bounds(rank, size)], rounds, steps=1, warmup=1)


def slow_link(effort: Effort) -> list[Row]:
    """Stage 3 against FSDP2, DDP and the bound, 2 × 1 and 2 × 2."""
    rows = []
    for per_node in (1, 2):
        with Netbox(2, RATE) as box:
            size = fitted(per_node, box)
            runs = [
                launch(2 * per_node, _with_bounds, size, max(3, effort.rounds), box=box)[0]
                for _ in range(min(2, effort.launches))
            ]
        for times in runs:
            times["bound"] = [
                max(compute, moving) + first + last
                for compute, moving, first, last in zip(
                    *(times[key] for key in ("compute", "communication", "first gather", "last reduction")), strict=True
                )
            ]
        median = {name: statistics.median(t for times in runs for t in times[name]) for name in runs[0]}
        share = median["compute"] / median["communication"]
        where = f"2 nodes × {per_node}, 200 Mbit/s"
        note = f"{size.sequences} × {size.seq_len} tokens a rank, compute ÷ communication {share:.2f}"
        rows.append(row_of(f"stage 3 ÷ torch FSDP2, {where}", ratio(runs, "heptad", ["fsdp2"]), 0.65, note=note))
        rows.append(row_of(f"stage 3 ÷ torch DDP, {where}", ratio(runs, "heptad", ["ddp5", "ddp25"]), 0.95))
        parts = ", ".join(f"{name} {1e3 * median[name]:.0f} ms" for name in list(median)[4:8])
        rows.append(row_of(f"stage 3 ÷ what bounds it, {where}", ratio(runs, "heptad", ["bound"]), 1.10, note=parts))
    return rows


def _hybrid(rank: int, size: Size) -> list[Contender]:
    return [
        Ours(size, rank, job_of(size, 4, 3, dp_replicate=2, dp_shard=2, **BUCKET)),
        Ours(size, rank, job_of(size, 4, 3, **BUCKET), name="stage3"),
    ]


def hybrid(effort: Effort) -> list[Row]:
    """HSDP (shards inside a node, replicas across) against stage 3 over all ranks, few tokens."""
    with Netbox(2, RATE) as box:
        few = Effort(min(2, effort.launches), max(3, effort.rounds), 1)
        runs = launches(4, LINK.tokens(16), _hybrid, few, box)
    return [
        row_of("HSDP ÷ stage 3, 2 nodes × 2, 200 Mbit/s, 16 tokens a rank", ratio(runs, "heptad", ["stage3"]), 0.50)
    ]


def _collective(rank: int, op: str, numel: int, times: int) -> int:
    world = torch.distributed.get_world_size()
    group = Group("dp_shard", tuple(range(world)), rank, torch.distributed.new_group(list(range(world))), Ledger())
    full = torch.ones(numel)
    shard = full.view(world, -1)[rank].clone()
    for _ in range(times):
        if op == "all_gather":
            work = all_gather(full, shard, group, "forward")
        elif op == "reduce_scatter":
            work = reduce_scatter(shard, full, group, "backward")
        else:
            work = all_reduce(full, group, "backward")
        work.wait()
        work.wait_sent()
    return sum(transfer.num_bytes for transfer in group.ledger.transfers())


def wire(effort: Effort) -> list[Row]:
    """Bytes on a node's card ÷ the ledger's logical bytes of its ranks, messages of 16 MB."""
    rows, times = [], 4
    for per_node in (1, 2):
        for op in ("all_gather", "reduce_scatter", "all_reduce"):
            with Netbox(2, "2gbit") as box:
                launch(2 * per_node, _collective, op, 1 << 22, 0, box=box)
                before = box.sent_bytes()[0]
                logical = sum(launch(2 * per_node, _collective, op, 1 << 22, times, box=box)[:per_node])
                on_card = box.sent_bytes()[0] - 2 * before  # the second launch's own start-up costs `before` again
            what = f"card ÷ ledger, {op}, 2 nodes × {per_node}"
            rows.append(Row(what, on_card / logical, note=_EXPLAINED[per_node, op]))
    return rows


_HEADERS = (
    "every logical byte crosses once; the rest is TCP/IP and Ethernet headers of 9000-byte frames, acknowledgements"
)
_DIRECT = "point to point: of a rank's 3 messages 2 leave the node, so two thirds of the logical bytes cross"
_RING = "gloo's ring: one of a node's two ranks sends to the other node, so half of the logical bytes cross"
_EXPLAINED = {
    (1, "all_gather"): _HEADERS,
    (1, "reduce_scatter"): _HEADERS,
    (1, "all_reduce"): _HEADERS,
    (2, "all_gather"): _DIRECT,
    (2, "reduce_scatter"): _DIRECT,
    (2, "all_reduce"): _RING,
}
