"""Which rank holds which experts when some are chosen more often than others: hot ones get copies. Pure, numpy.

From the measured load of each expert: how many copies each gets, and where they lie, every slot of every rank used. A
copy of expert e takes load(e) / copies(e), so its tokens are dealt evenly over its copies. Nodes hold whole groups of
experts where a router is limited to some groups, so that a token still crosses to as few nodes.

1. *Copies.* Each expert has one; each slot that is left goes to the expert whose copies are heaviest, at most one a
   rank. No other choice has lighter heaviest copies: w, their load, is at most max(m, T / (N - E + 1)), with T the load
   of all E experts, N = R·S slots and m = T / R the mean load of a rank. (Who got its last copy had copies of w or more
   before, so load(e) >= w·(copies(e) - 1) for all and w·copies(e) for the heaviest: T >= w·(N - E + 1). Who has
   a copy on each rank has copies of at most m.)
2. *Ranks.* Copies in order of load, dealt to ranks 0 to R - 1 round after round: every rank gets S, and the copies of
   one expert, which are neighbours, lie on different ranks. A rank's copy of a round is no lighter than the next rank's
   and no heavier than what the last rank got in the round before, so the first rank has the most and at most w more
   than the last: heaviest <= m + (1 - 1/R)·w. Both m and w are what no placement can go below: so that is at most
   (2 - 1/R) times the best possible, as of list scheduling.
3. Copies are exchanged between the heaviest rank and another as long as that makes both lighter than it was.

With groups, step 2 and 3 first deal groups to nodes, then each node is placed for itself; both bounds hold in turn.
Where ranks have more slots than there are experts, a rank has up to ⌈S/E⌉ copies of one.

Sources: redundant experts, DeepSeek-V3, arXiv 2412.19437, §3.4; balance over groups, GShard, arXiv 2006.16668; the
bound, Graham, SIAM J. Appl. Math. 17 (1969). Example: examples/placement.py.
"""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import ArrayLike, NDArray

from heptad.errors import ConfigError

Loads = NDArray[np.float64]
Slots = NDArray[np.int64]
"""[..., R, S]: the expert in each slot of each rank."""


def place(loads: ArrayLike, ranks: int, slots: int, nodes: int = 1, groups: int = 1) -> Slots:
    """Experts of each slot [R, S], those of a rank ascending; [layers, R, S] for loads [layers, E].

    loads: tokens (or any measure) of each expert, not negative. slots: experts a rank holds. nodes: of neighbouring
    ranks, each of which holds `groups`/`nodes` whole groups of neighbouring experts; 1: an expert lies anywhere.
    ConfigError where sizes do not go together. The same loads give the same placement.
    """
    every = np.asarray(loads, dtype=np.float64)
    _check(every, ranks, slots, nodes, groups)
    if every.ndim == 2:
        return np.stack([place(layer, ranks, slots, nodes, groups) for layer in every])
    if nodes == 1:
        return _placed(every, ranks, slots)
    members = np.arange(every.size).reshape(groups, -1)
    found = []
    for mine in _placed(every[members].sum(1), nodes, groups // nodes):
        experts = members[mine].ravel()
        found.append(experts[_placed(every[experts], ranks // nodes, slots)])
    return np.sort(np.concatenate(found))


def in_order(number: int, ranks: int) -> Slots:
    """The placement without measurement: ⌈E/R⌉ neighbours a rank [R, E/R]; of experts that ranks divide."""
    if number % ranks:
        raise ConfigError.of("ranks", ranks, f"it divides the {number} experts", f"a divisor of {number}")
    return np.arange(number).reshape(ranks, -1)


def copies(placed: Slots, number: int) -> Slots:
    """How many there are of each expert [E], of one layer's placement."""
    return np.bincount(placed.ravel(), minlength=number)


def rank_loads(loads: ArrayLike, placed: Slots) -> Loads:
    """Load of each rank [R] of one layer's placement: of each of its copies the expert's load over all its copies."""
    every = np.asarray(loads, dtype=np.float64)
    share: Loads = (every / copies(placed, every.size))[placed].sum(1)
    return share


def bound(loads: ArrayLike, ranks: int, slots: int) -> float:
    """What the heaviest rank has at most (steps 1 and 2, one node): m + (1 - 1/R)·max(m, T/(N - E + 1))."""
    every = np.asarray(loads, dtype=np.float64)
    mean = every.sum() / ranks
    return float(mean + (1 - 1 / ranks) * max(mean, every.sum() / (ranks * slots - every.size + 1)))


def _check(loads: Loads, ranks: int, slots: int, nodes: int, groups: int) -> None:
    number = loads.shape[-1] if loads.ndim in (1, 2) else 0
    if not number or not np.isfinite(loads).all() or (loads < 0).any():
        rule = "one finite number, not negative, for each expert: [E] or [layers, E]"
        raise ConfigError.of("loads", list(loads.shape), rule, "what a router has counted")
    for field, value, total, of in (("nodes", nodes, ranks, "ranks"), ("groups", groups, number, "experts")):
        if value < 1 or total < 1 or total % value:
            raise ConfigError.of(field, value, f"it divides the {total} {of}", f"a divisor of {total}")
    if nodes > 1 and groups % nodes:
        rule = f"each of {nodes} nodes holds as many whole groups"
        raise ConfigError.of("groups", groups, rule, f"a multiple of {nodes}, or nodes = 1, where groups mean nothing")
    if ranks * slots < number:
        rule = f"each of {number} experts has a slot: {ranks} ranks × {slots} slots are {ranks * slots}"
        raise ConfigError.of("slots", slots, rule, f"slots = {-(-number // ranks)} or more")


def _placed(loads: Loads, ranks: int, slots: int) -> Slots:
    """Steps 1 to 3."""
    number = _copies(loads, ranks, slots)
    each = loads / number
    order = np.lexsort((np.arange(loads.size), -each))
    dealt = np.repeat(order, number[order]).reshape(slots, ranks).T
    return np.sort(_exchanged(dealt.copy(), each))


def _copies(loads: Loads, ranks: int, slots: int) -> Slots:
    """Step 1; of experts whose copies are as heavy, the one with fewer copies, then the lower one."""
    number = np.ones(loads.size, dtype=np.int64)
    most = ranks * -(-slots // loads.size)
    heap = [(-float(load), 1, expert) for expert, load in enumerate(loads)]
    heapq.heapify(heap)
    for _ in range(ranks * slots - loads.size):
        while number[heap[0][2]] == most:
            heapq.heappop(heap)
        expert = heap[0][2]
        number[expert] += 1
        heapq.heapreplace(heap, (-float(loads[expert] / number[expert]), int(number[expert]), expert))
    return number


def _exchanged(placed: Slots, each: Loads) -> Slots:
    """Step 3, in place. each: load of one copy of each expert. Squares of the loads fall, so it ends."""
    loads = each[placed].sum(1)
    while True:
        top = int(loads.argmax())
        change = each[placed[top]][:, None, None] - each[placed]  # [S of the heaviest, R, S]: what it would lose
        after = np.maximum(loads[top] - change, loads[:, None] + change)
        here = (placed[top][:, None] == placed[None, :, :].reshape(1, -1)).any(0).reshape(placed.shape)  # top has it
        there = (placed[top][:, None, None] == placed).any(2)  # they have what it would give
        useless = (change <= 0) | here | there[:, :, None] | (after >= loads[top] * (1 - 1e-12))
        after[useless] = np.inf
        best = int(after.argmin())
        mine, rank, theirs = np.unravel_index(best, after.shape)
        if not np.isfinite(after[mine, rank, theirs]):
            return placed
        placed[top, mine], placed[rank, theirs] = placed[rank, theirs], placed[top, mine]
        loads = each[placed].sum(1)
