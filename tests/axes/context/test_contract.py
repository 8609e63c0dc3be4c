"""The axis contract of the context axis: every gradient, parameters after SGD, traffic, resident bytes, C = 2 to 4."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.axes.data.test_contract import assert_equal_to_one_device, resident_bytes
from tests.tiny import GPT, tiny_job
from tests.verify.several import fast

from heptad.launch.forked import forked

LAYOUTS: dict[str, dict[str, Any]] = {
    "ring 2": dict(zero=0, cp=2),
    "ring 4, plain order": dict(zero=3, cp=4, context_split="contiguous"),
    "ulysses 2": dict(zero=1, cp=2, context="ulysses"),
    "ulysses 4": dict(zero=2, cp=4, context="ulysses"),
    "ring 2 x ulysses 2": dict(zero=3, cp=4, context="ring+ulysses", cp_ulysses=2),
    "gather 3": dict(zero=1, cp=3, context="gather"),
    "ring 2 x fsdp 2": dict(zero=3, cp=2, dp_shard=2),
    "ring 2 x tp 2, cut stream": dict(zero=2, cp=2, tp=2, sequence_parallel=True),
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt": GPT | dict(dropout=0.1, attention_dropout=0.1),
    "qwen, tied": dict(qk_norm=True, tied=True, attention="math"),
    "one kv head, window": dict(kv_heads=1, window=4),
}


def ranks_of(layout: dict[str, Any]) -> int:
    degree: int = layout["cp"] * layout.get("tp", 1) * layout.get("dp_shard", 1)
    return degree


# Each layout with two models, each model with four layouts; the other pairs are slow.
CASES = [
    pytest.param(name, model, marks=[pytest.mark.slow] if (at + at // 4 + number) % 2 else [])
    for at, name in enumerate(LAYOUTS)
    for number, model in enumerate(MODELS)
]


@pytest.mark.parametrize(("name", "model"), CASES)
def test_equals_one_device_and_sends_what_it_predicts(name: str, model: str) -> None:
    for rank in assert_equal_to_one_device(tiny_job(MODELS[model], **LAYOUTS[name]), ranks_of(LAYOUTS[name])):
        assert rank[-1]["predicted"] == rank[-1]["counted"]
        assert any(axis == "cp" and phase == "backward" for axis, _, phase in rank[-1]["counted"])


@pytest.mark.parametrize(
    "name",
    fast(["ring 4, plain order", "ulysses 2", "ring 2 x ulysses 2", "gather 3"], lambda name: "ulysses" in name),
)
def test_c_022_recompute_changes_no_bit(name: str) -> None:
    runs = []
    for mode in ("none", "selective", "full"):
        job = tiny_job(dict(dropout=0.2, attention_dropout=0.1), recompute=mode, **LAYOUTS[name])
        ranks = assert_equal_to_one_device(job, ranks_of(LAYOUTS[name]))
        assert all(rank[-1]["predicted"] == rank[-1]["counted"] for rank in ranks)
        runs.append([item for rank in ranks for step in rank for item in step["shards"]])
    for other in runs[1:]:
        for (name, _, _, grad, _), (_, _, _, again, _) in zip(runs[0], other, strict=True):
            assert torch.equal(grad, again), name


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_context_ranks_are_data_ranks_for_parameters(zero: int) -> None:
    """Resident bytes: cut over them as over `dp_shard`."""
    for measured, predicted, _ in forked(4, resident_bytes, tiny_job(zero=zero, cp=2, dp_shard=2)):
        assert measured == sum(predicted.values())
