"""Which units and parameters one rank of a pipeline holds, and who else holds the same. Pure, no torch.

A parameter is where a unit that owns or borrows it is: a tied head's table is on the first and on the last stage, and
every parameter is on two ranks where each stage is (DualPipe). Copies have their gradients summed once a step, so they
stay equal; of the ranks that hold a parameter the first along the pipeline counts it in the norm. Copies are cut by the
data axis alike, because parameters with other holders have other buckets. Read next: `axes/data/buckets.py`,
`axes/pipeline/__init__.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from heptad.models.spec import ParamSpec, UnitSpec

Ranks = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Share:
    """What the rank at `rank` along the pipeline holds.

    units: indices into the model's. specs: parameters, in the model's order. holders: parameter's name -> places along
    the pipeline that hold it, this rank's among them.
    """

    rank: int
    units: tuple[int, ...]
    specs: tuple[ParamSpec, ...]
    holders: dict[str, Ranks]

    def counts(self, name: str) -> bool:
        """Whether parameter `name` counts here in what is summed over the pipeline."""
        return self.holders[name][0] == self.rank

    def groups(self) -> tuple[Ranks, ...]:
        """The distinct sets of ranks that hold something together, of those this rank is in."""
        return tuple(dict.fromkeys(ranks for ranks in self.holders.values() if len(ranks) > 1))

    def shared(self, ranks: Ranks) -> frozenset[str]:
        """Parameters that exactly `ranks` hold."""
        return frozenset(name for name, held in self.holders.items() if held == ranks)


def shares(held: Sequence[Sequence[int]], units: Sequence[UnitSpec], specs: Sequence[ParamSpec]) -> tuple[Share, ...]:
    """One for each rank along the pipeline; `held[rank]`: the units it runs."""
    holders: dict[str, Ranks] = {}
    for rank, own in enumerate(held):
        for index in own:
            for name in (*units[index].params, *units[index].borrowed):
                found = holders.get(name, ())
                holders[name] = found if rank in found else (*found, rank)
    return tuple(
        Share(
            rank,
            tuple(own),
            tuple(spec for spec in specs if rank in holders[spec.name]),
            {spec.name: holders[spec.name] for spec in specs if rank in holders[spec.name]},
        )
        for rank, own in enumerate(held)
    )


def whole(units: Sequence[UnitSpec], specs: Sequence[ParamSpec]) -> Share:
    """One rank that holds everything."""
    return shares([range(len(units))], units, specs)[0]
