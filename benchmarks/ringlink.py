"""The ring over a slow link: its time against what bounds it, two nodes in a box (`netbox.py`) with a rank each.

Compute alone is the ring with each hop copied in place of sent, transfer alone its messages without its blocks, both
on both nodes at once. No order of work is faster than the longer of the two. With two ranks not all of a message can
hide: keys of the other rank travel while own blocks are computed, half of the work, and in the backward gradients
travel under the second half of own blocks only. `predicted` says what these orders allow, from the ring's volumes: it
reaches compute alone where compute is 7/3 of transfer or more, and is 1.5 times the bound where both are equal.
Read next: `attention.py`, `heptad/axes/context/ring.py`.
"""

from __future__ import annotations

import statistics
from dataclasses import replace

from benchmarks.attention import Case, Compute, Side, Transfer, alike
from benchmarks.lines import Effort, Row, row_of
from benchmarks.measure import Times, alternate, ratio
from benchmarks.netbox import Netbox
from benchmarks.ranks import launch

from heptad.axes.context.cost import Sizes

RATE, BITS_PER_S = "200mbit", 200e6
LINK = Case(8192)
WANTED = (3.0, 1.0)
"""Compute ÷ transfer: where all of a ring's messages can hide, and where they weigh most."""


def sent_bytes(case: Case, ranks: int) -> int:
    """What one rank sends forward and backward, by the formulas (fp32)."""
    sizes = Sizes(ranks, 1, False, case.length // ranks, case.heads, case.kv_heads, case.head_dim, 4)
    return sum(transfer.num_bytes for transfer in (*sizes.forward(), *sizes.backward()))


def predicted(compute_s: float, transfer_s: float) -> float:
    """Seconds of a ring of two: a forward is 2/7 of compute and half of it own blocks, a hop a third of transfer."""
    forward, backward, hop = compute_s * 2 / 7, compute_s * 5 / 7, transfer_s / 3
    return max(forward / 2, hop) + forward / 2 + 2 * max(backward / 4, hop) + backward / 2


def bounds(rank: int, case: Case, rounds: int) -> Times:
    """Compute alone and transfer alone."""
    return alternate([Compute(rank, case, "compute"), Transfer(rank, case, "transfer")], rounds, steps=1, warmup=1)


def against_bounds(rank: int, case: Case, rounds: int) -> Times:
    """The ring beside them; its bytes are asserted to be the formula's."""
    ring = Side(rank, case, "ring")
    alike([ring, Side(rank, case, "gather", context="gather")])
    ring.mesh.ledger.reset()
    ring.step(0)
    counted = sum(transfer.num_bytes for transfer in ring.mesh.ledger.transfers())
    assert counted == sent_bytes(case, ring.section.cp), counted
    sides = [ring, Compute(rank, case, "compute"), Transfer(rank, case, "transfer")]
    return alternate(sides, rounds, steps=1, warmup=1)


def fitted(wanted: float, box: Netbox) -> Case:
    """LINK with as many tokens as make compute `wanted` times transfer: one grows with L², the other with L."""
    seen = launch(2, bounds, LINK, 3, box=box)[0]
    share = statistics.median(seen["compute"]) / statistics.median(seen["transfer"])
    return replace(LINK, length=max(64, 64 * round(LINK.length * wanted / share / 64)))


def row(case: Case, runs: list[Times], limit: float | None) -> Row:
    """Ring ÷ max(compute, transfer), pair by pair."""
    for times in runs:
        times["bound"] = [max(pair) for pair in zip(times["compute"], times["transfer"], strict=True)]
    medians = {name: statistics.median(t for times in runs for t in times[name]) for name in runs[0]}
    compute, transfer = medians["compute"], medians["transfer"]
    least, num_bytes = predicted(compute, transfer), sent_bytes(case, 2)
    note = (
        f"{case.length} tokens; compute {1e3 * compute:.0f} ms, transfer {1e3 * transfer:.0f} ms (by formula "
        f"{num_bytes / 1e6:.2f} MB, {8e3 * num_bytes / BITS_PER_S:.0f} ms); a ring of two that hides all it can takes "
        f"{1e3 * least:.0f} ms, {least / max(compute, transfer):.2f} of the bound"
    )
    what = (
        f"ring attention ÷ max(compute, transfer), compute ÷ transfer {compute / transfer:.1f}, 2 nodes × 1, 200 Mbit/s"
    )
    return row_of(what, ratio(runs, "ring", ["bound"]), limit, note=note)


def over_link(effort: Effort) -> list[Row]:
    """C = 2, at both shares of compute."""
    rows = []
    for wanted, limit in zip(WANTED, (1.10, None), strict=True):
        with Netbox(2, RATE) as box:
            case = fitted(wanted, box)
            repeats = min(2, effort.launches)
            runs = [launch(2, against_bounds, case, max(3, effort.rounds), box=box)[0] for _ in range(repeats)]
        rows.append(row(case, runs, limit))
    return rows
