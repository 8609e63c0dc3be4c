"""Which units are recomputed, and from which kept inputs. Pure, no torch.

mode "full": a block keeps no graph; its forward runs again (C) before its backward. Blocks are recomputed in segments
of k neighbours: only the input of a segment's first block is kept, and C runs for all blocks of the segment before
their backward. With L blocks, k costs L/k kept inputs and the graphs of k blocks at once; k = √L minimises the sum when
both are about as large (Chen et al., arXiv 1604.06174, §4.1). Time: one more forward of each recomputed block, once.
mode "selective": a block keeps its graph but for the part that is large and cheap to make again.
Read next: `schedule/lower.py`, `schedule/executor.py`, `offload.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

from heptad.config.recompute import runs
from heptad.config.schema import LayoutSection
from heptad.errors import ConfigError
from heptad.schedule.action import Kind, Program, Segments

Mode = Literal["none", "selective", "full"]


def segments(mode: Mode, segment: int | Literal["sqrt"], layers: Sequence[int], kinds: Sequence[str]) -> Segments:
    """The units whose forward runs again, in segments, lowest first; none unless mode is "full".

    kinds: of each unit (`UnitSpec.kind`). layers: numbers of the blocks to recompute, in any order; empty: all. A
    segment never reaches over a block that is not recomputed. "sqrt": round(√(number of recomputed blocks)) a segment.
    Raises ConfigError for blocks or segments that the model does not have (`config/recompute.py` says so sooner where
    the job file tells; a custom model's units are known here).
    """
    stretches = runs(chosen(mode, layers, kinds))
    if mode != "full":
        return ()
    longest = max(map(len, stretches))
    size = round(math.sqrt(sum(map(len, stretches)))) if segment == "sqrt" else segment
    if size > longest:
        shown = f'"sqrt" (= {size})' if segment == "sqrt" else str(size)
        rule = f"a segment is a stretch of neighbouring recomputed blocks, and the longest has {longest}"
        raise ConfigError.of("recompute.segment", segment, f"{rule}: {shown} is too many", f"segment = {longest}")
    return tuple(run[i : i + size] for run in stretches for i in range(0, len(run), size))


def chosen(mode: Mode, layers: Sequence[int], kinds: Sequence[str]) -> tuple[int, ...]:
    """Units of the blocks that mode "selective" or "full" speaks of, lowest first. Raises ConfigError."""
    if mode == "none":
        return ()
    blocks = blocks_of(kinds)
    if not blocks:
        rule = "it would have no effect: the model has no unit between its first and its last"
        raise ConfigError.of("recompute.mode", mode, rule, 'mode = "none", or more units')
    for layer in layers:
        if not 0 <= layer < len(blocks):
            rule = f"each number is a block's, and the model has blocks 0 to {len(blocks) - 1}"
            raise ConfigError.of("recompute.layers", list(layers), rule, f"leave {layer} out")
    return tuple(blocks[layer] for layer in sorted(set(layers))) if layers else blocks


def blocks_of(kinds: Sequence[str]) -> tuple[int, ...]:
    """Units that may be recomputed: blocks (or a custom model's) between the first unit and the last one."""
    return tuple(unit for unit in range(1, len(kinds) - 1) if kinds[unit] in ("block", "custom"))


def check_moves(program: Program, layout: LayoutSection) -> None:
    """ConfigError if offload cannot work, or moves nothing of a unit above the first (which keeps tokens)."""
    if layout.engine == "fsdp2":
        rule = "fsdp2 lets autograd save gathered weights and frees them in its own hooks: they cannot be told apart"
        raise ConfigError.of("offload.activations", "cpu", rule, 'layout.engine = "heptad"')
    if not any(action.kind is Kind.OUT and action.index > 0 for action in program):
        rule = f"it would have no effect: with prefetch = {layout.prefetch} every unit is read before it would be away"
        raise ConfigError.of("offload.activations", "cpu", rule, 'activations = "none", a lower prefetch, more layers')


def moved_bytes(program: Program, kept_bytes: Callable[[int, Kind], int]) -> int:
    """Bytes that leave the device in a step (as many come back).

    kept_bytes: of (unit, kind), what the unit keeps for its backward once F (FORWARD) or C (RECOMPUTE) has run: the
    bytes its graph saved, or those of the input from which its segment is recomputed.
    """
    last: dict[tuple[int, int], Kind] = {}
    total = 0
    for action in program:
        key = action.index, action.microbatch
        if action.kind in (Kind.FORWARD, Kind.RECOMPUTE):
            last[key] = action.kind
        elif action.kind is Kind.OUT:
            total += kept_bytes(action.index, last[key])
    return total
