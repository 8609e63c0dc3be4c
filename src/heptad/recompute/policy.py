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
from collections.abc import Sequence
from typing import Literal

from heptad.errors import ConfigError
from heptad.schedule.action import Segments

Mode = Literal["none", "selective", "full"]


def segments(mode: Mode, segment: int | Literal["sqrt"], layers: Sequence[int], kinds: Sequence[str]) -> Segments:
    """The units whose forward runs again, in segments, lowest first; none unless mode is "full".

    kinds: of each unit (`UnitSpec.kind`). layers: numbers of the blocks to recompute, in any order; empty: all. A
    segment never reaches over a block that is not recomputed. "sqrt": round(√(number of recomputed blocks)) a segment.
    Raises ConfigError for options that cannot work or would do nothing.
    """
    _check_read(mode, segment, layers)
    if mode != "full":
        return ()
    runs = _runs(chosen(mode, layers, kinds))
    longest = max(map(len, runs))
    size = round(math.sqrt(sum(map(len, runs)))) if segment == "sqrt" else segment
    if size > longest:
        shown = f'"sqrt" (= {size})' if segment == "sqrt" else str(size)
        rule = f"a segment is a stretch of neighbouring recomputed blocks, and the longest has {longest}"
        raise ConfigError.of("recompute.segment", segment, f"{rule}: {shown} is too many", f"segment = {longest}")
    return tuple(run[i : i + size] for run in runs for i in range(0, len(run), size))


def chosen(mode: Mode, layers: Sequence[int], kinds: Sequence[str]) -> tuple[int, ...]:
    """Units of the blocks that mode "selective" or "full" speaks of, lowest first. Raises ConfigError."""
    if mode == "none":
        return ()
    blocks = blocks_of(kinds)
    if not blocks:
        rule = "it would have no effect: the model has no unit between its first and its last"
        raise ConfigError.of("recompute.mode", mode, rule, 'mode = "none", or more units')
    for place, layer in enumerate(layers):
        if not 0 <= layer < len(blocks):
            rule = f"each number is a block's, and the model has blocks 0 to {len(blocks) - 1}"
            raise ConfigError.of("recompute.layers", list(layers), rule, f"leave {layer} out")
        if layer in layers[:place]:
            raise ConfigError.of("recompute.layers", list(layers), f"block {layer} stands there twice", "name it once")
    return tuple(blocks[layer] for layer in sorted(layers)) if layers else blocks


def blocks_of(kinds: Sequence[str]) -> tuple[int, ...]:
    """Units that may be recomputed: blocks (or a custom model's) between the first unit and the last one."""
    return tuple(unit for unit in range(1, len(kinds) - 1) if kinds[unit] in ("block", "custom"))


def _check_read(mode: Mode, segment: int | Literal["sqrt"], layers: Sequence[int]) -> None:
    """Options that this mode would not read."""
    if mode != "full" and segment != 1:
        rule = 'it would have no effect: only mode = "full" recomputes blocks in segments'
        raise ConfigError.of("recompute.segment", segment, rule, 'remove it, or mode = "full"')
    if mode == "none" and layers:
        rule = 'it would have no effect: mode = "none" recomputes nothing'
        raise ConfigError.of("recompute.layers", list(layers), rule, 'remove it, or mode = "full"')


def _runs(units: Sequence[int]) -> list[tuple[int, ...]]:
    """Stretches of neighbouring units."""
    runs: list[tuple[int, ...]] = []
    for unit in units:
        if runs and runs[-1][-1] == unit - 1:
            runs[-1] = (*runs[-1], unit)
        else:
            runs.append((unit,))
    return runs
