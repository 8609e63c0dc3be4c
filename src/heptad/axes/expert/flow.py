"""How many rows each rank sends to each other: exactly, from the choices of all ranks, or expected, without them. Pure.

A `Flow` is of one mixture, one micro-batch and one block: the dp_shard × cp × tp ranks from which expert axes are
carved. `flow_of` counts it in what the router chose, each rank by itself (`counted`); `expected` knows no choice and
takes them to be even: each token K different experts, all as likely. A rank with E_q of E experts then gets the share
E_q / E of all choices. A node with E_v of them is crossed to by the share 1 - C(E - E_v, K) / C(E, K) of tokens; a
router that is limited to G' of G groups of experts chooses groups first, all as likely, then K of their experts
(`miss`). Real routing is uneven; this is its mean. Read next: `cost.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import comb

import numpy as np
import numpy.typing as npt

from heptad.config.schema import Job
from heptad.mesh.layout import BLOCK, Layout
from heptad.precision.dtypes import Dtypes
from heptad.recompute.sizes import Dispatched
from heptad.units import BYTES_PER_ELEMENT

Chosen = npt.NDArray[np.int64]
"""The experts of a rank's tokens [n, K], -1 where a choice is not kept."""
Counts = npt.NDArray[np.int64]
"""Of one rank's tokens at one router, for each node: how many go there, then how many of their choices to each place in
it, [nodes, 1 + inside]."""
Calls = Mapping[str, npt.NDArray[np.int64]]
"""Of one rank in a step: router -> `Counts` of each call, in the order of calls, which the ranks of a block share."""


@dataclass(frozen=True, slots=True)
class Routed:
    """Where the tokens of all ranks of a block went in a step, in the order of their numbers; rank: whose transfers are
    asked for."""

    rank: int
    calls: Sequence[Calls]


@dataclass(frozen=True, slots=True)
class Sizes:
    """ranks: of a block. inside: "ep" ranks of a node, all of them with one level. experts: E, choices: K, width: D;
    bytes of an element of the stream and of a gate weight. groups, limit: of the router."""

    ranks: int
    ep: int
    etp: int
    inside: int
    experts: int
    choices: int
    width: int
    element_bytes: int
    wide_bytes: int
    groups: int = 1
    limit: int = 1

    @classmethod
    def of(cls, job: Job, dtypes: Dtypes) -> Sizes:
        """Those of a resolved job."""
        layout, model = job.layout, job.model
        assert model.experts is not None
        element = BYTES_PER_ELEMENT[dtypes.params]
        return cls(
            Layout.of(layout).degree(*BLOCK),
            layout.ep,
            layout.etp,
            layout.ep if layout.ep_inner == 1 else layout.ep_inner,
            model.experts,
            model.experts_per_token,
            model.width,
            element,
            max(element, 4),
            model.router_groups,
            model.router_group_limit or model.router_groups,
        )

    @property
    def held(self) -> int:
        """El: experts of a rank, dead ones at the end included."""
        return -(-self.experts // self.ep)

    @property
    def nodes(self) -> int:
        """Of an "ep" group."""
        return self.ep // self.inside

    @property
    def row_bytes(self) -> int:
        """D·e."""
        return self.width * self.element_bytes

    def place(self, rank: int) -> tuple[int, int, int, int]:
        """edp, node, place in it and etp of the rank with this number in its block."""
        rest, etp = divmod(rank, self.etp)
        edp, ep = divmod(rest, self.ep)
        return edp, *divmod(ep, self.inside), etp

    def rank(self, edp: int, node: int, inner: int, etp: int) -> int:
        """Inverse of `place`."""
        return ((edp * self.nodes + node) * self.inside + inner) * self.etp + etp


@dataclass(frozen=True, slots=True)
class Flow:
    """Rows that each rank of a block sends to each node, [ranks, nodes], and inside its node to each place,
    [ranks, inside]; what stays is among them. Whole numbers, or expected ones."""

    across: npt.NDArray[np.float64]
    inside: npt.NDArray[np.float64]


def counted(sizes: Sizes, chosen: Chosen) -> Counts:
    """Where one rank's tokens go, from what they chose at one router."""
    of_node = sizes.inside * sizes.held
    nodes = np.where(chosen < 0, -1, chosen // of_node)
    found = np.zeros((sizes.nodes, 1 + sizes.inside), dtype=np.int64)
    for node in range(sizes.nodes):
        here = chosen[nodes == node] - node * of_node
        found[node, 0] = (nodes == node).any(1).sum()
        found[node, 1:] = np.bincount(here // sizes.held, minlength=sizes.inside)
    return found


def flow_of(sizes: Sizes, chosen: Sequence[Chosen]) -> Flow:
    """From what the tokens of each rank of a block chose at one router, in the order of the block."""
    return joined(sizes, [counted(sizes, one) for one in chosen])


def joined(sizes: Sizes, counts: Sequence[Counts]) -> Flow:
    """The same from what each rank counted."""
    assert len(counts) == sizes.ranks
    inside = np.zeros((sizes.ranks, sizes.inside))
    for rank in range(sizes.ranks):
        edp, node, inner, etp = sizes.place(rank)
        for source in (sizes.rank(edp, at, inner, etp) for at in range(sizes.nodes)):
            inside[rank] += counts[source][node, 1:]  # what came to `rank`, and goes on from it
    return Flow(np.array([one[:, 0] for one in counts], dtype=np.float64), inside)


def expected(sizes: Sizes, tokens: int) -> Flow:
    """Of `tokens` on each rank, with choices that are even."""
    first = np.minimum(np.arange(sizes.ep + 1) * sizes.held, sizes.experts)
    own = np.diff(first).reshape(sizes.nodes, sizes.inside)  # experts that there are, not dead ones
    ends = first[:: sizes.inside]
    met = [1.0 - miss(sizes, int(a), int(b)) for a, b in pairwise(ends)]
    across = np.tile(tokens * np.array(met), (sizes.ranks, 1))
    shares = tokens * sizes.nodes * sizes.choices * own / sizes.experts  # [nodes, inside]
    return Flow(across, np.array([shares[sizes.place(rank)[1]] for rank in range(sizes.ranks)]))


def miss(sizes: Sizes, start: int, stop: int) -> float:
    """The share of tokens that choose none of the experts [start, stop)."""
    size = sizes.experts // sizes.groups
    ways = {(0, 0): 1}  # (groups, experts of them in the range) -> subsets of groups
    for group in range(sizes.groups):
        there = max(0, min(stop, (group + 1) * size) - max(start, group * size))
        for (number, inside), count in list(ways.items()):
            key = number + 1, inside + there
            ways[key] = ways.get(key, 0) + count
    allowed = sizes.limit * size
    missed = sum(
        count * comb(allowed - inside, sizes.choices)
        for (number, inside), count in ways.items()
        if number == sizes.limit
    )
    return missed / (comb(sizes.groups, sizes.limit) * comb(allowed, sizes.choices))


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of one rank over each link: (what it sends in the forward, what in the backward: what the others sent it).

    across: over nodes. ep: inside. whole: own rows over "etp", and those of the others, whose parts it sends back.
    """

    across: tuple[float, float]
    ep: tuple[float, float]
    whole: tuple[float, float]

    @classmethod
    def of(cls, sizes: Sizes, flow: Flow, rank: int) -> Rows:
        """Of the rank with this number in its block."""
        edp, node, inner, etp = sizes.place(rank)
        others = [sizes.rank(edp, at, inner, etp) for at in range(sizes.nodes)]
        come = sum(float(flow.across[other, node]) for other in others)
        across = float(flow.across[rank].sum()), come
        stay = float(flow.across[rank, node])

        def came(at: int) -> float:
            """Rows that come to the peer at `at` of "etp"."""
            return sum(float(flow.inside[sizes.rank(edp, node, it, at), inner]) for it in range(sizes.inside))

        own = float(flow.inside[rank, inner])
        rest = sum(came(at) for at in range(sizes.etp) if at != etp)
        return cls(
            (across[0] - stay, across[1] - stay),
            (float(flow.inside[rank].sum()) - own, came(etp) - own),
            ((sizes.etp - 1) * came(etp), rest),
        )


def dispatched(sizes: Sizes, flow: Flow, rank: int) -> Dispatched:
    """What the activations of one mixture follow from, on the rank with this number in its block."""
    edp, node, inner, etp = sizes.place(rank)
    sources = [sizes.rank(edp, node, at, part) for at in range(sizes.inside) for part in range(sizes.etp)]
    came = sum(float(flow.inside[source, inner]) for source in sources)
    others = [sizes.rank(edp, at, inner, etp) for at in range(sizes.nodes)]
    crossed = sum(float(flow.across[other, node]) for other in others) if sizes.nodes > 1 else 0.0
    return Dispatched(round(float(flow.inside[rank].sum())), round(came), sizes.etp, sizes.nodes, round(crossed))
