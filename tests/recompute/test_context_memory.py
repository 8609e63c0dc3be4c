"""Live bytes of context ranks after every action, equal to `recompute/cost.py` to the byte: O(L/C), no mask, no map."""

from __future__ import annotations

from typing import Any

import pytest
from tests.recompute.memory import MODELS, MODES, STREAMS, many, memory_job, step_bytes
from tests.sweep import Combination, pairwise

from heptad.config.schema import Job
from heptad.launch.forked import forked
from heptad.recompute import cost
from heptad.recompute.sizes import Sizes

CONTEXT: dict[str, dict[str, Any]] = {
    "ring": dict(cp=2),
    "plain ring of 3": dict(cp=3, context_split="contiguous"),
    "ulysses": dict(cp=2, context="ulysses"),
    "both": dict(cp=4, context="ring+ulysses", cp_ulysses=2),
    "gather": dict(cp=2, context="gather"),
}
ATTENTION: dict[str, dict[str, Any]] = {
    "flash": dict(attention="flash"),
    "math": dict(attention="math"),
    "dropped": dict(attention_dropout=0.1),
    "window": dict(window=3),
}
FACTORS = {
    "context": tuple(CONTEXT),
    "model": (*MODELS, "one kv head"),
    "tp": (1, 2),
    "stream": tuple(STREAMS),
    "attention": tuple(ATTENTION),
    "mode": tuple(MODES),
    "dropout": (0.0, 0.1),
    "documents": (False, True),
    "params": ("fp32", "bf16", "fp64"),
}


def ranks_of(item: Combination) -> int:
    degree: int = CONTEXT[item["context"]]["cp"] * item["tp"]
    return degree


def valid(item: Combination) -> bool:
    """One tensor rank has one kind of stream; tensor ranks have heads to deal."""
    return (item["tp"] > 1 or item["stream"] == "whole") and ranks_of(item) <= 6


def job_of(item: Combination) -> Job:
    model = MODELS.get(item["model"], dict(kv_heads=1)) | ATTENTION[item["attention"]] | {"dropout": item["dropout"]}
    layout = CONTEXT[item["context"]] | STREAMS[item["stream"]] | {"tp": item["tp"]}
    return memory_job(model, item["params"], MODES[item["mode"]], **layout)


COVER = pairwise(FACTORS, valid)


@pytest.mark.parametrize("ranks", sorted({ranks_of(item) for item in COVER}))
def test_bytes_alive_after_every_action_are_predicted(ranks: int) -> None:
    items = [item for item in COVER if ranks_of(item) == ranks]
    cases = [(job_of(item), item["documents"]) for item in items]
    for rank, found in enumerate(forked(ranks, many, cases, timeout_s=900)):
        for item, one in zip(items, found, strict=True):
            assert one.measured == one.predicted, f"rank {rank}, {item}: {one.actions}"


@pytest.mark.parametrize("kind", ["ring", "gather", "both"])
def test_a_rank_keeps_the_same_of_a_sequence_that_grows_with_the_ranks(kind: str) -> None:
    """Twice the tokens on twice the ranks: not a byte more between forward and backward."""
    degrees = (4, 8) if kind == "both" else (2, 4)
    kept = []
    for cp in degrees:
        layout: dict[str, Any] = CONTEXT[kind] | dict(cp=cp)
        job = memory_job(dict(max_positions=28), "fp32", length=7 * cp // degrees[0], **layout)
        kept.append(max(found.measured[2] for found in forked(cp, step_bytes, job, False)))
    assert kept[0] == kept[1]
    sizes = Sizes.of(job, False)
    assert cost.block(sizes)["q, k, v"] == sizes.tokens * (4 + 2 * 2) * 6 * 4
