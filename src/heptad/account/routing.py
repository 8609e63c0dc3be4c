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

from heptad.axes.context.cost import predictions
from heptad.axes.data.cost import axis_sizes
from heptad.config.experts import routes
from heptad.config.schema import Job, ModelSection
from heptad.mesh.layout import Layout
from heptad.models.spec import ParamSpec, UnitSpec
from heptad.schedule.action import Segments
from heptad.trace import Transfer
from heptad.units import sent_bytes

NUMBER_BYTES = 4
ROUTED_AXES = ("cp", "tp")


def adds_losses(model: ModelSection) -> bool:
    """Whether routers add losses of their own."""
    return model.class_ is None and model.experts is not None and bool(balances(model) or model.z_loss)


def balances(model: ModelSection) -> float:
    """The coefficient of the loss that keeps experts evenly loaded."""
    return model.balance_loss if model.router == "deepseek" else model.aux_loss


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
    found = []
    for phase, times in _forwards(model, units, specs, runs, recompute):
        for op, size in once:
            found.append(Transfer(op, axis, phase, times * sent_bytes(op, size, ranks), times))
    return [item for item in found if item.count]


def _forwards(
    model: ModelSection, units: Sequence[UnitSpec], specs: Sequence[ParamSpec], runs: Sequence[int], recompute: Segments
) -> list[tuple[str, int]]:
    """(phase, how many forwards of blocks with experts run in it)."""
    again = {unit for segment in recompute for unit in segment}
    trained = {spec.name for spec in specs if spec.trainable}
    forward = backward = layer = 0
    alive = False
    for index, unit in enumerate(units):
        alive = alive or any(name in trained for name in unit.params)
        if unit.kind == "head":
            forward += len(predictions(specs)) * runs[index]
        elif unit.kind == "block":
            forward += runs[index] * routes(model, layer)
            backward += runs[index] * (routes(model, layer) and index in again and alive)
            layer += 1
    return [("forward", forward), ("backward", backward)]
