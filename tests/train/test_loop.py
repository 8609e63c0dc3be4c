"""The loop on gloo ranks with made-up tokens: a whole run, what it leaves behind, resuming, stopping."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.tiny import tiny_job

from heptad.config.load import load
from heptad.config.schema import Job
from heptad.errors import ConfigError
from heptad.launch.failure import Diary
from heptad.launch.forked import forked
from heptad.loader.loader import Loader
from heptad.loader.synthetic import synthetic
from heptad.mesh.layout import Layout
from heptad.optim.schedule import lr_at
from heptad.trace import total
from heptad.train import loop
from heptad.train.loop import run
from heptad.train.metrics import read_metrics
from heptad.train.outcome import Outcome
from heptad.train.stop import StopRequest


def job(folder: Path, steps: int = 6, **sections: dict[str, Any]) -> Job:
    plain = tiny_job(global_batch=6, **sections.pop("layout", {})).model_dump(by_alias=True)
    plain["train"] |= {"steps": steps, "val_every": 2, "val_batches": 1, "sample_tokens": 5} | sections.pop("train", {})
    plain["checkpoint"] |= sections.pop("checkpoint", {})
    plain["log"] |= {"dir": str(folder), "name": "run"} | sections.pop("log", {})
    plain["optimizer"] |= sections.pop("optimizer", {"name": "adamw", "schedule": "cosine", "warmup_steps": 2})
    return Job.model_validate(plain)


def train(rank: int, job: Job, stop_at: int | None = None, trace: bool = False) -> Outcome:
    """`stop_at`: the last rank asks to stop while it is in this step."""
    diary = Diary()
    if stop_at is not None and rank == Layout.of(job.layout).world - 1:
        asked = property(lambda request: diary.step is not None and diary.step >= stop_at)
        loop.StopRequest = type("Asked", (StopRequest,), {"asked": asked})  # type: ignore[misc]
    return run(job, rank, torch.device("cpu"), data=synthetic(job), diary=diary, trace=trace, ledger=True)


def losses(folder: Path) -> dict[int, float]:
    lines = read_metrics(folder / "run" / "metrics.jsonl")
    return {line["step"]: line["loss"] for line in lines if line["loss"] is not None}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Outcome]]:
    """An uninterrupted run on 2 ranks, stage 3."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, forked(2, train, job(folder, layout={"dp_shard": 2}), None, True)


def test_a_run_and_what_it_leaves(whole: tuple[Path, list[Outcome]]) -> None:
    folder, outcomes = whole
    first, second = outcomes
    assert (first.val_loss, first.first_val_loss, first.steps) == (second.val_loss, second.first_val_loss, 6)
    assert first.val_loss != first.first_val_loss and first.tokens == 6 * 6 * 11 and 0 < first.targets < first.tokens
    said = json.loads(first.json())
    assert list(said) == ["run_dir", "first_val_loss", "val_loss", "steps", "tokens_per_s"]
    left = {str(path.relative_to(folder / "run")) for path in (folder / "run").rglob("*") if path.is_file()}
    assert {"job.toml", "metrics.jsonl", "loss.svg", "trace/timeline.svg", "trace/trace.json"} <= left
    assert any(name.startswith("tb/events") for name in left)
    assert load(str(folder / "run" / "job.toml")).log.name == "run"
    lines = read_metrics(folder / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines if line["val_loss"] is not None] == [0, 2, 4, 6]
    assert len(first.sample.split()) == 11 + 5  # the prompt is shorter than PROMPT_TOKENS here
    assert "validation loss" in first.text() and "run folder" in first.text()


def test_predicted_traffic_is_what_was_counted(whole: tuple[Path, list[Outcome]]) -> None:
    for outcome in whole[1]:
        assert outcome.predicted is not None and total(outcome.predicted) == total(outcome.transfers)


def test_c_123_tokens_in_the_metrics(whole: tuple[Path, list[Outcome]]) -> None:
    lines = [line for line in read_metrics(whole[0] / "run" / "metrics.jsonl") if line["loss"] is not None]
    assert [line["tokens"] for line in lines] == [66 * step for step in range(1, 7)]
    assert all(line["targets"] < line["tokens"] for line in lines)


@pytest.mark.parametrize("ranks", [2, 3])
def test_c_110_stopping_and_resuming_changes_nothing(
    whole: tuple[Path, list[Outcome]], ranks: int, tmp_path: Path
) -> None:
    """Rank 1 asks to stop in step 3; the rest runs on the same layout (bit-equal) or on three ranks."""
    checkpoint = {"every": 100}
    stopped = forked(2, train, job(tmp_path, layout={"dp_shard": 2}, checkpoint=checkpoint), 3)
    assert [(outcome.stopped, outcome.steps) for outcome in stopped] == [(True, 3)] * 2
    assert stopped[0].resume_with is not None and "job.toml" in stopped[0].resume_with
    again = job(tmp_path, layout={"dp_shard": ranks}, checkpoint=checkpoint | {"resume": "must"})
    resumed = forked(ranks, train, again)
    want, found = losses(whole[0]), losses(tmp_path)
    if ranks == 2:
        assert found == want and resumed[0].val_loss == whole[1][0].val_loss
    assert found == pytest.approx(want, rel=1e-10)
    assert resumed[0].first_val_loss == whole[1][0].first_val_loss
    assert (resumed[0].tokens, resumed[0].targets) == (whole[1][0].tokens, whole[1][0].targets)
    rates = {line["step"]: line["lr"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if line["lr"]}
    assert rates == {step: lr_at(again.optimizer, step, 6) for step in range(1, 7)}


def test_muon_under_stages_and_what_it_sends(tmp_path: Path) -> None:
    """Also: [log] and sampling switched off leave nothing behind."""
    options = {"name": "muon", "schedule": "constant", "weight_decay": 0.1}
    quiet = {"tensorboard": False, "every": 2}
    found = []
    for ranks, zero in ((1, 3), (3, 1)):
        folder = tmp_path / f"{ranks}"
        layout = {"dp_shard": ranks, "zero": zero}
        chosen = job(folder, 4, layout=layout, optimizer=options, log=quiet, train={"sample_tokens": 0})
        outcomes = forked(ranks, train, chosen)
        for outcome in outcomes:
            assert outcome.predicted is not None and total(outcome.predicted) == total(outcome.transfers)
        assert any(item.phase == "update" for item in outcomes[0].transfers) == (ranks > 1)
        assert outcomes[0].sample == "" and not (folder / "run" / "tb").exists()
        assert list(losses(folder)) == [2, 4]
        found.append(outcomes[0].val_loss)
    assert found[0] == pytest.approx(found[1], rel=1e-10)


EXPERTS: dict[str, Any] = dict(experts=7, experts_per_token=3, expert_width=5, dense_layers=1, capacity_factor=0.8)


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        pytest.param(2, dict(dp_shard=2, zero=0, ep=2), marks=pytest.mark.slow),
        (4, dict(dp_shard=2, tp=2, ep=2, etp=2, zero=3)),
        pytest.param(4, dict(cp=4, ep=4, ep_inner=2, zero=1, recompute="full"), marks=pytest.mark.slow),
        (4, dict(pp=2, dp_shard=2, ep=2, zero=1, model={**EXPERTS, "mtp_depth": 1, "layers": 2})),
    ],
    ids=["ep", "ep and etp", "two levels, recomputed", "pipeline"],
)
def test_rows_to_experts_are_predicted_from_the_step_that_is_counted(
    ranks: int, layout: dict[str, Any], tmp_path: Path
) -> None:
    """To the byte, on each rank; what ranks tell each other for it is not counted. And what is logged of experts."""
    chosen = job(tmp_path, 3, layout={"model": EXPERTS} | layout, train={"sample_tokens": 0})
    outcomes = forked(ranks, train, chosen)
    for outcome in outcomes:
        assert outcome.predicted is not None and total(outcome.predicted) == total(outcome.transfers)
        phases = {item.phase for item in outcome.transfers}
        assert "router" in phases and "check" not in phases
    assert any(item.axis == "ep" and item.num_bytes for item in outcomes[-1].transfers)
    lines = [line for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if line["loss"] is not None]
    assert len(lines) == 3 and all(1 < line["expert_load_max"] < 7 / 3 for line in lines)
    assert all(0 < line["dropped_share"] < 1 for line in lines)


def test_a_micro_batch_without_a_target_sends_no_update(tmp_path: Path) -> None:
    """PipeDream updates after each micro-batch, and Muon assembles its matrices in each update."""
    layout: dict[str, Any] = dict(pp=2, dp_shard=2, zero=1, schedule="pipedream")
    chosen = job(tmp_path, 2, layout=layout, optimizer={"name": "muon", "clip_norm": None}, train={"val_every": 0})
    for seed in count():
        chosen = chosen.model_copy(update={"data": chosen.data.model_copy(update={"seed": seed, "seq_len": 2})})
        targets = [batch.num_targets() for batch in Loader(chosen, 0, 1, synthetic(chosen)).step(1)]
        pairs = [sum(targets[at::3]) for at in range(3)]
        if 0 < sum(count > 0 for count in pairs) < 3:
            break
    for outcome in forked(4, train, chosen):
        assert outcome.predicted is not None and total(outcome.predicted) == total(outcome.transfers)
        assert any(item.phase == "update" for item in outcome.transfers)


def refused(rank: int, job: Job) -> str:
    with pytest.raises(ConfigError) as error:
        train(rank, job)
    return error.value.problems[0].field


def test_a_refused_resume_leaves_the_run_as_it_was(tmp_path: Path) -> None:
    every = {"every": 2}
    forked(1, train, job(tmp_path, 2, checkpoint=every))
    before = (tmp_path / "run" / "job.toml").read_text()
    other = job(tmp_path, 4, checkpoint=every)
    other = other.model_copy(update={"data": other.data.model_copy(update={"seed": 5})})
    assert forked(1, refused, other) == ["data.seed"]
    assert (tmp_path / "run" / "job.toml").read_text() == before
