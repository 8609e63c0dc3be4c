"""Bytes of multi-token prediction after every action, equal to `recompute/cost.py` to the byte, under every axis."""

from __future__ import annotations

from typing import Any

import pytest
from tests.recompute.memory import BOTH, GPT, Case, assert_predicted, memory_job
from tests.recompute.test_expert_memory import DEEPSEEK, SOFTMAX

from heptad.recompute import cost
from heptad.recompute.sizes import Sizes

CUT: dict[str, Any] = dict(tp=2, sequence_parallel=True)
CASES: dict[int, dict[str, Case]] = {
    1: {
        "two depths": (dict(mtp_depth=2, tied=True), dict(microbatches=2)),
        "gpt, dropped": ({**GPT, "mtp_depth": 1, "dropout": 0.1, "attention_dropout": 0.1}, dict(params="bf16")),
        "chunks, in part": (dict(mtp_depth=1), dict(loss_chunk=5, recompute=dict(mode="selective"))),
        "experts, again": ({**SOFTMAX, "mtp_depth": 2}, dict(recompute=dict(mode="full"), microbatches=2)),
        "deepseek": ({**DEEPSEEK, "mtp_depth": 1, "balance_loss": 0.1}, dict(params="fp64")),
    },
    2: {
        "whole stream": (dict(mtp_depth=2), dict(tp=2)),
        "cut": ({**GPT, "mtp_depth": 1}, dict(CUT, loss_chunk=5)),
        "kept": ({**DEEPSEEK, "mtp_depth": 1}, dict(CUT, keep_gathered=True)),
        "ring": (dict(mtp_depth=2), dict(cp=2)),
        "ulysses": ({**DEEPSEEK, "mtp_depth": 1}, dict(cp=2, context="ulysses")),
        "last stage": (dict(mtp_depth=2), dict(pp=2, microbatches=4)),
        "last stage, again": ({**SOFTMAX, "mtp_depth": 1}, dict(pp=2, microbatches=3, recompute=dict(mode="full"))),
        "experts": ({**SOFTMAX, "mtp_depth": 1}, dict(dp_shard=2, ep=2, microbatches=4)),
    },
    4: {"cut, last stage": ({**DEEPSEEK, "mtp_depth": 2}, dict(CUT, pp=2, microbatches=3))},
}  # fmt: skip


@BOTH
@pytest.mark.parametrize("ranks", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_bytes_alive_after_every_action_are_predicted(ranks: int, other: bool) -> None:
    assert_predicted(ranks, CASES[ranks], other)


def test_a_depth_is_a_block_and_a_second_head() -> None:
    """And what joins it to the depth before: its token norm's input, both together, two norms' statistics."""
    sizes = Sizes.of(memory_job(dict(mtp_depth=1)), False)
    depth = sum(cost.prediction(sizes, 1).values())
    block = sum(cost.block(sizes).values()) - cost.ANCHOR_BYTES
    plain = Sizes.of(memory_job({}), False)
    second = sum(cost.head(plain).values()) - cost.ANCHOR_BYTES - plain.wide_bytes
    joined = 3 * sizes.stream_bytes + 2 * sizes.tokens * sizes.wide_bytes
    assert depth == block + second + joined + 2 * sizes.tokens * cost.INDEX_BYTES
    assert sum(cost.head(sizes).values()) == sum(cost.head(plain).values()) + depth
