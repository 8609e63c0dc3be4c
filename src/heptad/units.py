"""Bytes, seconds and FLOP/s: sizes of number formats, the ring formulas, and how figures are printed.

Every collective's *logical* bytes (what one rank sends with a ring) come from `sent_bytes`, on both sides: the cost
model predicts with it and the ledger counts with it. What a network card counts is another number (docs/benchmarks.md).
"""

from __future__ import annotations

BYTES_PER_ELEMENT = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "int64": 8, "int32": 4, "int8": 1}

MB = 1_000_000


def sent_bytes(op: str, full_bytes: int, num_ranks: int) -> int:
    """Bytes one rank sends for `op` over `num_ranks` ranks, `full_bytes` being the full buffer, by a ring.

    all_reduce 2(N-1)/N·S, reduce_scatter, all_gather and all_to_all (N-1)/N·S, broadcast and send S; rounded down to
    whole bytes; 0 on one rank (a send to another rank always has two ends).
    """
    if num_ranks == 1:
        return 0
    match op:
        case "all_reduce":
            return 2 * (num_ranks - 1) * full_bytes // num_ranks
        case "reduce_scatter" | "all_gather" | "all_to_all":
            return (num_ranks - 1) * full_bytes // num_ranks
        case "broadcast" | "send":
            return full_bytes
    raise AssertionError(f"no formula for {op!r}")


def human_bytes(num_bytes: float) -> str:
    """1_234_567 -> '1.23 MB' (powers of ten, three figures)."""
    return _human(num_bytes, ["B", "kB", "MB", "GB", "TB", "PB"])


def human_count(count: float) -> str:
    """405_853_388_800 -> '406 B' (billions), three figures."""
    return _human(count, ["", "k", "M", "B", "T"])


def human_seconds(seconds: float) -> str:
    """Seconds as '12.3 s', '4 min 05 s' or '2 h 03 min'."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def _human(value: float, names: list[str]) -> str:
    power = 0
    while abs(value) >= 999.5 and power < len(names) - 1:
        value, power = value / 1000, power + 1
    digits = 0 if power == 0 and value == int(value) else max(0, 2 - len(str(int(abs(value)))) + 1)
    return f"{value:.{digits}f} {names[power]}".rstrip()
