"""The ledger's table says what differs."""

from __future__ import annotations

from heptad.report.ledger import traffic_table
from heptad.trace import Transfer

COUNTED = [
    Transfer("all_gather", "dp_shard", "forward", 3_000_000, 4),
    Transfer("all_reduce", "dp_shard", "norm", 12),
]


def test_equal_and_different_lines() -> None:
    predicted = [Transfer("all_gather", "dp_shard", "forward", 1_500_000, 2)] * 2
    assert traffic_table(predicted, COUNTED).splitlines() == [
        "axis      op          phase     count  predicted bytes  counted bytes",
        "dp_shard  all_gather  forward       4        3,000,000      3,000,000  equal",
        "dp_shard  all_reduce  norm     1 of 0                0             12  DIFFERS",
        "sum                                            3.00 MB        3.00 MB",
    ]


def test_bytes_that_follow_the_routing_differ_like_any_others() -> None:
    predicted = [Transfer("all_to_all", "ep", "forward", 100, 2), Transfer("all_gather", "etp", "forward", 8)]
    counted = [Transfer("all_to_all", "ep", "forward", 90, 2), Transfer("all_gather", "etp", "forward", 8)]
    lines = traffic_table(predicted, counted).splitlines()
    assert [line.split()[-1] for line in lines[1:3]] == ["DIFFERS", "equal"]


def test_without_a_formula() -> None:
    lines = traffic_table(None, COUNTED).splitlines()
    assert "DIFFERS" not in "".join(lines) and lines[1].split() == [
        "dp_shard",
        "all_gather",
        "forward",
        "4",
        "-",
        "3,000,000",
    ]
