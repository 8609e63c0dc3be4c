"""Proof about stale weights, a part of `check.py`: every backward uses the weights of its forward, and each update
comes once, with the newest weights in place. In a program without updates inside the step it holds of itself. Pure, no
torch.
"""

from __future__ import annotations

from collections.abc import Callable

from heptad.schedule.action import Action, Kind

Require = Callable[[bool, str], None]


class Versions:
    """Which weights the stage has after a prefix of the program; versions count the updates that made them."""

    def __init__(self) -> None:
        self.newest = 0
        self.exchanged: int | None = None  # the micro-batch whose kept weights are the stage's
        self.kept: dict[int, int] = {}  # micro-batch -> version
        self.used: dict[int, int] = {}  # micro-batch -> version that its forward uses
        self.gone_back: set[int] = set()  # micro-batches whose backward has begun
        self.updated: set[int] = set()

    def compute(self, action: Action, goes_back: bool, require: Require) -> None:
        """F of the newest, anything else of the version of its F; `goes_back`: whether the unit has a backward."""
        microbatch = action.microbatch
        if action.kind is Kind.FORWARD:
            require(self.exchanged is None, "a forward uses the newest weights")
            version = self.used.setdefault(microbatch, self.newest) if goes_back else self.newest
            require(version == self.newest, "the stage was updated within this forward")
            return
        self.gone_back.add(microbatch)
        require(microbatch not in self.updated, "the stage was updated from this micro-batch already")
        if self.exchanged is None:
            kept = self.used.get(microbatch, self.newest) == self.newest
            require(kept, f"the weights of micro-batch {microbatch}'s forward are not the stage's")
        else:
            require(self.exchanged == microbatch, f"the stage's weights are those of micro-batch {self.exchanged}")

    def take(self, action: Action, require: Require) -> None:
        """K, X, N or V."""
        microbatch = action.microbatch
        if action.kind is Kind.NEWEST:
            require(self.exchanged == microbatch, "these weights are not the stage's")
            self.exchanged = None
            del self.kept[microbatch]
            return
        require(self.exchanged is None, f"the stage's weights are those of micro-batch {self.exchanged}")
        if action.kind is Kind.KEEP:
            require(self.used.get(microbatch) == self.newest, "its forward did not use the present weights")
            require(microbatch not in self.kept and microbatch not in self.gone_back, "kept for a backward to come")
            self.kept[microbatch] = self.newest
        elif action.kind is Kind.EXCHANGE:
            require(microbatch in self.kept, "nothing was kept for this micro-batch")
            require(microbatch not in self.gone_back, "its backward has begun with other weights")
            self.exchanged = microbatch
        else:
            require(microbatch not in self.updated, "updated twice from one micro-batch")
            self.updated.add(microbatch)
            self.newest += 1
            going = {m for m in self.used if m not in self.gone_back} - set(self.kept)
            require(not going, f"the weights of micro-batches {sorted(going)} are needed and not kept")

    def finish(self, require: Require) -> None:
        """Before U: nothing is kept, and where one micro-batch updated the stage, every one did."""
        require(not self.kept and self.exchanged is None, f"kept and not used: micro-batches {sorted(self.kept)}")
        missing = set(self.used) - self.updated if self.updated else set()
        require(not missing, f"the stage was not updated from micro-batches {sorted(missing)}")
