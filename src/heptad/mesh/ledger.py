"""The ledger: every collective of a run, counted by axis × op × phase, in logical bytes one rank sends.

`mesh/collectives.py` writes it for Heptad's own collectives. `LibraryLedger` is a dispatch mode for those that a
library issues behind our back (FSDP2): it sees torch's c10d operators and counts them on the axis it was opened for.
Read next: `axes/data/cost.py` (the prediction that must equal it), `report` (the table).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from heptad.trace import Transfer, total
from heptad.units import sent_bytes


class Ledger:
    """Counts of one rank since the last `reset`. `phase`: of the action under way, for collectives inside of it."""

    def __init__(self) -> None:
        self._entries: list[Transfer] = []
        self.phase = "forward"

    def record(self, op: str, axis: str, phase: str, num_bytes: int) -> None:
        """One collective: `num_bytes` is what this rank sends, by the ring formula or as posted (point to point)."""
        self._entries.append(Transfer(op, axis, phase, num_bytes))

    def transfers(self) -> list[Transfer]:
        """One `Transfer` a kind, summed, sorted by axis, op and phase."""
        sums = sorted(total(self._entries).items())
        return [Transfer(op, axis, phase, num_bytes, count) for (axis, op, phase), (count, num_bytes) in sums]

    def reset(self) -> None:
        """Forget everything counted so far."""
        self._entries.clear()


_LIBRARY_OPS = {"allreduce_": "all_reduce", "_allgather_base_": "all_gather", "_reduce_scatter_base_": "reduce_scatter"}


class LibraryLedger(TorchDispatchMode):
    """Counts c10d collectives while it is active, so a library's own are in the table too. Costs a Python call an op.

    axis_of: axis of the group with these ranks. phase: names the phase at that moment; None where Heptad's own
    collectives run, which count themselves.
    """

    def __init__(
        self, ledger: Ledger, axis_of: Callable[[tuple[int, ...]], str], phase: Callable[[], str | None]
    ) -> None:
        super().__init__()
        self.ledger, self.axis_of, self.phase = ledger, axis_of, phase

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Count, then run."""
        phase = self.phase() if func.namespace == "c10d" else None
        if phase is not None:
            op = _LIBRARY_OPS.get(func._schema.name.split("::")[1])
            assert op is not None, f"{func} is not in the ledger's table of collectives"
            self._count(op, phase, args)
        return func(*args, **(kwargs or {}))

    def _count(self, op: str, phase: str, args: tuple[Any, ...]) -> None:
        tensors = args[0] if isinstance(args[0], list | tuple) else [args[0]]
        full_bytes = args[1].nbytes if op == "reduce_scatter" else sum(tensor.nbytes for tensor in tensors)
        group = next(dist.ProcessGroup.unbox(arg) for arg in args[1:] if isinstance(arg, torch.ScriptObject))
        ranks = tuple(dist.get_process_group_ranks(group))
        if len(ranks) > 1:
            self.ledger.record(op, self.axis_of(ranks), phase, sent_bytes(op, full_bytes, len(ranks)))
