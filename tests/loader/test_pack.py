"""What a sample is: windows, shifted labels, documents, positions, padding."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heptad.loader.pack import IGNORED, Samples, restarted
from heptad.loader.store import Tokens
from heptad.models import batch as batch_module


def store(*documents: list[int], prompts: list[int] | None = None) -> Tokens:
    tokens = np.asarray([i for document in documents for i in document], dtype=np.int64)
    ends = np.cumsum([len(document) for document in documents])
    lengths = prompts or [0] * len(documents)
    targets = [i >= p for document, p in zip(documents, lengths, strict=True) for i in range(len(document))]
    return Tokens.from_arrays(tokens, ends, np.asarray(targets, dtype=np.bool_))


def test_the_label_of_no_target_is_the_models() -> None:
    assert IGNORED == batch_module.IGNORED


def test_c_129_samples_read_one_token_more_with_stride_t() -> None:
    samples = Samples(store(list(range(25))), seq_len=6, pack=True)
    rows = samples.rows(np.arange(4))
    assert samples.num_samples == 4
    assert rows.ids[:, 0].tolist() == [0, 6, 12, 18]
    assert rows.labels.ravel().tolist() == list(range(1, 25))


def test_c_129_the_tail_is_padded_so_no_token_is_lost() -> None:
    samples = Samples(store(list(range(28))), seq_len=6, pack=True)
    rows = samples.rows(np.arange(samples.num_samples))
    assert samples.num_samples == 5
    assert rows.labels[rows.labels != IGNORED].tolist() == list(range(1, 28))
    assert rows.labels[4].tolist() == [25, 26, 27, IGNORED, IGNORED, IGNORED]
    assert rows.documents[4].tolist() == [0, 0, 0, 0, 1, 1] and rows.positions[4].tolist() == [0, 1, 2, 3, 0, 1]


@pytest.mark.parametrize("pack", [True, False])
def test_c_130_the_end_token_is_supervised_and_padding_is_masked_by_place(pack: bool) -> None:
    """pad = eos = 2 in the case; here padding has id 0, so the document's own 0 must survive as well."""
    rows = Samples(store([5, 0, 2]), seq_len=5, pack=pack).rows(np.arange(1))
    assert rows.labels.tolist() == [[0, 2, IGNORED, IGNORED, IGNORED]]
    assert rows.ids.tolist() == [[5, 0, 2, 0, 0]]


def test_c_026_labels_are_shifted_on_the_full_sequence() -> None:
    rows = Samples(store(list(range(1, 9))), seq_len=8, pack=True).rows(np.arange(1))
    halves = rows.labels.reshape(2, 4).tolist()
    assert halves == [[2, 3, 4, 5], [6, 7, 8, IGNORED]]
    packed = Samples(store([1, 2, 3], [4, 5, 6, 7, 8]), seq_len=8, pack=True).rows(np.arange(1))
    assert packed.labels.tolist() == [[2, 3, IGNORED, 5, 6, 7, 8, IGNORED]]


def test_documents_restart_positions_and_keep_apart() -> None:
    rows = Samples(store([1, 2, 9], [3, 9], [4, 5, 6, 7, 9]), seq_len=4, pack=True).rows(np.arange(3))
    assert rows.ids.tolist() == [[1, 2, 9, 3], [9, 4, 5, 6], [7, 9, 0, 0]]
    assert rows.documents.tolist() == [[0, 0, 0, 1], [0, 1, 1, 1], [0, 0, 1, 1]]
    assert rows.positions.tolist() == [[0, 1, 2, 0], [0, 0, 1, 2], [0, 1, 0, 1]]
    assert rows.labels.tolist() == [[2, 9, IGNORED, 9], [IGNORED, 5, 6, 7], [9, IGNORED, IGNORED, IGNORED]]


def test_unpacked_documents_are_padded_and_long_ones_cut() -> None:
    samples = Samples(store([1, 9], [2, 3, 4, 5, 6, 7, 9], [9]), seq_len=3, pack=False)
    rows = samples.rows(np.arange(samples.num_samples))
    assert rows.ids.tolist() == [[1, 9, 0], [2, 3, 4], [5, 6, 7], [9, 0, 0]]
    assert rows.labels.tolist() == [[9, IGNORED, IGNORED], [3, 4, 5], [6, 7, 9], [IGNORED] * 3]


def test_prompt_tokens_are_context_and_no_targets() -> None:
    rows = Samples(store([1, 2, 3, 9], [4, 5, 9], prompts=[2, 0]), seq_len=6, pack=True).rows(np.arange(1))
    assert rows.ids.tolist() == [[1, 2, 3, 9, 4, 5]]
    assert rows.labels.tolist() == [[IGNORED, 3, 9, IGNORED, 5, 9]]


def test_a_missing_row_is_all_padding() -> None:
    rows = Samples(store([1, 2, 9]), seq_len=4, pack=True).rows(np.asarray([-1, 0]))
    assert (rows.labels[0] == IGNORED).all() and rows.positions[0].tolist() == [0, 1, 2, 3]
    assert rows.labels[1].tolist() == [2, 9, IGNORED, IGNORED]


@pytest.mark.parametrize(("length", "samples"), [(0, 0), (1, 0), (2, 1), (4, 1), (5, 2)])
def test_tiny_streams(length: int, samples: int) -> None:
    tokens = store([7] * length) if length else Tokens.from_arrays(np.zeros(0, np.int64), np.zeros(0, np.int64))
    assert Samples(tokens, seq_len=3, pack=True).num_samples == samples


@settings(max_examples=80)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=12),
    seq_len=st.integers(1, 9),
    pack=st.booleans(),
    data=st.data(),
)
def test_every_token_that_may_be_a_target_is_one_exactly_once(
    lengths: list[int], seq_len: int, pack: bool, data: st.DataObject
) -> None:
    prompts = [data.draw(st.integers(0, length)) for length in lengths]
    numbers = iter(range(1, 1000))  # every token has an id of its own
    documents = [[next(numbers) for _ in range(length)] for length in lengths]
    samples = Samples(store(*documents, prompts=prompts), seq_len, pack)
    rows = samples.rows(np.arange(samples.num_samples)) if samples.num_samples else None
    found = [] if rows is None else rows.labels[rows.labels != IGNORED].tolist()
    wanted = [i for d, p in zip(documents, prompts, strict=True) for n, i in enumerate(d) if n > 0 and n >= p]
    assert found == wanted
    if rows is not None:
        assert rows.positions.max() < seq_len
        real = rows.labels != IGNORED
        assert (rows.labels[real] == rows.ids[real] + 1).all()  # the target is the next token of the same document
        for row in range(len(rows.ids)):
            assert restarted(rows.documents[row]).tolist() == rows.positions[row].tolist()
            assert (np.diff(rows.documents[row], prepend=0) >= 0).all() and rows.documents[row][0] == 0
