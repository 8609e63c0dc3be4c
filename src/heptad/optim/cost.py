"""What the optimizer keeps and what Muon sends, from the cut alone. No torch.

The norm sends one number. AdamW and SGD send nothing. Muon needs whole matrices: a matrix cut over several ranks is
assembled by an all-gather; one that lies on one rank is not sent; of copies, the owner's is sent. Gathers take matrices
in order, up to `ROUND_NUMEL` elements a round, each rank's part padded to the widest: a round of width w over N ranks
sends (N-1)·w elements of the master's dtype from every rank. `muon.py` runs the same rounds, so predicted == counted.

Of a stack of experts each expert is a matrix. Ranks at different places of "ep" have different ones, so each *team*,
the ranks of one place, gathers its own: the j-th of every team at once, in rounds that are as wide on each of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from heptad.config.schema import OptimizerSection
from heptad.models.spec import ParamSpec
from heptad.optim.roles import kind_of, state_slots
from heptad.trace import Transfer
from heptad.units import sent_bytes

ROUND_NUMEL = 1 << 24
"""Elements of whole matrices assembled at once: bounds the buffer (64 MB in fp32) and fills the messages."""

Ranges = Sequence[tuple[int, int]]
"""Flat range [start, stop) of one parameter that each rank of its group owns, in rank order; together they tile it."""
Teams = Sequence[Sequence[int]]
"""Places in its group of the ranks that hold parts of the same matrices (`axes/data/stages.py`); (): of all of them."""


@dataclass(frozen=True, slots=True)
class Round:
    """Matrices (by their place in the list) assembled by one all-gather; `width` is each rank's padded contribution."""

    members: tuple[int, ...]
    width: int


def matrices(spec: ParamSpec, runs: Sequence[Ranges], teams: Teams = ()) -> list[Ranges]:
    """What ranks own of a parameter, given for each of its runs, by matrix: of a stack [E, F, D] a list for each expert
    of a team, another one on each team."""
    if len(spec.shape) == 2:
        (ranges,) = runs
        return [ranges]
    size, num_ranks = spec.numel // spec.shape[0], len(runs[0])
    here = experts_of(spec, teams)
    found = [[(0, 0)] * num_ranks for _ in range(here)]
    for team, places in enumerate(teams or [range(num_ranks)]):
        for at in places:
            for start, stop in (ranges[at] for ranges in runs if ranges[at][0] < ranges[at][1]):
                for expert in range(start // size, -(-stop // size)):
                    part = max(start, expert * size), min(stop, (expert + 1) * size)
                    found[expert - team * here][at] = part
    return [tuple(ranges) for ranges in found]


def experts_of(spec: ParamSpec, teams: Teams) -> int:
    """Experts of one team; of the last ones some may be missing."""
    return -(-spec.shape[0] // max(len(teams), 1))


def gather_rounds(cuts: Sequence[Ranges], teams: Teams = (), round_numel: int = ROUND_NUMEL) -> list[Round]:
    """The all-gathers that assemble every matrix of `cuts` that lies on more than one rank of a team."""
    rounds: list[Round] = []
    members: list[int] = []
    numel = 0
    for at, ranges in enumerate(cuts):
        lengths = [[ranges[place][1] - ranges[place][0] for place in team] for team in teams or [range(len(ranges))]]
        if max(sum(length > 0 for length in team) for team in lengths) < 2:
            continue
        members.append(at)
        numel += max(map(sum, lengths))
        if numel >= round_numel:
            rounds.append(_round(cuts, members))
            members, numel = [], 0
    return rounds + ([_round(cuts, members)] if members else [])


def _round(cuts: Sequence[Ranges], members: Sequence[int]) -> Round:
    num_ranks = len(cuts[members[0]])
    lengths = [sum(cuts[at][rank][1] - cuts[at][rank][0] for at in members) for rank in range(num_ranks)]
    return Round(tuple(members), max(lengths))


def muon_traffic(cuts: Sequence[Ranges], axis: str, element_bytes: int, teams: Teams = ()) -> list[Transfer]:
    """Transfers of one update of the matrices `cuts`, all over one team's ranks, whose axes are `axis`."""
    transfers = []
    for item in gather_rounds(cuts, teams):
        num_ranks = len(teams[0]) if teams else len(cuts[item.members[0]])
        num_bytes = sent_bytes("all_gather", num_ranks * item.width * element_bytes, num_ranks)
        transfers.append(Transfer("all_gather", axis, "update", num_bytes))
    return transfers


def norm_traffic(axis: str, num_ranks: int) -> list[Transfer]:
    """The one all-reduce of `norm.total_norm` over the group that parameters are split over: one fp64 number."""
    return [Transfer("all_reduce", axis, "norm", sent_bytes("all_reduce", 8, num_ranks))]


def state_bytes(section: OptimizerSection, specs: Sequence[ParamSpec], element_bytes: int) -> int:
    """Optimizer state of whole parameters (frozen ones have none); a shard holds its share of it."""
    slots = {spec.name: state_slots(section, kind_of(section, spec)) for spec in specs if spec.trainable}
    return sum(len(slots[spec.name]) * spec.numel * element_bytes for spec in specs if spec.trainable)
