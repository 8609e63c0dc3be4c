"""The documents of a corpus: which files, in which order, and what is done with text that is not as it should be.

Without `data.path` the corpus is the Python standard library's own source files, found in the interpreter: real text
without a download. Otherwise a file or folder: text files are one document each, .jsonl files one a line, .parquet
files one a row; hidden files and folders and linked folders are left out. `data.max_bytes` caps the text of each
source, the document that crosses the cap being cut there.

Stated handling: an empty document is skipped and counted; an invalid UTF-8 sequence becomes U+FFFD and is counted; a
file that vanished or changed since it was listed, a line that is no JSON and a missing field are errors that name the
place.
Costs: one text file, line or record batch is in memory at a time. Read next: `tokenise.py`.
"""

from __future__ import annotations

import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heptad.config.schema import DataSection
from heptad.errors import ConfigError

TEXT_SUFFIXES = frozenset(
    {".txt", ".md", ".rst", ".tex", ".html", ".xml", ".json", ".csv", ".tsv", ".toml", ".yaml", ".yml", ".ini", ".cfg"}
    | {".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".rs", ".go", ".java", ".js", ".ts", ".sh", ".sql"}
)
RECORD_SUFFIXES = frozenset({".jsonl", ".parquet"})
STDLIB_SKIPPED = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})
STDLIB_MAX_BYTES = 8_000_000
DEFAULT_SOURCE = "data"
"""Name of the only source when `data.sources` is empty."""


@dataclass(frozen=True, slots=True)
class CorpusFile:
    """A file as it was when the corpus was listed; `name` is its path below the corpus."""

    path: Path
    name: str
    num_bytes: int
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class Corpus:
    """One source: its files in reading order. `field` is where the job names it ("data.path", "data.sources", …)."""

    name: str
    weight: float
    field: str
    files: tuple[CorpusFile, ...]
    max_bytes: int | None
    text_field: str
    prompt_field: str | None


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


def corpora(data: DataSection) -> tuple[Corpus, ...]:
    """The job's sources in the order of their names. Raises ConfigError for a path without usable text."""
    if data.path is not None and data.sources:
        rule = "a corpus is one path or several sources, not both"
        raise ConfigError.of("data.path", data.path, rule, "remove data.path, or make it one of data.sources")
    if data.sources:
        names = [source.name for source in data.sources]
        if len(set(names)) < len(names):
            raise ConfigError.of("data.sources", names, "every source has a name of its own", "rename one of them")
        found = [_corpus(s.name, s.weight, "data.sources", _listed("data.sources", s.path), data) for s in data.sources]
        found.sort(key=lambda corpus: corpus.name)
    else:
        files = _standard_library() if data.path is None else _listed("data.path", data.path)
        found = [_corpus(DEFAULT_SOURCE, 1.0, "data.path", files, data)]
    _check_fields(data, found)
    return tuple(found)


def _check_fields(data: DataSection, found: list[Corpus]) -> None:
    """A field that is named exists in some record: text files have none."""
    if any(file.path.suffix.lower() in RECORD_SUFFIXES for corpus in found for file in corpus.files):
        return
    rule = "it would have no effect: the corpus holds no .jsonl and no .parquet, and text files have no fields"
    for name, value in (("text_field", data.text_field), ("prompt_field", data.prompt_field)):
        if value != DataSection.model_fields[name].default:
            raise ConfigError.of(f"data.{name}", value, rule, f"remove {name}, or give records")


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


def _corpus(name: str, weight: float, field: str, files: list[CorpusFile], data: DataSection) -> Corpus:
    default = data.path is None and not data.sources
    max_bytes = STDLIB_MAX_BYTES if default and data.max_bytes is None else data.max_bytes
    return Corpus(name, weight, field, tuple(files), max_bytes, data.text_field, data.prompt_field)


def _standard_library() -> list[CorpusFile]:
    """Source files of the interpreter's library, tests left out, by hash of their names: a cap takes a fair sample."""
    root = Path(sysconfig.get_path("stdlib"))
    found = []
    for folder, below, names in _walk("data.path", root):
        below[:] = [name for name in below if name not in STDLIB_SKIPPED]
        found += [Path(folder) / name for name in names if name.endswith(".py")]
    if not found:
        rule = "without data.path the corpus is the Python standard library's source files; this interpreter has none"
        raise ConfigError.of("data.path", None, rule, f"set data.path (looked in {root})")
    named = [(path.relative_to(root).as_posix(), path) for path in found]
    named.sort(key=lambda pair: hashlib.sha256(pair[0].encode()).digest())
    return [_file("data.path", path, name) for name, path in named]


def _listed(field: str, given: str) -> list[CorpusFile]:
    """The usable files at a path of the job, by name; a file given by itself is text unless its suffix says else."""
    root = Path(given).expanduser()
    if os.path.isfile(root):  # unlike Path's, these say no where a folder above may not be entered
        return [_file(field, root, root.name)]
    if not os.path.isdir(root):
        raise ConfigError.of(field, given, "the corpus is an existing file or folder", "correct the path")
    usable = TEXT_SUFFIXES | RECORD_SUFFIXES
    found = []
    for folder, below, names in _walk(field, root):
        below[:] = [name for name in below if not name.startswith(".")]
        found += [Path(folder) / n for n in names if Path(n).suffix.lower() in usable and not n.startswith(".")]
    if not found:
        fix = (
            "point to a folder with files of one of "
            + " ".join(sorted(RECORD_SUFFIXES | {".txt", ".md", ".py"}))
            + " …"
        )
        raise ConfigError.of(field, given, "the folder holds text files, .jsonl or .parquet; it holds none", fix)
    return [_file(field, path, path.relative_to(root).as_posix()) for path in sorted(found)]


def _walk(field: str, root: Path) -> Iterator[tuple[str, list[str], list[str]]]:
    """os.walk that does not pass over a folder it may not read."""

    def refuse(error: OSError) -> None:
        raise _gone(field, Path(error.filename), error) from error

    return os.walk(root, onerror=refuse)


def _file(field: str, path: Path, name: str) -> CorpusFile:
    try:
        status = path.stat()
    except OSError as error:
        raise _gone(field, path, error) from error
    return CorpusFile(path, name, status.st_size, status.st_mtime_ns)


def _of_file(corpus: Corpus, file: CorpusFile, left: int | None, counts: Counts) -> Iterator[Document]:
    """All documents of one file, empty ones too; of a text file at most `left` + 4 bytes are read."""
    try:
        found = file.path.stat()
        if (found.st_size, found.st_mtime_ns) != (file.num_bytes, file.mtime_ns):
            raise _gone(corpus.field, file.path, f"it changed: {file.num_bytes} bytes when listed, {found.st_size} now")
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
        raise _gone(corpus.field, file.path, error) from error


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


def _gone(field: str, path: Path, why: object) -> ConfigError:
    rule = f"a file of the corpus could not be read as it was listed ({why})"
    return ConfigError.of(field, str(path), rule, "leave the corpus alone while it is read, and start again")
