"""What each collective sends: the formula, what the ledger counted, and what the loopback device counted.

    python examples/collectives.py --ranks 4 --mb 8

Forks N gloo ranks on this machine and runs each op once on a buffer of S bytes a rank. `formula` and `ledger` are
*logical* bytes: what one rank sends with a ring; they must be equal. `wire` is another number: what the kernel counted
as sent on the loopback device while the op ran, divided by N. Why the two differ stands below the table.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import torch
from torch import Tensor

from heptad.config.schema import LayoutSection
from heptad.launch.forked import forked
from heptad.mesh import collectives
from heptad.mesh.collectives import Group
from heptad.mesh.device import Mesh
from heptad.mesh.layout import Layout

FORMULA: dict[str, Callable[[int], Fraction]] = {  # bytes one of n ranks sends, in units of S (ring)
    "all_reduce": lambda n: Fraction(2 * (n - 1), n),
    "reduce_scatter": lambda n: Fraction(n - 1, n),
    "all_gather": lambda n: Fraction(n - 1, n),
    "broadcast": lambda n: Fraction(1),
    "all_to_all": lambda n: Fraction(n - 1, n),
    "send": lambda n: Fraction(1),
}
WHY = """\
wire / ledger: loopback counts each packet once, with 40 to 66 bytes of TCP/IP headers on up to 64 KiB, and the
  acknowledgements: about 0.1 %; every other process on loopback is counted too (run it on a quiet machine).
broadcast: the formula charges each rank one pass, S; in all N-1 copies travel, so the wire has (N-1)/N of it.
reduce_scatter: ours is an all-to-all and a sum in rank order; gloo's own would send all-reduce's bytes, twice these.
send: each rank sends S to the next one and receives S from the one before; the sender counts it."""
COUNTER = Path("/sys/class/net/lo/statistics/tx_bytes")


def run(op: str, whole: Tensor, other: Tensor, group: Group) -> None:
    """One `op` on `whole` [numel]; `other` is as large, for the ops that do not work in place."""
    share = whole.view(group.size, -1)[group.index].clone()
    works = {
        "all_reduce": lambda: [collectives.all_reduce(whole, group, "example")],
        "reduce_scatter": lambda: [collectives.reduce_scatter(share, whole, group, "example")],
        "all_gather": lambda: [collectives.all_gather(whole, share, group, "example")],
        "broadcast": lambda: [collectives.broadcast(whole, 0, group, "example")],
        "all_to_all": lambda: [collectives.all_to_all(other, whole, group, "example")],
        "send": lambda: [
            collectives.recv(other, (group.index - 1) % group.size, group, tag=0),
            collectives.send(whole, (group.index + 1) % group.size, group, "example", tag=0),
        ],
    }[op]()
    for work in works:
        work.wait()
    for work in works:
        work.wait_sent()


def one_rank(rank: int, num_ranks: int, numel: int) -> dict[str, tuple[int, int | None]]:
    """op -> (bytes on this rank's ledger, bytes sent on loopback by everyone meanwhile)."""
    mesh = Mesh(Layout.of(LayoutSection(dp_shard=num_ranks)), rank, [("dp_shard",)], torch.device("cpu"))
    group, counted = mesh.group("dp_shard"), {}
    for op in FORMULA:
        buffers = torch.ones(numel), torch.ones(numel)
        run(op, *buffers, group)  # the first use opens connections
        mesh.ledger.reset()
        time.sleep(0.05)  # late acknowledgements of what came before
        collectives.barrier(group, timeout_s=30)
        before = int(COUNTER.read_text()) if COUNTER.exists() else None
        collectives.barrier(group, timeout_s=30)
        run(op, *buffers, group)
        collectives.barrier(group, timeout_s=30)
        wire = None if before is None else int(COUNTER.read_text()) - before
        counted[op] = sum(item.num_bytes for item in mesh.ledger.transfers()), wire
    return counted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4, help="N, at least 2")
    parser.add_argument("--mb", type=float, default=8.0, help="S in MB, rounded up to a multiple of N elements")
    args = parser.parse_args()
    numel = -(-round(args.mb * 1e6 / 4) // args.ranks) * args.ranks
    ranks = forked(args.ranks, one_rank, args.ranks, numel)
    print(f"N = {args.ranks} ranks, S = {4 * numel:,} bytes (fp32); bytes one rank sends:")
    print(f"{'op':<14} {'of S':>5} {'formula':>12} {'ledger':>12} {'wire':>12}  wire / ledger")
    for op, fraction in FORMULA.items():
        formula = int(fraction(args.ranks) * 4 * numel)
        ledger, wire = ranks[0][op]
        assert all(rank[op][0] == formula for rank in ranks), f"{op}: formula {formula}, ledger {ledger}"
        seen = "no counter" if wire is None else f"{wire // args.ranks:,}"
        ratio = "-" if wire is None else f"{wire / args.ranks / ledger:.3f}"
        print(f"{op:<14} {fraction(args.ranks)!s:>5} {formula:>12,} {ledger:>12,} {seen:>12}  {ratio}")
    print(f"formula == ledger on every rank\n{WHY}")
    if not COUNTER.exists():
        print(f"There is no {COUNTER} here, so nothing is known of the wire.")


if __name__ == "__main__":
    main()
