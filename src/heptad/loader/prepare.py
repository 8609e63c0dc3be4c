"""From a job to token stores: list the corpus, get a tokenizer, tokenise each source once, split off validation.

Everything is kept in the cache under a fingerprint of what it was made from (files, sizes, times of change, settings),
so a second run, and every other rank, only maps files. A document belongs to validation by a hash of its number,
whatever the seed; with two or more documents and `data.val_fraction` > 0 each side has at least one, and a corpus of
one document is cut in two, its end going to validation.
Costs: one pass over the corpus for the tokenizer and one for the ids, the first time. Read next: `loader.py`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heptad.config.schema import Job
from heptad.errors import ConfigError
from heptad.loader.cache import built, cache_folder
from heptad.loader.corpus import Corpus, corpora
from heptad.loader.documents import Counts, Document, documents
from heptad.loader.pack import Samples
from heptad.loader.store import StoreWriter, Tokens, read_manifest, sync, verify_files
from heptad.loader.tokenise import (
    EOS,
    MIN_BPE_VOCAB,
    TRAIN_CHARS,
    TextTokenizer,
    encoded,
    load_tokenizer,
    train_bpe,
    training_texts,
)

FORMAT = 1
"""Part of every fingerprint: raise it when the same input gives other files."""


@dataclass(frozen=True)
class Source:
    """One source's stores. `skipped_empty` documents had no text; `replaced` invalid UTF-8 sequences became U+FFFD."""

    name: str
    weight: float
    train: Tokens
    validation: Tokens
    skipped_empty: int = 0
    replaced: int = 0
    num_bytes: int = 0
    folder: Path | None = None


@dataclass(frozen=True)
class PreparedData:
    """Sources in the order of their names, and the tokenizer they were made with (None for made-up tokens)."""

    sources: tuple[Source, ...]
    seq_len: int
    pack: bool
    tokenizer: TextTokenizer | None = None
    tokenizer_path: Path | None = None
    cache: Path | None = None

    @property
    def digest(self) -> str:
        """Hash of all content: equal on every rank that reads the same tokens."""
        parts = [part for s in self.sources for part in (s.name, s.train.digest, s.validation.digest)]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def summary(self) -> dict[str, Any]:
        """Figures for people and machines: totals, and one entry a source. Bytes are those of the text read."""
        entries: list[dict[str, Any]] = []
        for source in self.sources:
            train, validation = (Samples(t, self.seq_len, self.pack) for t in (source.train, source.validation))
            entries.append({
                "name": source.name, "weight": source.weight,
                "documents": source.train.num_documents + source.validation.num_documents,
                "tokens": source.train.num_tokens + source.validation.num_tokens, "bytes": source.num_bytes,
                "train_samples": train.num_samples, "validation_samples": validation.num_samples,
                "skipped_empty": source.skipped_empty, "replaced": source.replaced,
            })  # fmt: skip
        totals = {key: sum(entry[key] for entry in entries) for key in entries[0] if key not in ("name", "weight")}
        return {
            **totals, "seq_len": self.seq_len, "vocab": None if self.tokenizer is None else self.tokenizer.vocab,
            "tokenizer": None if self.tokenizer_path is None else str(self.tokenizer_path),
            "cache": None if self.cache is None else str(self.cache), "digest": self.digest, "sources": entries,
        }  # fmt: skip

    def verify(self) -> None:
        """Read every store whole against its checksums. Raises ConfigError naming the first file that differs."""
        for source in self.sources:
            if source.folder is not None:
                verify_files(source.folder / "train")
                verify_files(source.folder / "validation")


def prepare(job: Job, say: Callable[[str], None] | None = None) -> PreparedData:
    """The job's token stores, made on the first call and mapped afterwards. `job.model.vocab` must be resolved.

    `say` is told, a sentence each, what takes time. Raises ConfigError for a corpus, tokenizer or cache that fails.
    """
    say = say or (lambda sentence: None)
    found = corpora(job.data)
    cache = cache_folder(job.data.cache_dir)
    if job.data.tokenizer is not None:
        path = Path(job.data.tokenizer).expanduser()
    else:
        path = _trained_tokenizer(job, found, cache, say)
    tokenizer = load_tokenizer(path)
    if tokenizer.vocab > job.model.vocab:
        rule = f"the model needs a row for every token; the tokenizer has ids up to {tokenizer.vocab - 1}"
        fix = f"set model.vocab to at least {tokenizer.vocab}, or give another data.tokenizer"
        raise ConfigError.of("model.vocab", job.model.vocab, rule, fix)
    sources = tuple(_source(job, corpus, tokenizer, cache, say) for corpus in found)
    return PreparedData(sources, job.data.seq_len, job.data.pack, tokenizer, path, cache)


def _trained_tokenizer(job: Job, found: tuple[Corpus, ...], cache: Path, say: Callable[[str], None]) -> Path:
    vocab = job.model.vocab
    if vocab < MIN_BPE_VOCAB:
        rule = f"a byte-level tokenizer has at least {MIN_BPE_VOCAB} tokens: 256 bytes and {EOS}"
        raise ConfigError.of("model.vocab", vocab, rule, f"set it to {MIN_BPE_VOCAB} or more, or give data.tokenizer")
    name = "tokenizer-" + _fingerprint(vocab, TRAIN_CHARS, [_inputs(corpus) for corpus in found])

    def build(folder: Path) -> None:
        say(f"training a tokenizer of {vocab} tokens")
        trained = train_bpe(training_texts(found), vocab)
        with (folder / "tokenizer.json").open("w", encoding="utf-8") as file:
            file.write(trained.to_str())
            sync(file)

    return built(cache, name, build) / "tokenizer.json"


def _source(
    job: Job, corpus: Corpus, tokenizer: TextTokenizer, cache: Path, say: Callable[[str], None]
) -> Source:  # fmt: skip
    fraction = job.data.val_fraction
    name = "tokens-" + _fingerprint(fraction, tokenizer.fingerprint, tokenizer.vocab, _inputs(corpus))

    def build(folder: Path) -> None:
        say(f"tokenising source {corpus.name!r}: {len(corpus.files)} files")
        write_stores(folder, corpus, tokenizer, fraction)

    folder = built(cache, name, build)
    facts = read_manifest(folder / "train")
    train, validation = Tokens.open(folder / "train"), Tokens.open(folder / "validation")
    return Source(
        corpus.name,
        corpus.weight,
        train,
        validation,
        facts["skipped_empty"],
        facts["replaced"],
        facts["num_bytes"],
        folder,
    )


def write_stores(folder: Path, corpus: Corpus, tokenizer: TextTokenizer, val_fraction: float) -> None:
    """Write stores `train` and `validation` into `folder`. Raises ConfigError when the corpus holds no text."""
    counts = Counts()
    found = documents(corpus, counts)
    if val_fraction > 0:
        found = _two_at_least(found, val_fraction)
    train, validation = (
        StoreWriter(folder / "train", tokenizer.vocab),
        StoreWriter(folder / "validation", tokenizer.vocab),
    )
    try:
        last = None
        for number, document in enumerate(encoded(tokenizer, found)):
            if last is not None:
                (validation if _in_validation(number - 1, val_fraction) else train).add(*last)
            last = document
        if last is None:
            rule = f"the corpus holds text; {len(corpus.files)} files hold none ({counts.empty} empty documents)"
            raise ConfigError.of(corpus.field, str(corpus.files[0].path), rule, "point it to files with text")
        goal = validation if _in_validation(train.num_documents + validation.num_documents, val_fraction) else train
        if not train.num_documents:
            goal = train
        elif val_fraction > 0 and not validation.num_documents:
            goal = validation
        goal.add(*last)
        facts = {"skipped_empty": counts.empty, "replaced": counts.replaced, "num_bytes": counts.num_bytes}
        train.close(facts)
        validation.close({})
    finally:
        train.abort()
        validation.abort()


def _in_validation(number: int, fraction: float) -> bool:
    """Whether document `number` is validation: a hash of the number, uniform in [0, 1), lies below `fraction`."""
    digest = hashlib.blake2b(f"validation/{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") < fraction * 2.0**64


def _two_at_least(found: Iterator[Document], fraction: float) -> Iterator[Document]:
    """The documents; a lone one is cut in two at the line end nearest before its last `fraction`."""
    first = next(found, None)
    if first is None:
        return
    second = next(found, None)
    if second is not None:
        yield first
        yield second
        yield from found
        return
    text = first.text
    middle = min(max(1, round(len(text) * (1 - fraction))), len(text) - 1)
    cut = text.rfind("\n", 0, middle) + 1 or middle
    if text[:cut].strip() and text[cut:].strip():
        yield Document(text[:cut], first.prompt)
        yield Document(text[cut:], first.prompt)
    else:
        yield first


def _inputs(corpus: Corpus) -> list[Any]:
    """All that the documents of a corpus depend on, its weight and name left out."""
    files = [(str(f.path.resolve()), f.num_bytes, f.mtime_ns) for f in corpus.files]
    return [files, corpus.max_bytes, corpus.text_field, corpus.prompt_field]


def _fingerprint(*parts: Any) -> str:
    return hashlib.sha256(json.dumps([FORMAT, *parts]).encode()).hexdigest()[:32]
