"""Bytes of activations, measured on real runs, equal to `recompute/cost.py` to the byte; and the papers' formulas."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.recompute.memory import MODELS, MODES, STREAMS, many, memory_job, saved_bytes, step_bytes
from tests.sweep import Combination, every, pairwise

from heptad.config.schema import Job, ModelSection
from heptad.launch.forked import forked
from heptad.recompute import cost
from heptad.recompute.peak import alive, extra_forwards, forward_bytes
from heptad.recompute.policy import segments
from heptad.recompute.sizes import Sizes
from heptad.schedule.action import Segments, UnitUse, gradient_accumulation

PLACED = MODES | {"one selective": dict(mode="selective", layers=(1,))}
ATTENTION: dict[str, dict[str, Any]] = {
    "flash": dict(attention="flash"),
    "math": dict(attention="math"),
    "dropped": dict(attention_dropout=0.1),
}
NAMED = {"model": tuple(MODELS), "tp": (1, 2, 4), "stream": tuple(STREAMS), "attention": tuple(ATTENTION)}
FACTORS = NAMED | {
    "mode": tuple(PLACED),
    "dropout": (0.0, 0.1),
    "documents": (False, True),
    "window": (None, 3),
    "params": ("fp32", "bf16", "fp64"),
    "loss_chunk": ("auto", 5),
}


def valid(item: Combination) -> bool:
    """One rank has one kind of stream."""
    return item["tp"] > 1 or item["stream"] == "whole"


def job_of(item: Combination) -> Job:
    """The job of a combination."""
    model = MODELS[item["model"]] | ATTENTION[item["attention"]] | {name: item[name] for name in ("dropout", "window")}
    layout = STREAMS[item["stream"]] | {"tp": item["tp"]}
    return memory_job(model, item["params"], PLACED[item["mode"]], item["loss_chunk"], **layout)


def assert_predicted(tp: int, items: list[Combination]) -> None:
    """Every rank's live bytes after every action of a step."""
    cases = [(job_of(item), item["documents"]) for item in items]
    for rank, found in enumerate(forked(tp, many, cases, timeout_s=900)):
        for item, one in zip(items, found, strict=True):
            assert one.measured == one.predicted, f"rank {rank}, {item}: {one.actions}"


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_bytes_alive_after_every_action_are_predicted(tp: int) -> None:
    items = [item for item in pairwise(FACTORS, valid) if item["tp"] == tp]
    assert len(items) >= 3
    assert_predicted(tp, items)


@pytest.mark.slow
@pytest.mark.parametrize("mode", PLACED)
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_bytes_of_every_model_stream_mode_and_attention(tp: int, mode: str) -> None:
    """All combinations of what the formula distinguishes; dtypes, documents, windows and chunks in turn."""
    factors = NAMED | {"mode": (mode,), "tp": (tp,), "dropout": (0.0, 0.1)}
    items = []
    for place, item in enumerate(every(factors, valid)):
        rest = {"documents": place % 4 > 1, "params": ("fp32", "bf16", "fp64")[place % 3]}
        items.append(item | rest | {"loss_chunk": ("auto", 5)[place % 5 == 0], "window": (None, 3)[place % 8 > 4]})
    assert_predicted(tp, items)


@pytest.mark.parametrize("attention", ATTENTION)
def test_saved_tensor_hooks_see_the_same_bytes(attention: str) -> None:
    """All but the anchor, which is a leaf of the graph, passes autograd's hooks."""
    job = memory_job(MODELS["qwen"] | ATTENTION[attention] | {"dropout": 0.1}, tp=2, sequence_parallel=True)
    for rank, found in enumerate(forked(2, saved_bytes, job, False, 2)):
        terms = cost.block(Sizes.of(job, False, index=rank)) | cost.shared(Sizes.of(job, False))
        assert found == sum(terms.values()) - cost.ANCHOR_BYTES


@pytest.mark.slow
def test_compiled_dropout_keeps_words_of_rows_and_columns_in_place_of_masks() -> None:
    scores = dict(dropout=0.1, attention_dropout=0.1, qk_norm=True, layers=1)
    cases = [
        memory_job(dict(dropout=0.1, layers=1)), memory_job(scores, "bf16", dict(mode="selective")),
    ]  # fmt: skip
    compiled = [job.model_copy(update={"train": job.train.model_copy(update={"compile": True})}) for job in cases]
    (found,) = forked(1, many, [(job, True) for job in compiled], timeout_s=900)
    for one, job in zip(found, compiled, strict=True):
        assert one.measured == one.predicted
        assert cost.block(Sizes.of(job, True))["mlp dropout mask"] == 4 * (2 * 7 + 10)


def test_a_second_micro_batch_keeps_nothing_of_the_first_but_its_loss() -> None:
    (found,) = forked(1, step_bytes, memory_job({}, "fp32", microbatches=2), False)
    assert found.measured == found.predicted
    half = len(found.measured) // 2
    later = [two - one for one, two in zip(found.measured[:half], found.measured[half:], strict=True)]
    assert later[1:] == [4] * (half - 1)  # the first has no tables yet


def paper(tp: int = 1, **fields: Any) -> Sizes:
    """The assumptions of arXiv 2205.05198: bf16, GELU MLP of 4 D, LayerNorm, as many kv heads, all three dropouts."""
    section = ModelSection(
        layers=3, width=32, heads=8, head_dim=4, mlp_width=128, norm="layer", mlp="plain", activation="gelu",
        positions="learned", dropout=0.1, attention_dropout=0.1,
    )  # fmt: skip
    return Sizes(section, batch=2, length=12, tp=tp, **fields)


EXTRA = ("attention norm statistics", "mlp norm statistics", "anchor")
"""What the paper does not count: 16 bytes a token of LayerNorm's mean and 1/std in fp32, and 4 bytes."""


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_the_published_formulas_come_out_to_the_byte(tp: int) -> None:
    """34, 10 + 24/T, 4 + 30/T and 5·H·L/D: per B·L·D; ours is those and `EXTRA`, named."""
    whole, cut = paper(tp), paper(tp, sequence=True)
    kept = replace(cut, keep=True)
    unit = whole.tokens * whole.section.width  # B·L·D
    scores = 5 * whole.section.heads * whole.length * whole.tokens // tp  # 5·H·L/(D·T) · B·L·D
    for sizes, formula in ((whole, 10 + 24 / tp), (cut, 34 / tp), (kept, 4 + 30 / tp)):
        terms = cost.block(sizes)
        extra = {name: terms.pop(name) for name in EXTRA}
        assert sum(terms.values()) == formula * unit + scores
        assert sum(extra.values()) == 16 * sizes.own_tokens + 4
        selective = cost.block(sizes, "selective")
        assert sum(selective.values()) - sum(extra.values()) == formula * unit
        flash = replace(sizes, section=sizes.section.model_copy(update={"attention_dropout": 0.0}))
        lse = 4 * sizes.tokens * sizes.section.heads // tp
        assert sum(cost.block(flash).values()) - sum(extra.values()) == formula * unit + lse
    one_block = ((1,), (2,), (3,))
    full = [forward_bytes(sizes, one_block) - forward_bytes(sizes, ((1, 2, 3),)) for sizes in (whole, cut)]
    assert full == [2 * 2 * unit, 2 * 2 * unit // tp]  # segments of 3 keep 2 inputs less: 2·B·L·D each


def test_the_papers_block_is_measured_too() -> None:
    for stream in ("cut", "kept"):
        section = paper().section.model_dump(exclude_defaults=True) | {"max_positions": 12}
        job = memory_job(section, "bf16", batch=2, length=12, tp=4, **STREAMS[stream])
        for found in forked(4, step_bytes, job, False):
            assert found.measured == found.predicted
            wanted = paper(4, sequence=True, keep=stream == "kept")
            assert found.measured[2] - found.measured[1] == sum(cost.block(wanted).values())


def uses_of(layers: int) -> list[UnitUse]:
    """Units that read and write one bucket each."""
    return [UnitUse(str(unit), (unit,), (unit,), (unit,)) for unit in range(layers + 2)]


def segments_of(layers: int, segment: Any) -> Segments:
    """All blocks in segments."""
    return segments("full", segment, (), ["embed", *["block"] * layers, "head"])


@pytest.mark.parametrize("segment", [1, 2, 3, "sqrt", 9])
def test_segments_hold_what_the_schedule_of_chen_predicts(segment: Any) -> None:
    """Measured: the peak between actions is ⌈L/k⌉ inputs and k blocks; each block runs forward once more."""
    job = memory_job({"layers": 9}, "bf16", dict(mode="full", segment=segment))
    (found,) = forked(1, step_bytes, job, False)
    assert found.measured == found.predicted
    assert sum("C" in action for action in found.actions) == extra_forwards(segments_of(9, segment)) == 9
    sizes = Sizes.of(job, False)
    size, block = (3 if segment == "sqrt" else segment), sum(cost.block(sizes).values())
    inputs = -(-9 // size) - 1  # kept of the segments below the last one, which is under way
    rest = sum(cost.shared(sizes).values()) + sum(cost.embed(sizes).values()) + sizes.wide_bytes
    last = len(range(9 - 9 % size, 9)) or size
    under_way = last * block + inputs * sizes.stream_bytes + sizes.stream_bytes  # and the gradient that comes in
    whole = size * block + sizes.stream_bytes * (inputs if 9 % size == 0 else inputs - 1) + sizes.stream_bytes
    head = sum(cost.head(sizes).values()) - sizes.wide_bytes + (inputs + 1) * sizes.stream_bytes
    assert max(found.measured) == rest + max(under_way, whole, head)


def test_sqrt_is_least_where_a_block_keeps_its_input_and_short_segments_are_where_it_keeps_more() -> None:
    """What docs/memory.md says of the choice of k, for a block of Llama 3 8B and for one of one input (Chen et al.)."""
    section = ModelSection(layers=32, width=4096, heads=32, kv_heads=8, mlp_width=14336, vocab=128256)
    sizes = Sizes(section, batch=1, length=8192, element_bytes=2)

    def peak(segment: Any) -> int:
        chosen = segments_of(32, segment)
        return max(found for _, found in alive(sizes, gradient_accumulation(uses_of(32), 1, chosen), chosen))

    block = sum(cost.block(sizes).values())
    assert 15 < block / sizes.stream_bytes < 20
    by_size = {size: peak(size) for size in (1, 2, 4, 8)}
    assert min(by_size, key=lambda size: by_size[size]) == 1
    assert by_size[1] < peak("sqrt") < forward_bytes(sizes)
    inputs = {size: 32 / size + size for size in range(1, 33)}
    assert min(inputs, key=lambda size: inputs[size]) in (5, 6)


def test_cutting_the_stream_at_four_ranks_leaves_the_share_that_the_formula_says() -> None:
    """(34/T) ÷ (10 + 24/T) at T = 4: 0.53 of plain tensor parallelism, measured over three blocks."""
    section = paper().section.model_dump(exclude_defaults=True) | {"max_positions": 12, "attention_dropout": 0.0}
    found = []
    for stream in ("whole", "cut"):
        job = memory_job(section, "bf16", batch=2, length=12, tp=4, **STREAMS[stream])
        (one, *_) = forked(4, step_bytes, job, False)
        found.append(one.measured[3] - one.measured[1])  # two blocks
    unit, statistics = 24 * 32, 16 * 24
    lse = 4 * 24 * 8 // 4
    assert found[0] == 2 * (16 * unit + statistics + lse + 4)
    assert found[1] == 2 * (8.5 * unit + statistics // 4 + lse + 4)
