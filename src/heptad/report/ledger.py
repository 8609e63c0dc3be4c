"""The ledger as a table: what one rank sent in one step, predicted by formula and counted as it happened. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from heptad.trace import Transfer, total
from heptad.units import human_bytes

HEADS = ("axis", "op", "phase", "count", "predicted bytes", "counted bytes", "")


def traffic_table(predicted: Sequence[Transfer] | None, counted: Sequence[Transfer]) -> str:
    """One line for each axis × op × phase, and the sum. `predicted` None: there is no formula for this engine.

    A line that differs says so; equal means the same number of collectives and the same logical bytes (ring formulas).
    """
    expected, seen = total(predicted or ()), total(counted)
    rows = [HEADS]
    for key in sorted({*expected, *seen}):
        (axis, op, phase), want, got = key, expected.get(key, (0, 0)), seen.get(key, (0, 0))
        count = str(got[0]) if predicted is None or want[0] == got[0] else f"{got[0]} of {want[0]}"
        remark = "" if predicted is None else "equal" if want == got else "DIFFERS"
        rows.append((axis, op, phase, count, "-" if predicted is None else f"{want[1]:,}", f"{got[1]:,}", remark))
    sums = [sum(num_bytes for _, num_bytes in part.values()) for part in (expected, seen)]
    shown = "-" if predicted is None else human_bytes(sums[0])
    rows.append(("sum", "", "", "", shown, human_bytes(sums[1]), ""))
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADS))]
    numbers = {3, 4, 5}
    lines = [
        "  ".join(
            cell.rjust(width) if column in numbers else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    return "\n".join(lines)
