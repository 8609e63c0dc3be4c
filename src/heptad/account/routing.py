"""What routers send over context and tensor ranks in a step: counts for a loss, choices for drops. No torch.

For each block with experts, once a micro-batch and once more where it is recomputed, over the C·T ranks:

| when | what | bytes of the full buffer |
|---|---|---|
| a balancing loss | how many tokens of each sequence chose each expert, all-reduce | 4·B·E |
| a capacity | the experts of every token, all-gather | 4·K·C·T·ceil(B·n/T), n = ceil(L/C) |

Read next: `axes/expert/sequences.py`, `traffic.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from heptad.axes.data.cost import axis_sizes
from heptad.axes.data.stages import ROUTED_AXES
from heptad.axes.expert.cost import mixtures
from heptad.config.experts import balances
from heptad.config.schema import Job, ModelSection
from heptad.mesh.layout import Layout
from heptad.models.spec import ParamSpec, UnitSpec
from heptad.schedule.action import Segments
from heptad.trace import Transfer
from heptad.units import sent_bytes

NUMBER_BYTES = 4


def adds_losses(model: ModelSection) -> bool:
    """Whether routers add losses of their own."""
    return model.class_ is None and model.experts is not None and bool(balances(model) or model.z_loss)


def traffic(
    job: Job, units: Sequence[UnitSpec], specs: Sequence[ParamSpec], runs: Sequence[int], recompute: Segments = ()
) -> list[Transfer]:
    """One training step of one rank; arguments as in `axes/tensor/cost.py`."""
    model, layout = job.model, job.layout
    axis, ranks = axis_sizes(Layout.of(layout), ROUTED_AXES)
    if ranks == 1 or model.experts is None or model.class_ is not None:
        return []
    batch = job.train.micro_batch
    own = -(-batch * -(-job.data.seq_len // layout.cp) // layout.tp)
    once = []
    if balances(model):
        once.append(("all_reduce", NUMBER_BYTES * batch * model.experts))
    if model.capacity_factor is not None:
        once.append(("all_gather", NUMBER_BYTES * model.experts_per_token * own * ranks))
    again, every = {unit for segment in recompute for unit in segment}, mixtures(units, specs)
    forward = sum(runs[mixture.unit] for mixture in every)
    backward = sum(runs[mixture.unit] for mixture in every if mixture.unit in again and mixture.trains)
    return [
        Transfer(op, axis, phase, times * sent_bytes(op, size, ranks), times)
        for phase, times in (("forward", forward), ("backward", backward))
        for op, size in once
        if times
    ]
