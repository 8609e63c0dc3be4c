"""The sources of a job's corpus: which files, in which order.

Without `data.path` the corpus is the Python standard library's own source files, found in the interpreter: real text
without a download. Otherwise a file or folder: text files, .jsonl and .parquet; hidden files and folders and linked
folders are left out. What is listed here is what is read later: a file that has changed since is an error.
Read next: `documents.py` (what is in the files).
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

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
        raise unreadable(field, Path(error.filename), error) from error

    return os.walk(root, onerror=refuse)


def _file(field: str, path: Path, name: str) -> CorpusFile:
    try:
        status = path.stat()
    except OSError as error:
        raise unreadable(field, path, error) from error
    return CorpusFile(path, name, status.st_size, status.st_mtime_ns)


def unreadable(field: str, path: Path, why: object) -> ConfigError:
    """The error of a file that is not as it was listed; `field` is where the job names the corpus."""
    rule = f"a file of the corpus could not be read as it was listed ({why})"
    return ConfigError.of(field, str(path), rule, "leave the corpus alone while it is read, and start again")
