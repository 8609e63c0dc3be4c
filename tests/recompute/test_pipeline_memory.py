"""Bytes of the ranks of a pipeline after every action, equal to `recompute/peak.py` to the byte: messages under way,
tables of several micro-batches, what W reads after I, weights that are kept for backwards to come."""

from __future__ import annotations

from typing import Any

import pytest
from tests.recompute.memory import (
    BOTH,
    GPT,
    MODELS,
    MODES,
    STREAMS,
    Case,
    assert_predicted,
    many,
    memory_job,
    step_bytes,
)
from tests.recompute.test_expert_memory import DEEPSEEK, SOFTMAX
from tests.sweep import Combination, pairwise

from heptad.config.schema import Job, ModelSection
from heptad.launch.forked import forked
from heptad.models.spec import param_specs
from heptad.recompute import cost
from heptad.recompute.sizes import Sizes
from heptad.recompute.split_cost import block_after

SCHEDULES: dict[str, dict[str, Any]] = {
    "naive": dict(schedule="naive"),
    "gpipe": dict(schedule="gpipe"),
    "1f1b": dict(schedule="1f1b"),
    "interleaved": dict(schedule="interleaved", vpp=2),
    "pipedream": dict(schedule="pipedream"),
    "zb-h1": dict(schedule="zbh1"),
    "zb-v": dict(schedule="zbv"),
    "dualpipe": dict(schedule="dualpipe"),
    "dualpipev": dict(schedule="dualpipev"),
}
ATTENTION: dict[str, dict[str, Any]] = {
    "flash": {}, "math": dict(attention="math"), "dropped": dict(attention_dropout=0.1), "window": dict(window=3),
    "dropped window": dict(attention_dropout=0.1, window=3),
}  # fmt: skip
FACTORS = {
    "schedule": tuple(SCHEDULES),
    "model": tuple(MODELS),
    "tp": (1, 2),
    "stream": tuple(STREAMS),
    "attention": tuple(ATTENTION),
    "mode": tuple(MODES),
    "dropout": (0.0, 0.1),
    "documents": (False, True),
    "params": ("fp32", "bf16", "fp64"),
    "loss_chunk": ("auto", 5),
}


def valid(item: Combination) -> bool:
    """One tensor rank has one kind of stream; both ends of a pipeline cannot have one table at two times; a segment
    lies in one stage.
    """
    if item["schedule"] == "pipedream" and item["model"] == "qwen":
        return False
    short = item["schedule"] in ("interleaved", "zb-v", "dualpipev")  # stages of one block
    return (item["tp"] > 1 or item["stream"] == "whole") and not (short and item["mode"] == "segment")


def job_of(item: Combination) -> Job:
    model = MODELS[item["model"]] | ATTENTION[item["attention"]] | {"dropout": item["dropout"], "layers": 4}
    layout = SCHEDULES[item["schedule"]] | STREAMS[item["stream"]] | {"tp": item["tp"], "pp": 2}
    return memory_job(model, item["params"], MODES[item["mode"]], item["loss_chunk"], microbatches=4, **layout)


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2])
def test_every_pair_of_options_too(tp: int) -> None:
    items = [item for item in pairwise(FACTORS, valid) if item["tp"] == tp]
    assert len(items) > 10
    for rank, found in enumerate(forked(2 * tp, many, [(job_of(i), i["documents"]) for i in items], timeout_s=900)):
        for item, one in zip(items, found, strict=True):
            assert one.measured == one.predicted, f"rank {rank}, {item}: {one.actions}"


EACH: dict[str, Case] = {
    name: ({"layers": 4}, dict(pp=2, microbatches=4, **layout)) for name, layout in SCHEDULES.items()
} | {
    "1f1b, again": ({"layers": 4}, dict(pp=2, microbatches=4, recompute=MODES["segment"])),
    "zb-h1, gpt": ({**GPT, "layers": 2}, dict(pp=2, microbatches=3, schedule="zbh1", params="bf16", loss_chunk=5)),
    "zb-v, in part": ({"qk_norm": True, "layers": 4}, dict(pp=2, schedule="zbv", recompute=MODES["selective"])),
}  # fmt: skip


@BOTH
def test_bytes_alive_after_every_action_are_predicted(other: bool) -> None:
    assert_predicted(2, EACH, other)


SPLIT: dict[int, dict[str, Case]] = {
    2: {
        "softmax": ({**SOFTMAX, "jitter": 0.1, "shared_experts": 1, "aux_loss": 0.1}, dict(params="bf16")),
        "deepseek": ({**DEEPSEEK, "balance_loss": 0.1}, dict(recompute=dict(mode="selective"), loss_chunk=5)),
        "one head, predicting": ({**DEEPSEEK, "heads": 1, "mtp_depth": 2}, dict(params="bf16")),
        "whole queries": ({**DEEPSEEK, "q_lora_rank": None, "v_head_dim": 9}, dict(recompute=dict(mode="full"))),
        "formed scores": ({**DEEPSEEK, "heads": 1, "attention": "math"}, {}),
    },
    4: {
        "cut": ({**DEEPSEEK, "mtp_depth": 1}, dict(tp=2, sequence_parallel=True, loss_chunk=5)),
        "kept": ({**DEEPSEEK, "q_lora_rank": None}, dict(tp=2, sequence_parallel=True, keep_gathered=True)),
        "whole": ({**SOFTMAX, "mtp_depth": 1, "shared_experts": 1}, dict(tp=2)),
        "ulysses": ({**DEEPSEEK, "mtp_depth": 1}, dict(cp=2, context="ulysses")),
        "experts": ({**SOFTMAX, "mtp_depth": 1}, dict(dp_shard=2, ep=2, microbatches=4)),
        "rows in parts": ({**DEEPSEEK, "capacity_factor": 0.7}, dict(dp_shard=2, etp=2, microbatches=4)),
    },
}


@BOTH
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_where_i_and_w_are_split_experts_latents_and_predictions_keep_what_w_reads(ranks: int, other: bool) -> None:
    split = {"microbatches": 2, "pp": 2, "schedule": "zbh1"}
    assert_predicted(ranks, {name: (model, {**split, **job}) for name, (model, job) in SPLIT[ranks].items()}, other)


def test_weights_kept_for_backwards_to_come_are_counted() -> None:
    """Of 3 stages the first keeps two versions beside its newest, the last none; all else is as with a flush."""
    stale, flushed = (
        memory_job({**GPT, "layers": 3}, microbatches=4, pp=3, schedule=schedule) for schedule in ("pipedream", "1f1b")
    )
    kept = []
    for one, other in zip(forked(3, step_bytes, stale, False), forked(3, step_bytes, flushed, False), strict=True):
        assert one.measured == one.predicted and other.measured == other.predicted and one.actions == other.actions
        kept.append(max(a - b for a, b in zip(one.measured, other.measured, strict=True)))

    def version(*units: str) -> int:
        names = tuple(f"{unit}." for unit in units)
        return sum(-(-spec.numel // 8) * 8 * 4 for spec in param_specs(stale.model) if spec.name.startswith(names))

    assert kept == [2 * version("embed", "blocks.0"), version("blocks.1"), 0]


def test_of_a_llama_block_w_waits_with_more_than_i() -> None:
    """What docs/memory.md says: 21 inputs, 17 before I."""
    section = ModelSection(layers=32, width=4096, heads=32, kv_heads=8, mlp_width=14336, vocab=128256)
    sizes = Sizes(section, batch=1, length=8192)
    found = [sum(terms.values()) / sizes.stream_bytes for terms in (cost.block(sizes), block_after(sizes))]
    assert [round(number) for number in found] == [17, 21]


def test_between_i_and_w_a_block_keeps_gradients_in_place_of_queries_and_scores() -> None:
    sizes = Sizes.of(memory_job({}), False)
    before, after = cost.block(sizes), block_after(sizes)
    gone = {"q, k, v", "log-sum-exp", "gate up"}
    assert before.keys() - after.keys() == gone
    assert {name for name in after if name not in before} == {
        "qkv gradients", "q k norm gradients", "out gradient", "gate up gradients", "down gradient", "norm gradients",
    }  # fmt: skip
