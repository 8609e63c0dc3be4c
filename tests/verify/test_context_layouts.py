"""Acceptance of the context axis: every way to cut a sequence, on every layout, computes what one device computes.

Every gradient within 1e-10 of one device's in float64, every parameter after the update, replicas bit for bit, and the
ledger equal to the prediction on every rank. A pairwise cover and a seeded sample of the rest run under `slow`: the
pairs of options are in the fast part of `test_everything.py` (`test_older_covers.py`).
Jobs of as many ranks run one after the other in the same processes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from tests.sweep import Pair, every, pairs, pairwise, possible, sampled
from tests.verify.layouts import GPT, layout_job
from tests.verify.several import Case, Item, assert_all_right, fast, together

from heptad.axes.pipeline.generate import GENERATORS
from heptad.axes.pipeline.generate import problems as schedule_problems
from heptad.axes.pipeline.legal import check_job
from heptad.config.pipeline import STAGES_A_RANK
from heptad.config.schema import Job
from heptad.loader.prepare import PreparedData
from heptad.loader.store import Tokens
from heptad.loader.synthetic import synthetic

KINDS: dict[str, dict[str, Any]] = {
    "ring": {},
    "ulysses": dict(context="ulysses"),
    "ring+ulysses": dict(context="ring+ulysses", cp_ulysses=2),
    "gather": dict(context="gather"),
}
SIGHT = ("causal", "packed", "window", "packed window")
RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "full": dict(mode="full"),
    "segments": dict(mode="full", segment=2),
    "selective": dict(mode="selective"),
}
ATTENTION: dict[str, dict[str, Any]] = {
    "flash": dict(attention="flash"),
    "math": dict(attention="math"),
    "dropped": dict(attention_dropout=0.1),
}
FACTORS: dict[str, tuple[Any, ...]] = {
    "cp": (2, 3, 4),
    "kind": tuple(KINDS),
    "split": ("zigzag", "contiguous"),
    "tensor": ("1", "2", "2cut"),
    "pipeline": ("none", "1f1b", "zbv", "dualpipe"),  # the others: `test_every_schedule` and the sample
    "data": (1, 2),
    "sight": SIGHT,
    "heads": ("MHA", "GQA", "MQA"),
    "zero": (0, 1, 2, 3),
    "recompute": tuple(RECOMPUTE),
    "attention": tuple(ATTENTION),
    "length": (5, 8, 13),
    "rows": (1, 2),
}
PIPELINES = ("none", *(name for name, generator in GENERATORS.items() if not generator.asynchronous))
PLACES = ("cp", "kind", "split", "tensor", "pipeline", "data")
"""The first factors: what `valid` looks at."""
SAMPLE, POOL, SEED = 300, 1500, 1
WINDOW = 3


def stages_of(item: Item) -> int:
    return 1 if item["pipeline"] == "none" else 2 * STAGES_A_RANK.get(item["pipeline"], 1)


def ranks_of(item: Item) -> int:
    pipeline = 1 if item["pipeline"] == "none" else 2
    found: int = item["cp"] * int(item["tensor"][0]) * pipeline * item["data"]
    return found


def valid(item: Item) -> bool:
    """At most 8 ranks; two factors of C for both kinds at once; a split where it is read."""
    if item["kind"] == "ring+ulysses" and item["cp"] != 4:
        return False
    return ranks_of(item) <= 8 and (item["kind"] != "ulysses" or item["split"] == "zigzag")


@cache
def _microbatches(schedule: str) -> int:
    """Few, as the schedule can."""
    if schedule == "none":
        return 2
    vpp = STAGES_A_RANK.get(schedule, 1)
    return next(number for number in range(3, 9) if not list(schedule_problems(schedule, 2, vpp, number)))


def heads_of(item: Item) -> dict[str, int]:
    """Dealt over C ranks of T: 6 heads for C = 3; groups of query heads that do and do not divide by C."""
    heads, groups = (6, 2) if item["cp"] == 3 else (8, 4)
    return dict(heads=heads, kv_heads={"MHA": heads, "GQA": groups, "MQA": 1}[item["heads"]])


def job_of(item: Item, **sections: Any) -> Job:
    """At least three blocks, for segments of two; everything drops."""
    model = heads_of(item) | ATTENTION[item["attention"]] | dict(layers=max(3, stages_of(item)), dropout=0.1)
    model |= dict(window=WINDOW if "window" in item["sight"] else None, max_positions=13)
    layout = KINDS[item["kind"]] | dict(cp=item["cp"], context_split=item["split"], tp=int(item["tensor"][0]))
    layout |= dict(sequence_parallel=item["tensor"] == "2cut")
    if item["pipeline"] != "none":
        layout |= dict(pp=2, schedule=item["pipeline"])
    accumulation, rows = _microbatches(item["pipeline"]), item["rows"]
    return layout_job(
        zero=item["zero"],
        ranks=item["data"],
        accumulation=accumulation,
        model=model | sections.pop("model", {}),
        layout=layout | sections.pop("layout", {}),
        recompute=RECOMPUTE[item["recompute"]],
        data=dict(seq_len=item["length"]),
        train=dict(micro_batch=rows, global_batch=item["data"] * accumulation * rows),
        **sections,
    )


def tokens_of(job: Job, packed: bool) -> PreparedData:
    """`synthetic`; not packed: every row is a piece of one long document."""
    data = synthetic(job)
    if packed:
        return data
    (source,) = data.sources
    number = source.train.num_tokens
    ids, targets = source.train.ids(0, number), source.train.may_be_target(0, number)
    whole = Tokens.from_arrays(ids, np.array([number]), targets)
    return replace(data, sources=(replace(source, train=whole),))


DRAWN = sampled(FACTORS, valid, POOL, SEED)
COVER = pairwise(FACTORS, valid, DRAWN)
REST = [item for item in sampled(FACTORS | {"pipeline": PIPELINES}, valid, POOL, SEED) if item not in COVER][:SAMPLE]


def named(items: list[Item]) -> str:
    return f"{ranks_of(items[0])} ranks-" + "-".join(f"{item['kind']}{item['cp']}" for item in items)


def cases_of(items: list[Item]) -> list[Case]:
    jobs = [(job_of(item), "packed" in item["sight"]) for item in items]
    return [(job, tokens_of(job, packed)) for job, packed in jobs]


@pytest.mark.slow
@pytest.mark.parametrize("items", together(COVER, ranks_of), ids=named)
def test_pairwise_cover(items: list[Item]) -> None:
    assert_all_right(cases_of(items))


@pytest.mark.slow
@pytest.mark.parametrize("items", together(REST, ranks_of), ids=named)
def test_a_sample_of_the_rest(items: list[Item]) -> None:
    assert_all_right(cases_of(items))


def possible_pairs() -> set[Pair]:
    """Of two factors that `valid` looks at, the pairs that can be; of others all."""
    found = possible({name: FACTORS[name] for name in PLACES}, valid)
    for one, two in combinations(FACTORS, 2):
        if two not in PLACES:
            found |= {((one, first), (two, second)) for first in FACTORS[one] for second in FACTORS[two]}
    return found


def test_the_cover_has_every_pair_and_both_counts_are_printed(record_property: Callable[[str, object], None]) -> None:
    places = len(every({name: FACTORS[name] for name in PLACES} | {"pipeline": PIPELINES}, valid))
    number = places * math.prod(len(levels) for name, levels in FACTORS.items() if name not in PLACES)
    assert set().union(*map(pairs, COVER)) == possible_pairs()
    record_property(
        "summary",
        f"verify, context axis: pairwise cover {len(COVER)} of {number} jobs "
        f"and {len(REST)} of the others under `-m slow`",
    )
    assert len(COVER) < 80 and len(REST) == SAMPLE < number


def test_every_job_of_the_sweep_is_a_legal_one() -> None:
    for item in (*COVER, *REST):
        check_job(job_of(item))


def test_a_row_of_the_causal_jobs_is_one_document_and_the_others_hold_several() -> None:
    job = job_of(COVER[0])
    (whole,), (packed,) = (tokens_of(job, packed).sources for packed in (False, True))
    assert whole.train.num_documents == 1 and packed.train.num_documents > packed.train.num_tokens / job.data.seq_len


@pytest.mark.slow
def test_every_schedule() -> None:
    others = [name for name in PIPELINES if name not in FACTORS["pipeline"]]
    items = [COVER[0] | dict(cp=2, kind="ring", tensor="1", data=1, pipeline=name) for name in others]
    assert_all_right(cases_of(items))


BOTH: dict[str, Any] = dict(cp=4, context="ring+ulysses", cp_ulysses=2)
VARIANTS: dict[str, dict[str, Any]] = {
    "fp32": dict(params="fp32", ranks=1, layout=dict(cp=3)),
    "bf16": dict(params="bf16", ranks=2, layout=dict(cp=2)),
    "bf16 dealt": dict(params="bf16", ranks=1, layout=dict(cp=4, context="ulysses"), model=dict(qk_norm=True)),
    "bf16 both, tensor": dict(params="bf16", ranks=1, layout=BOTH | dict(tp=2), model=dict(heads=8)),
    "bf16 gathered, window": dict(params="bf16", ranks=1, layout=dict(cp=4, context="gather"), model=dict(window=3)),
    "gpt": dict(ranks=1, layout=dict(cp=3), model=GPT | dict(attention_bias=True)),
    "gpt, tensor": dict(ranks=1, layout=dict(cp=2, tp=2, sequence_parallel=True), model=GPT | dict(dropout=0.1)),
    "muon": dict(optimizer=dict(name="muon", muon_lr=0.05), zero=1, layout=dict(cp=3)),
    "hsdp": dict(ranks=4, hsdp=True, layout=dict(cp=2, context="gather")),
    "context outermost": dict(ranks=2, zero=1, layout=BOTH | dict(order="cp-tp-pp-dp_replicate-dp_shard")),
    "chunks": dict(ranks=1, layout=dict(cp=2), train=dict(loss_chunk=3)),
    "offload": dict(ranks=1, layout=dict(cp=2), offload=dict(activations="cpu")),
    "offload dealt": dict(
        ranks=1, layout=dict(cp=2, context="ulysses"), offload=dict(activations="cpu"), recompute=dict(mode="full")
    ),
    "compiled": dict(ranks=1, layout=dict(cp=2), train=dict(compile=True)),
    "compiled, dropped": dict(
        ranks=1, layout=dict(cp=2), train=dict(compile=True), model=dict(dropout=0.1, attention_dropout=0.1)
    ),
    "pipedream": dict(
        ranks=1,
        zero=1,
        accumulation=4,
        layout=dict(cp=2, pp=2, schedule="pipedream"),
        optimizer=dict(clip_norm=None),
        model=dict(layers=3),
    ),
    "frozen below": dict(
        ranks=1, model=dict(frozen=("embed.*", "blocks.0.*")), layout=BOTH, recompute=dict(mode="full", layers=(1,))
    ),
    "frozen up to the core": dict(
        ranks=1, model=dict(frozen=("embed.*", "blocks.0.attention.[nqkv]*")), layout=dict(cp=3, context="gather")
    ),
    "queries alone": dict(
        ranks=1, model=dict(frozen=("embed.*", "blocks.0.attention.[nkv]*")), layout=dict(cp=4, context="ulysses")
    ),
    "values alone": dict(ranks=1, model=dict(frozen=("embed.*", "blocks.0.attention.[nkq]*")), layout=dict(cp=3)),
    "frozen matrices": dict(ranks=1, model=dict(frozen=("*.q.*", "*.k.*", "*.v.*")), layout=BOTH),
    "as many tokens as ranks": dict(ranks=1, layout=dict(cp=4), data=dict(seq_len=4)),
    "one row of padding on some": dict(ranks=1, layout=dict(cp=4), data=dict(seq_len=5)),
    "8 context ranks": dict(
        ranks=1,
        accumulation=1,
        layout=dict(cp=8, context="ring+ulysses", cp_ulysses=4),
        model=dict(kv_heads=1, max_positions=11),
        data=dict(seq_len=11),
    ),
}


COVERED = (
    "gpt",
    "gpt, tensor",
    "muon",
    "hsdp",
    "context outermost",
    "chunks",
    "offload",
    "offload dealt",
    "frozen below",
)
"""Whose options the cover of all axes has in every pair."""
SLOW = (*COVERED, "compiled, dropped")


@pytest.mark.parametrize("name", fast(VARIANTS, lambda name: name not in SLOW))
def test_what_else_a_job_can_say(name: str) -> None:
    job = layout_job(**VARIANTS[name])
    check_job(job)
    assert_all_right([(job, synthetic(job))])
