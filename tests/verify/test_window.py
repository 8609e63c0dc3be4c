"""A sliding window under the axes: every layout computes what one device computes, packed documents included."""

from __future__ import annotations

import pytest
from tests.verify.layouts import GPT, layout_job
from tests.verify.several import assert_all_right

from heptad.axes.pipeline.legal import check_job
from heptad.cli.job import ready
from heptad.config.schema import Job
from heptad.loader.synthetic import synthetic
from heptad.verify.run import verify
from heptad.verify.shrink import shrink

MATH = dict(window=2, attention="math", attention_dropout=0.1)
TWO: list[Job] = [
    layout_job(ranks=1, zero=0, layout=dict(tp=2), model=dict(window=3)),
    layout_job(ranks=1, zero=0, layout=dict(tp=2, sequence_parallel=True), model=MATH),
    layout_job(ranks=1, zero=0, layout=dict(pp=2), model=dict(window=3, layers=3), recompute=dict(mode="full")),
    layout_job(ranks=2, zero=3, model=GPT | MATH | {"kv_heads": 4}, recompute=dict(mode="selective")),
    layout_job(ranks=2, zero=3, model=dict(window=3), offload=dict(activations="cpu")),
    layout_job(ranks=2, zero=3, model=dict(window=3), layout=dict(engine="fsdp2")),
]
FOUR: list[Job] = [
    layout_job(ranks=1, zero=0, layout=dict(tp=2, pp=2, schedule="zbv", vpp=2), model=dict(window=1, layers=5)),
    layout_job(ranks=2, zero=2, layout=dict(tp=2, sequence_parallel=True), model=dict(window=6, qk_norm=True)),
]


@pytest.mark.parametrize("jobs", [TWO, FOUR], ids=["2 ranks", "4 ranks"])
def test_a_window_under_every_axis_equals_one_device(jobs: list[Job]) -> None:
    assert_all_right([(job, synthetic(job)) for job in jobs])


@pytest.mark.parametrize(
    ("window", "seq_len", "small"),
    [(None, 128, None), (1, 128, 1), (10, 128, 10), (11, 128, 5), (64, 128, 5), (3, 5, 3)],
)
def test_a_shrunk_window_is_shorter_than_its_sequences(window: int | None, seq_len: int, small: int | None) -> None:
    sets = [f"data.seq_len={seq_len}", *([] if window is None else [f"model.window={window}"])]
    shrunk = shrink(ready("debug", sets), steps=2)
    assert shrunk.job.model.window == small
    check_job(shrunk.job)
    assert (window != small) == (f"window {window} -> {small}" in "\n".join(shrunk.notes))


@pytest.mark.parametrize("axis", ["tp", "pp"])
def test_verify_passes_for_a_job_with_a_window(axis: str, capsys: pytest.CaptureFixture[str]) -> None:
    sets = [f"layout.{axis}=2", "layout.zero=0", "model.window=32", "model.layers=2", "train.global_batch=2"]
    assert verify(ready("debug", sets), steps=2) == 0
    captured = capsys.readouterr()
    assert "ok: 2 steps compute what one device computes" in captured.out and "window 32 -> 5" in captured.err
