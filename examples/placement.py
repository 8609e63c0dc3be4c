"""Experts placed by their load: how heavy each rank is before and after, and which experts get copies.

    python examples/placement.py --experts 32 --ranks 8 --slots 5 --nodes 2 --groups 4

Loads follow Zipf's law in a drawn order (`--skew`: its exponent), as those of a router that has not learned to balance;
put in what yours has counted (`Router.loads`). Nothing runs but numpy.
"""

from __future__ import annotations

import argparse

import numpy as np

from heptad.axes.expert.placement import bound, copies, in_order, place, rank_loads


def shown(name: str, loads: np.ndarray) -> None:
    """Loads of the ranks as bars, relative to their mean."""
    print(f"\n{name}: the heaviest rank has {loads.max() / loads.mean():.2f} times the mean")
    for rank, load in enumerate(loads):
        print(f"  rank {rank:3d}  {load / loads.mean():5.2f}  {'#' * round(20 * load / loads.mean())}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--slots", type=int, default=5, help="experts a rank holds")
    parser.add_argument("--nodes", type=int, default=1, help="each holds whole groups")
    parser.add_argument("--groups", type=int, default=1)
    parser.add_argument("--skew", type=float, default=0.9)
    asked = parser.parse_args()
    loads = np.random.default_rng(0).permutation(1e4 / np.arange(1, asked.experts + 1) ** asked.skew)
    placed = place(loads, asked.ranks, asked.slots, asked.nodes, asked.groups)
    shown("in order of their numbers, one copy each", rank_loads(loads, in_order(asked.experts, asked.ranks)))
    shown(f"placed by load, {asked.slots} slots a rank", rank_loads(loads, placed))
    if asked.nodes == 1:
        mean = loads.sum() / asked.ranks
        print(f"\nproven for these sizes, whatever the loads: {bound(loads, asked.ranks, asked.slots) / mean:.2f}")
    number = copies(placed, asked.experts)
    hot = [
        f"{expert} ({loads[expert] / loads.mean():.1f} × the mean) {number[expert]}" for expert in np.argsort(-loads)
    ]
    print(f"\ncopies: {', '.join(entry for entry in hot if not entry.endswith(' 1'))}; all others one")
    for rank, experts in enumerate(placed):
        print(f"  rank {rank:3d} holds {' '.join(map(str, experts))}")


if __name__ == "__main__":
    main()
