"""What `verify` prints: tables for people, one JSON object for machines."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from heptad.units import human_bytes
from heptad.verify.compare import Comparison

if TYPE_CHECKING:
    from heptad.verify.run import Verdict

SHOWN = 5
"""Differences and parameters listed."""


def as_text(verdict: Verdict) -> str:
    """Traffic, results and, where something differs, what and who."""
    lines: list[str] = []
    comparison = verdict.comparison
    if comparison is None:
        lines += ["a rank failed:", str(verdict.failure).rstrip()]
    else:
        lines += [*_traffic(comparison), "", *_results(verdict, comparison)]
        if comparison.differences:
            lines += ["", *_differences(comparison)]
    lines.append("")
    if verdict.ok:
        lines.append(f"ok: {verdict.steps} steps compute what one device computes, and send what was predicted")
        return "\n".join(lines)
    if verdict.module is not None:
        lines.append(f"first differing module: {verdict.module}")
    if verdict.blame is not None:
        also = f" (so does turning off {', '.join(verdict.blame.also)})" if verdict.blame.also else ""
        lines.append(f"guilty axis: {verdict.blame.axis}{also}")
    elif comparison is not None and not comparison.traffic_matches:
        lines.append("the figures agree; the traffic is not what was predicted")
    return "\n".join([*lines, "NOT OK"])


def as_json_line(verdict: Verdict) -> str:
    """One object; a number that does not exist (a rank failed, nan) is null."""
    comparison, worst, error = verdict.comparison, None, None
    if comparison is not None:
        worst, error = comparison.worst
    found: dict[str, Any] = {
        "ok": verdict.ok,
        "steps": verdict.steps,
        "max_relative_error": _number(error),
        "worst": worst,
        "axis": None if verdict.blame is None else verdict.blame.axis,
        "traffic_matches": comparison is not None and comparison.traffic_matches,
        "module": verdict.module,
        "also_heals": [] if verdict.blame is None else list(verdict.blame.also),
        "loss_error": None if comparison is None else _number(comparison.loss_error),
        "norm_error": None if comparison is None else _number(comparison.norm_error),
        "num_differences": None if comparison is None else len(comparison.differences),
        "precision": verdict.job.precision.params,
        "faults": list(verdict.faults),
        "shrunk": list(verdict.notes),
        "peak_bytes": verdict.peak_bytes,
        "resident_bytes": verdict.resident_bytes,
        "failure": verdict.failure,
    }
    return json.dumps(found, allow_nan=False)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns padded to their widest cell; cells that start with a digit stand right."""
    widths = [max(len(row[at]) for row in (head, *rows)) for at in range(len(head))]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.rjust(width) if cell[:1].isdigit() else cell.ljust(width)
            for cell, width in zip(cells, widths, strict=True)
        ]
        return "  ".join(padded).rstrip()

    return [line(head), "  ".join("-" * width for width in widths), *map(line, rows)]


def _traffic(comparison: Comparison) -> list[str]:
    rows = []
    for key in sorted({*comparison.predicted, *comparison.counted}):
        expected, seen = (side.get(key, (0, 0)) for side in (comparison.predicted, comparison.counted))
        figures = (expected[0], seen[0], expected[1], seen[1])
        rows.append([*key, *map(str, figures), _mark(expected == seen)])
    head = ("axis", "op", "phase", "count predicted", "counted", "bytes predicted", "counted", "")
    if not rows:
        return ["traffic of a step: none (one rank)"]
    matches = "on every rank and step" if comparison.traffic_matches else "NOT on every rank and step"
    return [f"traffic of a step and rank (logical bytes sent); predicted = counted {matches}", *table(head, rows)]


def _results(verdict: Verdict, comparison: Comparison) -> list[str]:
    worst, error = comparison.worst
    kinds = {item.kind for item in comparison.differences}
    loads = verdict.job.model.experts is not None and verdict.job.precision.params == "fp64"
    rows = [
        *([["tokens of each expert", "", "", _mark("load" not in kinds)]] if loads else []),
        ["loss", f"{comparison.loss_error:.1e}", "", _mark("loss" not in kinds)],
        ["gradient norm", f"{comparison.norm_error:.1e}", "", _mark("norm" not in kinds)],
        ["every gradient and parameter", f"{error:.1e}", worst, _mark(not kinds & {"gradient", "parameter"})],
        ["replicas, bit for bit", "", "", _mark("replicas" not in kinds)],
    ]
    lines = table(("compared with one device", "worst relative error", "where", ""), rows)
    if comparison.reorder_ratio is not None:
        lines.append(f"distance to one device over that of its reordered sums: {comparison.reorder_ratio:.2f} (≤ 2)")
    losses = " ".join(f"{loss:.6f}" for loss in comparison.losses)
    lines.append(f"losses: {losses}")
    resident, peak = human_bytes(verdict.resident_bytes), human_bytes(verdict.peak_bytes)
    return [*lines, f"live storages of the fullest rank: {resident} between steps, at most {peak} during one"]


def _differences(comparison: Comparison) -> list[str]:
    shown = comparison.differences[:SHOWN]
    rows = [[f"{item.step}", item.kind, item.name, _error(item.error), f"{item.bound:.1e}"] for item in shown]
    lines = table(("step", "differs", "where", "relative error", "bound"), rows)
    rest = len(comparison.differences) - len(shown)
    return lines + ([f"… and {rest} more"] if rest else [])


def _mark(fine: bool) -> str:
    return "ok" if fine else "DIFFERS"


def _error(value: float) -> str:
    return f"{value:.1e}" if math.isfinite(value) else "not equal"


def _number(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
