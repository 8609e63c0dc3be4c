"""Acceptance: every layout of the data axis computes what one device computes and sends what was predicted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.sweep import every, name_of, pairwise
from tests.verify.layouts import FACTORS, GPT, compared, layout_job, valid

from heptad.config.schema import Job

WHOLE = every(FACTORS, valid)
COVER = pairwise(FACTORS, valid)


def assert_right(job: Job, steps: int = 2) -> None:
    found = compared(job, steps)
    assert not found.differences, found.differences[:5]
    assert found.traffic_matches, (found.predicted, found.counted)
    assert found.reorder_ratio is None or found.reorder_ratio <= 2


@pytest.mark.parametrize("item", COVER, ids=name_of)
def test_pairwise_cover(item: dict[str, Any]) -> None:
    assert_right(layout_job(**item))


@pytest.mark.slow
@pytest.mark.parametrize("item", [item for item in WHOLE if item not in COVER], ids=name_of)
def test_every_layout(item: dict[str, Any]) -> None:
    assert_right(layout_job(**item))


def test_both_counts_are_printed(record_property: Callable[[str, object], None]) -> None:
    record_property(
        "summary", f"verify: pairwise cover {len(COVER)} of {len(WHOLE)} layouts (`-m slow` runs the others)"
    )
    assert 16 <= len(COVER) < len(WHOLE) == 336


VARIANTS = {
    "gpt": dict(model=GPT),
    "qk_norm-dropout-recompute": dict(
        model=dict(qk_norm=True, dropout=0.1, attention_dropout=0.1), recompute=dict(mode="full"), zero=3
    ),
    "frozen": dict(model=dict(frozen=("embed.*", "blocks.0.mlp.*")), zero=2),
    "muon": dict(optimizer=dict(name="muon", muon_lr=0.05), zero=1, ranks=4, hsdp=True),
    "sgd-prefetch": dict(optimizer=dict(name="sgd", momentum=0.9), layout=dict(prefetch=2, bucket_mb=0.002), zero=3),
    "no-prefetch-bf16-muon": dict(
        optimizer=dict(name="muon"), layout=dict(prefetch=0), zero=3, model=dict(dropout=0.2), params="bf16"
    ),
    "bf16-reduction": dict(precision=dict(params="bf16", reduce="bf16"), zero=2),
    "fsdp2": dict(layout=dict(engine="fsdp2")),
    "fsdp2-recompute": dict(layout=dict(engine="fsdp2"), recompute=dict(mode="full"), model=dict(frozen=("embed.*",))),
    "fsdp2-hsdp": dict(layout=dict(engine="fsdp2"), ranks=4, hsdp=True, params="fp32"),
    "order": dict(layout=dict(order="pp-dp_shard-dp_replicate-cp-tp"), ranks=4, hsdp=True, zero=1),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_what_else_a_job_can_say(name: str) -> None:
    assert_right(layout_job(**VARIANTS[name]))
