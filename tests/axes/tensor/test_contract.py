"""The axis contract of the tensor axis: outputs, every gradient, parameters after SGD, traffic, at T = 2 and 4."""

from __future__ import annotations

from typing import Any

import pytest
from tests.axes.data.test_contract import assert_equal_to_one_device
from tests.tiny import GPT, tiny_job

QWEN = dict(qk_norm=True, tied=True)
DROPPED = dict(dropout=0.1, attention_dropout=0.1)
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp 2": dict(zero=0, tp=2),
    "tp 2, cut stream": dict(zero=0, tp=2, sequence_parallel=True),
    "tp 2, cut stream kept": dict(zero=0, tp=2, sequence_parallel=True, keep_gathered=True),
    "tp 4": dict(zero=1, tp=4),
    "tp 4, cut stream": dict(zero=3, tp=4, sequence_parallel=True),
    "tp 2 x zero-1 2": dict(zero=1, tp=2, dp_shard=2),
    "tp 2 x zero-2 2, cut stream": dict(zero=2, tp=2, dp_shard=2, sequence_parallel=True),
    "tp 2 x zero-3 2, cut stream": dict(zero=3, tp=2, dp_shard=2, sequence_parallel=True),
    "tp 2 x ddp 2, tensor outermost": dict(zero=0, tp=2, dp_replicate=2, order="tp-pp-dp_replicate-dp_shard-cp"),
    "tp 2 x hsdp 2x2": dict(zero=3, tp=2, dp_shard=2, dp_replicate=2, sequence_parallel=True),
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt": GPT | DROPPED | {"attention_bias": True},
    "qwen": QWEN | {"dropout": 0.1},
    "one kv head": {"kv_heads": 1},
    "window": {"window": 4},
    "gpt tied": GPT | {"tied": True},
}


# Each layout with two models, each model with three or four layouts; the other pairs are slow.
CASES = [
    pytest.param(name, model, marks=[pytest.mark.slow] if (at + number) % 3 else [])
    for at, name in enumerate(LAYOUTS)
    for number, model in enumerate(MODELS)
]


@pytest.mark.parametrize(("name", "model"), CASES)
def test_equals_one_device_and_sends_what_it_predicts(name: str, model: str) -> None:
    layout = LAYOUTS[name]
    num_ranks = layout["tp"] * layout.get("dp_replicate", 1) * layout.get("dp_shard", 1)
    for rank in assert_equal_to_one_device(tiny_job(MODELS[model], **layout), num_ranks):
        assert rank[-1]["predicted"] == rank[-1]["counted"]
