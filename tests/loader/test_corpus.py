"""Reading a corpus: order, kinds of file, stated handling of bad text, errors that name the place."""

from __future__ import annotations

import builtins
import json
import os
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from heptad.config.schema import DataSection, SourceSection
from heptad.errors import ConfigError
from heptad.loader.corpus import STDLIB_MAX_BYTES, Corpus, corpora
from heptad.loader.documents import Counts, Document, documents


def only(path: Path, **more: Any) -> Corpus:
    (corpus,) = corpora(DataSection(path=str(path), **more))
    return corpus


def texts(corpus: Corpus) -> tuple[list[str], Counts]:
    counts = Counts()
    return [document.text for document in documents(corpus, counts)], counts


def jsonl(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_the_default_corpus_is_the_standard_library_in_a_fixed_order() -> None:
    (corpus,) = corpora(DataSection())
    assert corpus == corpora(DataSection())[0]
    names = [file.name for file in corpus.files]
    assert "json/decoder.py" in names and corpus.max_bytes == STDLIB_MAX_BYTES
    assert not any({"test", "tests", "site-packages"} & set(Path(name).parts) for name in names)
    (small,) = corpora(DataSection(max_bytes=10_000))
    found, counts = texts(small)
    assert found and counts.num_bytes == 10_000


def test_a_folder_is_read_by_name_and_other_files_are_left_out(tmp_path: Path) -> None:
    for name in ("b.txt", "a.md", "sub/c.py", ".hidden.txt", ".git/d.txt", "e.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert texts(only(tmp_path))[0] == ["a.md", "b.txt", "sub/c.py"]
    assert texts(only(tmp_path / "e.png"))[0] == ["e.png"]  # named by itself, so meant


def test_empty_documents_are_skipped_and_counted(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("")
    (tmp_path / "b.txt").write_text(" \n\n")
    (tmp_path / "c.txt").write_text("text")
    jsonl(tmp_path / "d.jsonl", {"text": ""}, {"text": None}, {"text": "x"})
    found, counts = texts(only(tmp_path))
    assert found == ["text", "x"] and (counts.empty, counts.documents) == (4, 2)


def test_invalid_utf8_is_replaced_and_counted(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"ok \xff\xfe " + "\ufffd é".encode())
    (tmp_path / "b.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "l\xe9 \\ud800"}\n')
    found, counts = texts(only(tmp_path))
    assert found[0] == "ok \ufffd\ufffd \ufffd é" and counts.replaced == 2 + 1 + 3  # a lone surrogate is 3 bytes
    found[1].encode()


def test_max_bytes_cuts_between_characters(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("é" * 10)
    (tmp_path / "b.txt").write_text("never read")
    assert texts(only(tmp_path, max_bytes=7))[0] == ["ééé"]
    assert texts(only(jsonl(tmp_path / "c.jsonl", {"text": "é" * 10}), max_bytes=7))[0] == ["ééé"]
    assert texts(only(tmp_path, max_bytes=26))[0] == ["é" * 10, "never "]


def test_prompts_are_kept_apart(tmp_path: Path) -> None:
    path = jsonl(
        tmp_path / "a.jsonl", {"q": "ask", "a": "answer"}, {"q": None, "a": "alone"}, {"q": "no answer", "a": ""}
    )
    counts = Counts()
    found = list(documents(only(path, text_field="a", prompt_field="q"), counts))
    assert found == [Document("answer", "ask"), Document("alone")] and counts.empty == 1


def test_parquet_rows_are_documents(tmp_path: Path) -> None:
    parquet.write_table(pyarrow.table({"text": ["one", None, "two"], "other": [1, 2, 3]}), tmp_path / "a.parquet")
    found, counts = texts(only(tmp_path))
    assert found == ["one", "two"] and counts.empty == 1
    with pytest.raises(ConfigError, match=r"data.text_field = 'body'[\s\S]*row 0"):
        texts(only(tmp_path, text_field="body"))
    (tmp_path / "b.parquet").write_text("no parquet")
    with pytest.raises(ConfigError, match="readable parquet"):
        texts(only(tmp_path / "b.parquet"))


def test_parquet_without_pyarrow_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.parquet").write_bytes(b"")
    corpus, real = only(tmp_path), builtins.__import__

    def missing(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("pyarrow"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ConfigError, match=r'pip install "heptad\[parquet\]"'):
        texts(corpus)


def test_paths_that_hold_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data.path = .*absent[\s\S]*existing file or folder"):
        only(tmp_path / "absent")
    (tmp_path / "picture.png").write_bytes(b"x")
    with pytest.raises(ConfigError, match="it holds none"):
        only(tmp_path)
    with pytest.raises(ConfigError, match="not both"):
        corpora(DataSection(path="x", sources=(SourceSection(name="a", path="x"),)))
    with pytest.raises(ConfigError, match="name of its own"):
        corpora(DataSection(sources=(SourceSection(name="a", path="x"), SourceSection(name="a", path="y"))))
    with pytest.raises(ConfigError, match=r"data\.sources = .*absent"):
        corpora(DataSection(sources=(SourceSection(name="a", path=str(tmp_path / "absent")),)))


def test_c_120_a_field_is_refused_where_no_file_has_records(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    for field in ("text_field", "prompt_field"):
        with pytest.raises(ConfigError, match=rf"data\.{field}[\s\S]*no effect"):
            corpora(DataSection(path=str(tmp_path), **{field: "question"}))
    (tmp_path / "b.jsonl").write_text('{"question": "q", "text": "a"}')
    assert corpora(DataSection(path=str(tmp_path), prompt_field="question"))


def test_bad_records_name_file_and_line(tmp_path: Path) -> None:
    cases: list[tuple[bytes, str]] = [
        (b'{"text": "a"}\n\n{"text": \n', r"a\.jsonl:3'[\s\S]*JSON object \("),
        (b"[1]\n", r"a\.jsonl:1'[\s\S]*JSON object"),
        (b'{"body": "x", "n": 1}\n', r"data.text_field = 'text'[\s\S]*a\.jsonl:1 has: 'body', 'n'"),
        (b'{"text": 5}\n', "holds int"),
    ]
    for content, message in cases:
        (tmp_path / "a.jsonl").write_bytes(content)
        with pytest.raises(ConfigError, match=message):
            texts(only(tmp_path))


def test_a_file_that_vanishes_or_changes_after_listing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("text")
    corpus = only(tmp_path)
    (tmp_path / "b.txt").unlink()
    with pytest.raises(ConfigError, match=r"data.path = '.*b\.txt'[\s\S]*could not be read as it was listed"):
        texts(corpus)
    (tmp_path / "b.txt").write_text("longer text")
    with pytest.raises(ConfigError, match=r"4 bytes when listed, 11 now"):
        texts(corpus)
    (tmp_path / "b.txt").write_text("TEXT")
    os.utime(tmp_path / "b.txt", ns=(1, 1))
    with pytest.raises(ConfigError, match=r"b\.txt'[\s\S]*it changed"):
        texts(corpus)

    def closed(root: Path, onerror: Any) -> Any:
        onerror(PermissionError(13, "Permission denied", str(root)))

    with monkeypatch.context() as patch, pytest.raises(ConfigError, match="Permission denied"):
        patch.setattr("heptad.loader.corpus.os.walk", closed)
        only(tmp_path)
    os.symlink(tmp_path / "nowhere", tmp_path / "c.txt")
    with pytest.raises(ConfigError, match=r"c\.txt"):
        only(tmp_path)


def test_sources_stand_in_the_order_of_their_names(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("text")
    sources = tuple(SourceSection(name=name, path=str(tmp_path), weight=2.0) for name in ("z", "a"))
    assert [corpus.name for corpus in corpora(DataSection(sources=sources))] == ["a", "z"]
