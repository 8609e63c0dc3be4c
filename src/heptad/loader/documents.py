"""The documents of a corpus in order: text out of its files, and what is done with text that is not as it should be.

A text file is one document, a .jsonl file one a line, a .parquet file one a row. Stated handling: an empty document is
skipped and counted; an invalid UTF-8 sequence becomes U+FFFD and is counted; a file that vanished or changed since it
was listed, a line that is no JSON and a missing field are errors that name the place. `data.max_bytes` caps the text of
a source, the document that crosses the cap being cut there.
Costs: one text file, line or record batch is in memory at a time. Read next: `tokenise.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heptad.errors import ConfigError
from heptad.loader.corpus import Corpus, CorpusFile, unreadable


@dataclass(frozen=True, slots=True)
class Document:
    """`prompt` is context that is no target; `text` is learned."""

    text: str
    prompt: str = ""


@dataclass(slots=True)
class Counts:
    """What reading found: filled while `documents` runs."""

    documents: int = 0
    empty: int = 0
    replaced: int = 0
    num_bytes: int = 0


def documents(corpus: Corpus, counts: Counts) -> Iterator[Document]:
    """The non-empty documents in order, up to `max_bytes`; fills `counts`. Raises ConfigError naming file and place."""
    limit = corpus.max_bytes
    for file in corpus.files:
        left = None if limit is None else limit - counts.num_bytes
        if left is not None and left < 4:  # a cut before a character may leave up to three bytes
            return
        for document in _of_file(corpus, file, left, counts):
            prompt, text = document.prompt, document.text
            if not text.strip():
                counts.empty += 1
                continue
            size = len(prompt.encode()) + len(text.encode())
            if limit is not None and counts.num_bytes + size > limit:
                prompt = _cut(prompt, limit - counts.num_bytes)
                text = _cut(text, limit - counts.num_bytes - len(prompt.encode()))
                counts.num_bytes = limit
                if text.strip():
                    counts.documents += 1
                    yield Document(text, prompt)
                return
            counts.num_bytes += size
            counts.documents += 1
            yield document


def _of_file(corpus: Corpus, file: CorpusFile, left: int | None, counts: Counts) -> Iterator[Document]:
    """All documents of one file, empty ones too; of a text file at most `left` + 4 bytes are read."""
    try:
        found = file.path.stat()
        if (found.st_size, found.st_mtime_ns) != (file.num_bytes, file.mtime_ns):
            why = f"it changed: {file.num_bytes} bytes when listed, {found.st_size} now"
            raise unreadable(corpus.field, file.path, why)
        match file.path.suffix.lower():
            case ".jsonl":
                yield from _of_jsonl(corpus, file.path, counts)
            case ".parquet":
                yield from _of_parquet(corpus, file.path, counts)
            case _:
                with file.path.open("rb") as binary:
                    raw = binary.read() if left is None else binary.read(left + 4)
                yield Document(_decoded(_cut_bytes(raw, left), counts))
    except OSError as error:
        raise unreadable(corpus.field, file.path, error) from error


def _of_jsonl(corpus: Corpus, path: Path, counts: Counts) -> Iterator[Document]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            place = f"{path}:{number}"
            try:
                record = json.loads(_decoded(line, counts).lstrip("\ufeff"))
            except ValueError as error:
                raise ConfigError.of(
                    corpus.field, place, f"every line is a JSON object ({error})", "repair it"
                ) from error
            if not isinstance(record, dict):
                raise ConfigError.of(corpus.field, place, "every line is a JSON object", "repair the line")
            yield _record(corpus, place, record, counts)


def _of_parquet(corpus: Corpus, path: Path, counts: Counts) -> Iterator[Document]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        rule = ".parquet files are read by pyarrow, which is not installed"
        raise ConfigError.of(corpus.field, str(path), rule, 'pip install "heptad[parquet]"') from error
    wanted = [corpus.text_field] + ([corpus.prompt_field] if corpus.prompt_field else [])
    row = 0
    try:
        with parquet.ParquetFile(path) as table:
            columns = [name for name in wanted if name in table.schema_arrow.names]
            for batch in table.iter_batches(batch_size=1024, columns=columns):
                for record in batch.to_pylist():
                    yield _record(corpus, f"{path}: row {row}", record, counts)
                    row += 1
    except ArrowException as error:
        raise ConfigError.of(
            corpus.field, str(path), f"a readable parquet file ({error})", "repair the file"
        ) from error


def _record(corpus: Corpus, place: str, record: dict[str, Any], counts: Counts) -> Document:
    """A document from named fields; null text counts as empty."""
    texts = []
    for setting, name in (("data.text_field", corpus.text_field), ("data.prompt_field", corpus.prompt_field)):
        if name is None:
            texts.append("")
            continue
        if name not in record:
            has = ", ".join(map(repr, record)) or "none"
            raise ConfigError.of(
                setting, name, f"every record has this field; {place} has: {has}", f"correct {setting}"
            )
        value = record[name]
        if value is not None and not isinstance(value, str):
            rule = f"the field holds a string; {place} holds {type(value).__name__}"
            raise ConfigError.of(setting, name, rule, f"correct {setting} or the data")
        texts.append(_valid(value or "", counts))
    return Document(text=texts[0], prompt=texts[1])


def _decoded(raw: bytes, counts: Counts) -> str:
    text = raw.decode("utf-8", errors="replace")
    if "\ufffd" in text:
        counts.replaced += text.count("\ufffd") - raw.count("\ufffd".encode())
    return text


def _valid(text: str, counts: Counts) -> str:
    """`text` without lone surrogates, which JSON can escape and UTF-8 cannot hold."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return _decoded(text.encode("utf-8", errors="surrogatepass"), counts)
    return text


def _cut(text: str, num_bytes: int) -> str:
    return _cut_bytes(text.encode(), num_bytes).decode()


def _cut_bytes(raw: bytes, num_bytes: int | None) -> bytes:
    """At most `num_bytes` of UTF-8, cut before a character, not inside one."""
    if num_bytes is None or len(raw) <= num_bytes:
        return raw
    end = num_bytes
    while end > max(0, num_bytes - 3) and raw[end] & 0xC0 == 0x80:
        end -= 1
    return raw[:end]
