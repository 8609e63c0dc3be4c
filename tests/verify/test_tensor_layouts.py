"""Acceptance of the tensor axis and of recompute: every layout and policy computes what one device computes.

Every gradient within 1e-10 of one device's in float64, every parameter after the update, replicas bit for bit, and the
ledger equal to the prediction on every rank. A pairwise cover and a seeded sample of the rest run under `slow`: the
pairs of options are in the fast part of `test_everything.py` (`test_older_covers.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from tests.sweep import every, name_of, pairs, pairwise, possible, sampled
from tests.verify.layouts import GPT, layout_job
from tests.verify.several import fast
from tests.verify.test_layouts import assert_right

from heptad.config.check import problems
from heptad.config.schema import Job

STREAMS: dict[str, dict[str, bool]] = {
    "": {},
    "cut": dict(sequence_parallel=True),
    "kept": dict(sequence_parallel=True, keep_gathered=True),
}
DATA: dict[str, dict[str, int]] = {
    "1": {},
    "2": dict(dp_shard=2),
    "2x1": dict(dp_replicate=2),
    "2x2": dict(dp_replicate=2, dp_shard=2),
}
BLOCKS: dict[str, dict[str, Any]] = {
    "gpt": GPT | dict(attention_bias=True, kv_heads=4),
    "llama": {},
    "qwen3": dict(qk_norm=True),
}
RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": dict(mode="selective"),
    "full": dict(mode="full"),
    "segment2": dict(mode="full", segment=2),
    "layers": dict(mode="full", layers=(0, 2)),
}
FACTORS: dict[str, tuple[Any, ...]] = {
    "tensor": ("1", "2", "2cut", "2kept", "4", "4cut", "4kept"),
    "data": tuple(DATA),
    "zero": (0, 1, 2, 3),
    "blocks": tuple(BLOCKS),
    "tied": (False, True),
    "recompute": tuple(RECOMPUTE),
    "attention": ("flash", "math"),
    "dropout": (0.0, 0.1),
    "loss_chunk": ("auto", 3),
    "offload": ("none", "cpu"),
}
NUMBER, SAMPLE, SEED = 48_000, 150, 7


def valid(item: dict[str, Any]) -> bool:
    """At most 8 ranks."""
    return int(item["tensor"][0]) * (4 if item["data"] == "2x2" else int(item["data"][0])) <= 8


def job_of(item: dict[str, Any], **sections: Any) -> Job:
    """Three blocks; scores are dropped too where they are formed."""
    tp, stream, degrees = int(item["tensor"][0]), STREAMS[item["tensor"][1:]], DATA[item["data"]]
    ranks = degrees.get("dp_replicate", 1) * degrees.get("dp_shard", 1)
    scores = item["dropout"] if item["attention"] == "math" else 0.0
    dropped = dict(dropout=item["dropout"], attention_dropout=scores, attention=item["attention"])
    return layout_job(
        zero=item["zero"],
        ranks=ranks,
        hsdp="dp_replicate" in degrees,
        accumulation=1 if ranks == 4 else 2,
        tied=item["tied"],
        model=BLOCKS[item["blocks"]] | dict(layers=3, tied=item["tied"]) | dropped,
        layout=dict(tp=tp, **stream),
        recompute=RECOMPUTE[item["recompute"]],
        train=dict(loss_chunk=item["loss_chunk"]),
        offload=dict(activations=item["offload"]),
        **sections,
    )


DRAWN = sampled(FACTORS, valid, 800, SEED)
COVER = pairwise(FACTORS, valid, DRAWN)
REST = [item for item in DRAWN if item not in COVER][:SAMPLE]


@pytest.mark.slow
@pytest.mark.parametrize("item", COVER, ids=name_of)
def test_pairwise_cover(item: dict[str, Any]) -> None:
    assert_right(job_of(item))


@pytest.mark.slow
@pytest.mark.parametrize("item", REST, ids=name_of)
def test_a_sample_of_the_rest(item: dict[str, Any]) -> None:
    assert_right(job_of(item))


def test_the_cover_has_every_pair_and_both_counts_are_printed(record_property: Callable[[str, object], None]) -> None:
    assert set().union(*map(pairs, COVER)) == possible(FACTORS, valid)
    record_property(
        "summary",
        f"verify, tensor axis and recompute: pairwise cover {len(COVER)} of {NUMBER} jobs "
        f"and {len(REST)} of the others under `-m slow`",
    )
    places = every({name: FACTORS[name] for name in ("tensor", "data")}, valid)
    others = [len(levels) for name, levels in FACTORS.items() if name not in ("tensor", "data")]
    assert len(places) * math.prod(others) == NUMBER
    assert 35 <= len(COVER) <= 60 and len(REST) == SAMPLE


def test_every_job_of_the_sweep_is_a_legal_one() -> None:
    assert not [found for item in (*COVER, *REST) for found in problems(job_of(item))]


CUT4: dict[str, Any] = dict(tp=4, sequence_parallel=True)
VARIANTS: dict[str, dict[str, Any]] = {
    "fp32": dict(params="fp32", ranks=2, layout=dict(tp=2, sequence_parallel=True), model=BLOCKS["gpt"]),
    "fp32-4": dict(params="fp32", ranks=1, layout=dict(tp=4), model=BLOCKS["qwen3"]),
    "bf16": dict(params="bf16", ranks=2, layout=dict(tp=2), model=BLOCKS["qwen3"]),
    "bf16-cut": dict(params="bf16", ranks=1, layout=CUT4, model=BLOCKS["gpt"]),
    "bf16-reduction": dict(precision=dict(params="bf16", reduce="bf16"), zero=2, layout=dict(tp=2)),
    "muon": dict(optimizer=dict(name="muon", muon_lr=0.05), zero=1, layout=dict(tp=2)),
    "muon-cut": dict(optimizer=dict(name="muon", muon_lr=0.05), ranks=1, layout=CUT4, model=dict(kv_heads=1)),
    "sgd": dict(optimizer=dict(name="sgd", momentum=0.9), zero=2, layout=dict(tp=2, bucket_mb=0.002, prefetch=2)),
    "tensor-outermost": dict(zero=1, layout=dict(tp=2, sequence_parallel=True, order="tp-pp-dp_replicate-dp_shard-cp")),
    "tensor-outside-shards": dict(
        ranks=4, hsdp=True, accumulation=1, layout=dict(tp=2, order="pp-dp_replicate-tp-dp_shard-cp")
    ),
    "frozen-below": dict(
        model=BLOCKS["gpt"] | dict(frozen=("embed.*", "blocks.0.*")), layout=dict(tp=2, sequence_parallel=True)
    ),
    "frozen-inside": dict(
        model=dict(frozen=("*.q.weight", "*.down.weight", "*norm.weight")),
        ranks=1,
        layout=CUT4,
        recompute=dict(mode="full"),
    ),
    "frozen-head": dict(model=dict(frozen=("head.*",)), layout=dict(tp=2), train=dict(loss_chunk=3)),
    "frozen-matrices": dict(
        model=BLOCKS["qwen3"] | dict(frozen=("*.k.*", "*.v.*", "*.out.*", "*.mlp.*")),
        layout=dict(tp=2, sequence_parallel=True, keep_gathered=True),
        zero=2,
    ),
    "two sequences a micro-batch": dict(
        ranks=1, layout=CUT4, train=dict(micro_batch=2, global_batch=4, loss_chunk=5), model=BLOCKS["gpt"]
    ),
    "one kv head": dict(ranks=1, layout=dict(tp=4), model=dict(kv_heads=1, qkv_bias=True)),
    "8 ranks of one kv head": dict(
        ranks=1,
        accumulation=1,
        layout=dict(tp=8, sequence_parallel=True),
        model=dict(heads=8, kv_heads=1, mlp_width=23),
    ),
}


COVERED = (
    "muon", "sgd", "tensor-outermost", "tensor-outside-shards", "frozen-below", "frozen-inside", "frozen-head",
    "two sequences a micro-batch", "one kv head",
)  # fmt: skip
"""Whose options the cover of all axes has in every pair."""


@pytest.mark.parametrize("name", fast(VARIANTS, lambda name: name not in COVERED))
def test_what_else_a_job_can_say(name: str) -> None:
    job = layout_job(**VARIANTS[name])
    assert not list(problems(job))
    assert_right(job)
