"""The loader: batches per rank, validation, state, resume, and the cases of other projects that went wrong."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from heptad.config.schema import DataSection, Job, ModelSection, TrainSection
from heptad.errors import ConfigError
from heptad.loader.loader import Loader
from heptad.loader.prepare import PreparedData, Source
from heptad.loader.store import Tokens
from heptad.loader.synthetic import synthetic
from heptad.models.batch import IGNORED, Batch

LENGTH = 3


def job(global_batch: int = 8, micro_batch: int = 1, steps: int = 10, **data: Any) -> Job:
    return Job(
        model=ModelSection(vocab=2000),
        data=DataSection(seq_len=LENGTH, **data),
        train=TrainSection(global_batch=global_batch, micro_batch=micro_batch, steps=steps, val_batches=2),
    )


def tokens(num_samples: int, first: int = 0) -> Tokens:
    """A store of `num_samples` samples: sample i begins with id first + i · LENGTH."""
    total = num_samples * LENGTH + 1
    return Tokens.from_arrays(np.arange(first, first + total), np.asarray([total]))


def data(num_samples: int, num_validation: int = 7, **more: int) -> PreparedData:
    sources = [Source("a", 1.0, tokens(num_samples), tokens(num_validation, 1000))]
    sources += [Source(name, 1.0, tokens(size), tokens(1, 1000)) for name, size in more.items()]
    return PreparedData(tuple(sources), LENGTH, True)


def ids(batches: list[Batch]) -> list[int]:
    """Sample numbers of micro-batches, in order."""
    return [int(first) // LENGTH for batch in batches for first in batch.ids[:, 0]]


def step_ids(job: Job, store: PreparedData, ranks: int, step: int, state: Any = None) -> list[int]:
    return [i for rank in range(ranks) for i in ids(Loader(job, rank, ranks, store, state).step(step))]


def equal(a: list[Batch], b: list[Batch]) -> bool:
    names = ("ids", "labels", "positions", "documents", "index")
    return len(a) == len(b) and all(
        x.step == y.step and all(torch.equal(getattr(x, name), getattr(y, name)) for name in names)
        for x, y in zip(a, b, strict=True)
    )


def test_batches_have_the_shape_of_the_job() -> None:
    batches = Loader(job(12, 2), 1, 3, data(40)).step(5)
    assert len(batches) == 2 and all(batch.step == 5 for batch in batches)
    for batch in batches:
        for name in ("ids", "labels", "positions", "documents", "index"):
            assert getattr(batch, name).shape == (2, LENGTH) and getattr(batch, name).dtype == torch.int64
    assert batches[0].index[0].tolist() == [(5 * 12 + 4) * LENGTH + i for i in range(LENGTH)]


@settings(max_examples=40)
@given(
    num_samples=st.integers(1, 50),
    per_rank=st.integers(1, 3),
    micro_batch=st.integers(1, 2),
    data_ranks=st.integers(1, 4),
    steps=st.integers(1, 8),
    cut=st.integers(0, 7),
    pack=st.booleans(),
)
def test_any_layout_and_any_resume_reads_the_same_stream(
    num_samples: int, per_rank: int, micro_batch: int, data_ranks: int, steps: int, cut: int, pack: bool
) -> None:
    batch = per_rank * micro_batch * data_ranks
    settings_, store = job(batch, micro_batch, pack=pack), data(num_samples)
    store = PreparedData(store.sources, LENGTH, pack)
    alone = Loader(job(batch, 1, pack=pack), 0, 1, store)
    ranks = [Loader(settings_, rank, data_ranks, store) for rank in range(data_ranks)]
    stream = []
    for step in range(steps):
        if step == cut:
            state = json.loads(json.dumps(ranks[0].state(step), sort_keys=True))
            assert all(json.dumps(rank.state(step)) == json.dumps(ranks[0].state(step)) for rank in ranks)
            ranks = [Loader(settings_, rank, data_ranks, store, state) for rank in range(data_ranks)]
        read = [micro for rank in ranks for micro in rank.step(step)]
        assert torch.equal(torch.cat([b.ids for b in read]), torch.cat([b.ids for b in alone.step(step)]))
        assert torch.equal(torch.cat([b.index for b in read]), torch.cat([b.index for b in alone.step(step)]))
        stream += ids(read)
    for start in range(0, len(stream), num_samples):
        epoch = stream[start : start + num_samples]
        assert len(set(epoch)) == len(epoch)
        assert len(epoch) < num_samples or sorted(epoch) == list(range(num_samples))


@settings(max_examples=40)
@given(
    num_validation=st.integers(0, 30),
    micro_batch=st.integers(1, 3),
    data_ranks=st.integers(1, 4),
    step=st.integers(0, 3),
)
def test_validation_is_one_set_for_every_layout(
    num_validation: int, micro_batch: int, data_ranks: int, step: int
) -> None:
    store = data(9, num_validation) if num_validation else PreparedData(
        (Source("a", 1.0, tokens(9), Tokens.from_arrays(np.zeros(0, np.int64), np.zeros(0, np.int64))),), LENGTH, True
    )  # fmt: skip
    batch = 12
    if batch % (data_ranks * micro_batch):
        return
    settings_ = job(batch, micro_batch)
    ranks = [Loader(settings_, rank, data_ranks, store).validation() for rank in range(data_ranks)]
    assert len({len(batches) for batches in ranks}) == 1
    labels = sorted(i for batches in ranks for b in batches for i in b.labels[b.labels != IGNORED].tolist())
    alone = Loader(job(batch, 1), 0, 1, store).validation()
    assert labels == sorted(i for b in alone for i in b.labels[b.labels != IGNORED].tolist())
    assert len(labels) == min(num_validation, 2 * batch) * LENGTH and len(set(labels)) == len(labels)


def test_c_084_ranks_end_validation_together_with_padded_rows() -> None:
    """9 samples on 2 ranks: 5 batches on both, the last of rank 1 without a target."""
    ranks = [Loader(job(6, 1), rank, 2, data(9, 9)).validation() for rank in range(2)]
    assert [len(batches) for batches in ranks] == [5, 5]
    assert [batch.num_targets() for batch in ranks[1]] == [3, 3, 3, 3, 0]


def test_c_085_every_rank_reads_equally_many_micro_batches_at_the_tail() -> None:
    """10 samples, micro-batch 2, 3 ranks: one micro-batch each, 6 consumed on all; the next step runs into epoch 2."""
    loaders = [Loader(job(6, 2), rank, 3, data(10)) for rank in range(3)]
    assert [len(loader.step(0)) for loader in loaders] == [1, 1, 1]
    assert [loader.state(1)["samples"] for loader in loaders] == [6, 6, 6]
    assert [len(loader.step(1)) for loader in loaders] == [1, 1, 1]
    both = [i for step in range(2) for loader in loaders for i in ids(loader.step(step))]
    assert sorted(both[:10]) == list(range(10))


def test_c_085_a_rest_that_fills_no_step_is_left_out_on_all_ranks() -> None:
    state = Loader(job(4, 2, steps=5), 0, 1, data(10)).state(1)
    resumed = [Loader(job(6, 2, steps=5), rank, 3, data(10), state) for rank in range(3)]
    assert {loader.progress.total_steps for loader in resumed} == {3}
    assert "the last 4 do not fill a step" in resumed[0].progress.notes[0]


def test_c_116_progress_is_kept_in_samples() -> None:
    store = data(200)
    state = Loader(job(8), 0, 1, store).state(4)
    kept = Loader(job(8), 1, 2, store, state)
    assert (kept.progress.global_batch, kept.progress.total_steps, kept.progress.notes) == (8, 10, ())
    changed = Loader(job(16), 0, 2, store, state)
    assert changed.progress.samples == 32 and changed.progress.total_steps == 4 + (80 - 32) // 16
    assert changed.progress.notes == (
        "global batch 8 -> 16 after 32 samples: 48 samples remain in 3 steps, up to step 7",
    )
    stream = step_ids(job(8), store, 1, 0) + step_ids(job(8), store, 1, 1) + step_ids(job(8), store, 1, 2)
    stream += step_ids(job(8), store, 1, 3) + step_ids(job(16), store, 2, 4, state)
    plain = [i for step in range(6) for i in step_ids(job(8), store, 1, step)]
    assert stream == plain


def test_a_second_resume_keeps_the_rebased_end_and_more_steps_can_be_asked_for() -> None:
    store = data(200)
    first = Loader(job(16), 0, 2, store, Loader(job(8), 0, 1, store).state(4))
    again = Loader(job(16), 0, 2, store, first.state(6))
    assert (again.progress.samples, again.progress.total_steps, again.progress.notes) == (64, 7, ())
    assert Loader(job(16, steps=12), 0, 2, store, first.state(6)).progress.total_steps == 12


def test_c_135_a_resume_with_packing_is_token_identical() -> None:
    made = synthetic(job(4), num_samples=30)
    whole = Loader(job(4), 0, 1, made)
    state = json.loads(json.dumps(whole.state(5)))
    resumed = Loader(job(4), 0, 1, synthetic(job(4), num_samples=30), state)
    assert all(equal(whole.step(step), resumed.step(step)) for step in range(5, 10))


def test_c_136_each_rank_goes_on_where_it_was_and_a_wrong_state_is_refused() -> None:
    store = data(16)
    state = Loader(job(4), 0, 2, store).state(2)
    before = [i for step in range(2) for i in step_ids(job(4), store, 2, step)]
    after = [i for step in range(2, 4) for i in step_ids(job(4), store, 2, step, state)]
    assert sorted(before + after) == list(range(16))
    with pytest.raises(ConfigError, match=r"16 samples.*now 17 samples"):
        Loader(job(4), 0, 2, data(17), state)
    with pytest.raises(ConfigError, match="keeps the order it began with"):
        Loader(job(4, seed=1), 0, 2, store, state)
    with pytest.raises(ConfigError, match="version"):
        Loader(job(4), 0, 2, store, {**state, "version": 0})


def test_c_139_a_batch_that_other_ranks_cannot_share_is_refused_not_restarted() -> None:
    store = data(24)
    state = Loader(job(8), 0, 2, store).state(1)
    with pytest.raises(ConfigError, match=r"train.global_batch = 8\n.*divisible by data ranks 3"):
        Loader(job(8), 0, 3, store, state)
    before = step_ids(job(8), store, 2, 0)
    after = [i for step in range(1, 4) for i in step_ids(job(6), store, 3, step, state)]
    assert sorted(before + after[:16]) == list(range(24))


def test_c_140_consumed_counts_unique_samples() -> None:
    """Two tensor peers are one data rank: both build Loader(job, 0, 1)."""
    peers = [Loader(job(4), 0, 1, data(50)) for _ in range(2)]
    assert all(equal(peers[0].step(step), peers[1].step(step)) for step in range(10))
    assert [peer.state(10)["samples"] for peer in peers] == [40, 40]
    assert peers[0].state(10)["consumed"] == {"a": 40}


def test_c_142_validation_has_no_state() -> None:
    store = data(24)
    state = Loader(job(12), 0, 3, store).state(2)
    assert not any("val" in key for key in state)
    resumed = [Loader(job(12), rank, 4, store, state) for rank in range(4)]
    assert all(loader.validation() for loader in resumed)
    assert sorted(i for loader in resumed for i in ids(loader.step(2))) == sorted(step_ids(job(12), store, 3, 2))


def test_c_143_weights_and_sources_change_at_resume() -> None:
    def mixture(first: float, second: float) -> PreparedData:
        a, b = data(30, b=30).sources
        return PreparedData(
            (Source("a", first, a.train, a.validation), Source("b", second, b.train, b.validation)), LENGTH, True
        )

    begun = Loader(job(8), 0, 1, mixture(1, 1))
    state = begun.state(3)
    assert state["consumed"] == {"a": 12, "b": 12}
    same = Loader(job(8), 0, 1, mixture(1, 1), state)
    assert same.progress.notes == () and equal(same.step(4), begun.step(4))
    changed = Loader(job(8), 0, 1, mixture(3, 1), state)
    assert "mixture" in changed.progress.notes[0]
    after = changed.state(5)["consumed"]
    assert after == {"a": 24, "b": 16}
    alone = Loader(job(8), 0, 1, data(30), changed.state(5))
    assert alone.state(6)["consumed"] == {"a": 32, "b": 16}
    back = Loader(job(8), 0, 1, mixture(1, 1), alone.state(6))
    assert back.state(7)["consumed"] == {"a": 36, "b": 20}


def test_ids_outside_the_vocabulary_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"model.vocab = 2000[\s\S]*the data holds 2100"):
        Loader(job(), 0, 1, PreparedData((Source("a", 1.0, tokens(700), tokens(1)),), LENGTH, True))


def test_a_source_without_a_sample_is_refused() -> None:
    empty = Tokens.from_arrays(np.asarray([1]), np.asarray([1]))
    with pytest.raises(ConfigError, match="needs two tokens"):
        Loader(job(), 0, 1, PreparedData((Source("a", 1.0, empty, empty),), LENGTH, True))


@pytest.mark.parametrize("pack", [True, False])
def test_synthetic_tokens_are_ragged_and_keyed(pack: bool) -> None:
    settings_ = Job(
        model=ModelSection(vocab=31), data=DataSection(seq_len=17, pack=pack), train=TrainSection(global_batch=8)
    )
    made = synthetic(settings_)
    loader = Loader(settings_, 0, 1, made)
    assert made.digest == synthetic(settings_).digest and loader.tokenizer is None and loader.vocab == 31
    counts = {batch.num_targets() for step in range(8) for batch in loader.step(step)}
    assert 0 in counts and 1 in counts and len(counts) > 5
    assert all(sum(batch.num_targets() for batch in loader.step(step)) > 0 for step in range(8))
    assert max(int(batch.documents.max()) for batch in loader.step(0)) > 0
    assert len(loader.validation()) == (8 if pack else loader.num_validation_samples)
