"""What the pipeline axis sends in a step, from who runs which stage alone. Pure, no torch.

| what | phase | bytes |
|---|---|---|
| the output of a stage, where the next one is on another rank | forward | S, once a micro-batch |
| the gradient of a stage's input, where the one below is on another rank and is trained | backward | S |
| gradients of parameters that several stages hold: `models/share.py` | shared | an all-reduce of their shards, once |

S = B·L·D elements of the stream, of which a rank of a cut stream (sequence parallelism) sends its own ⌈B·L/T⌉ rows. The
messages are counted here from the placement, not from a program, so a program that sends too much or too little shows
where predicted and counted are compared. Read next: `schedule/expand.py`, `transport.py`,
`account/traffic.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from heptad.models.share import Share
from heptad.models.spec import ParamSpec, UnitSpec
from heptad.schedule.expand import Stages
from heptad.trace import Transfer
from heptad.units import sent_bytes


def stage_runs(stages: Stages, place: int) -> dict[int, int]:
    """Stage -> how many of the step's micro-batches the rank at `place` runs it on; stages of other ranks are absent.

    All of them, but for a schedule with two directions, where each rank of a stage has half.
    """
    every = range(stages.schedule.num_microbatches)
    counts = {
        stage: sum(stages.rank_of(stage, microbatch) == place for microbatch in every)
        for stage in range(len(stages.units))
    }
    return {stage: count for stage, count in counts.items() if count}


def unit_runs(stages: Stages, place: int) -> tuple[int, ...]:
    """Of each unit of the model, how many micro-batches it runs on at `place`."""
    counts = stage_runs(stages, place)
    return tuple(counts.get(stage, 0) for stage, units in enumerate(stages.units) for _ in units)


def messages(
    stages: Stages, place: int, units: Sequence[UnitSpec], specs: Sequence[ParamSpec], stream_bytes: int
) -> list[Transfer]:
    """What `place` sends to its neighbours in one step; stream_bytes: of one micro-batch's stream on one rank."""
    trained = {spec.name for spec in specs if spec.trainable}
    owns = [any(name in trained for name in (*unit.params, *unit.borrowed)) for unit in units]
    first_trained = owns.index(True)
    up = down = 0
    for stage, own in enumerate(stages.units):
        for microbatch in range(stages.schedule.num_microbatches):
            if stages.rank_of(stage, microbatch) == place:
                up += stages.sends_up(stage, microbatch)
                if stage and own[0] > first_trained:
                    down += stages.sends_up(stage - 1, microbatch)
    return [
        Transfer("send", "pp", phase, count * stream_bytes, count)
        for phase, count in (("forward", up), ("backward", down))
        if count
    ]


def copies_traffic(share: Share, widths: Mapping[tuple[int, ...], int], reduce_bytes: int) -> list[Transfer]:
    """Once a step: gradients of what other ranks of the pipeline hold too; widths: elements of each set of holders."""
    return [
        Transfer("all_reduce", "pp", "shared", sent_bytes("all_reduce", widths[ranks] * reduce_bytes, len(ranks)))
        for ranks in share.groups()
        if widths[ranks]
    ]
