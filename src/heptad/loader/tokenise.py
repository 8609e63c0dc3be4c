"""Text to token ids: a byte-level BPE trained on the corpus, or any tokenizer.json, and the end of every document.

A document becomes [what the tokenizer's template puts in front, usually BOS or nothing] + prompt + text + EOS. EOS is
learned like any token, so a model can stop; it is added once, and a BOS that the text already begins with is not
doubled (C-130). Prompt and text are encoded apart, so the loss mask falls between tokens.
Costs: training reads at most `TRAIN_CHARS` of text, 2 to 3 s on two cores; encoding takes about as long.
Read next: `documents.py`, `prepare.py` (who calls this), `store.py` (where ids go).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from heptad.errors import ConfigError
from heptad.loader.corpus import Corpus
from heptad.loader.documents import Counts, Document, documents
from heptad.loader.order import Ints

EOS = "<eos>"
EOS_NAMES = (EOS, "</s>", "<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<end_of_turn>", "[EOS]")
BOS_NAMES = ("<bos>", "<s>", "<|begin_of_text|>", "<|startoftext|>", "[BOS]")
MIN_BPE_VOCAB = 257
"""256 bytes and `EOS`: the smallest byte-level vocabulary."""

TRAIN_CHARS = 8_000_000
BATCH_CHARS = 1 << 20
PART_CHARS = 1 << 20
"""Longer texts are encoded in parts that end at a line end, to bound memory."""


class TextTokenizer:
    """A tokenizer with its end (and begin) token known. `vocab` is one more than its largest id."""

    def __init__(self, tokenizer: Tokenizer, eos: str, bos: str | None) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self.eos = _id(tokenizer, eos)
        self.bos = None if bos is None else _id(tokenizer, bos)
        self.vocab = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        self.fingerprint = hashlib.sha256(f"{eos}\n{bos}\n{tokenizer.to_str()}".encode()).hexdigest()
        special = {number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        template = [int(i) for i in tokenizer.encode("", add_special_tokens=True).ids if i in special]
        self._front = template[:-1] if template and template[-1] == self.eos else template

    def encode(self, text: str) -> list[int]:
        """Ids of a text that a model is to go on from: what the template puts in front, no end token."""
        return [int(i) for i in self._joined(self._bodies([text])[0])]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids; special tokens are left out."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def encode_documents(self, batch: Sequence[Document]) -> list[tuple[Ints, int]]:
        """For each document its ids [n] int64, ending in one EOS, and the number of leading ids that are prompt."""
        bodies = self._bodies([part for document in batch for part in (document.prompt, document.text)])
        found = []
        for document, prompt, text in zip(batch, bodies[::2], bodies[1::2], strict=True):
            if not len(text) or text[-1] != self.eos:
                text = np.append(text, self.eos)
            ids = self._joined(np.concatenate([prompt, text]))
            found.append((ids, len(ids) - len(text) if document.prompt else 0))
        return found

    def _joined(self, body: Ints) -> Ints:
        front = self._front
        if front and front[-1] == self.bos and len(body) and body[0] == self.bos:
            front = front[:-1]
        return np.concatenate([np.asarray(front, dtype=np.int64), body])

    def _bodies(self, texts: Sequence[str]) -> list[Ints]:
        """Ids of texts without any template; a few parts at a time, since the library keeps much beside the ids."""
        parts = [_parts(text) for text in texts]
        ids: list[Ints] = []
        for group in _groups([part for of in parts for part in of]):
            encodings = self._tokenizer.encode_batch_fast(group, add_special_tokens=False)
            ids += [np.asarray(encoding.ids, dtype=np.int64) for encoding in encodings]
        rest = iter(ids)
        return [np.concatenate([next(rest) for _ in of]) for of in parts]


def load_tokenizer(path: str | Path) -> TextTokenizer:
    """A tokenizer.json, or a folder with one. Raises ConfigError when unreadable or when its end token is unknown.

    BOS and EOS are what a tokenizer_config.json beside it names, otherwise the first known name in the vocabulary.
    """
    given = str(path)
    file = Path(path).expanduser()
    file = file / "tokenizer.json" if file.is_dir() else file
    if not file.is_file():
        rule = "a tokenizer.json of the `tokenizers` library, or a folder with one"
        raise ConfigError.of("data.tokenizer", given, rule, "correct the path, or leave it out to train one")
    try:
        tokenizer = Tokenizer.from_str(file.read_text(encoding="utf-8"))
    except Exception as error:  # the library raises bare Exception for a file it cannot parse
        rule = f"a tokenizer.json of the `tokenizers` library ({error})"
        raise ConfigError.of("data.tokenizer", given, rule, "export the tokenizer again") from error
    named = _named_specials(file.parent / "tokenizer_config.json")
    known = tokenizer.get_vocab(with_added_tokens=True)
    eos = next((name for name in (named.get("eos_token"), *EOS_NAMES) if name in known), None)
    bos = next((name for name in (named.get("bos_token"), *BOS_NAMES) if name in known), None)
    if eos is None:
        rule = "documents end with an end token; the vocabulary holds none of " + " ".join(EOS_NAMES)
        raise ConfigError.of("data.tokenizer", given, rule, 'name it in tokenizer_config.json ("eos_token")')
    return TextTokenizer(tokenizer, eos, bos)


def train_bpe(texts: Iterable[str], vocab: int) -> Tokenizer:
    """Byte-level BPE of at most `vocab` tokens (fewer when the text has fewer merges), `EOS` id 0. Deterministic."""
    assert vocab >= MIN_BPE_VOCAB
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def training_texts(corpora: Sequence[Corpus]) -> Iterator[str]:
    """Text to train a tokenizer on: the beginning of every source, `TRAIN_CHARS` in all."""
    for corpus in corpora:
        left = TRAIN_CHARS // len(corpora)
        for document in documents(corpus, Counts()):
            for text in (document.prompt, document.text):
                yield text[:left]
                left = max(0, left - len(text))
            if left == 0:
                break


def encoded(tokenizer: TextTokenizer, found: Iterable[Document]) -> Iterator[tuple[Ints, int]]:
    """Ids and prompt length of each document, encoded `BATCH_CHARS` at a time."""
    batch: list[Document] = []
    size = 0
    for document in found:
        batch.append(document)
        size += len(document.text) + len(document.prompt)
        if size >= BATCH_CHARS:
            yield from tokenizer.encode_documents(batch)
            batch, size = [], 0
    yield from tokenizer.encode_documents(batch)


def _id(tokenizer: Tokenizer, token: str) -> int:
    number = tokenizer.token_to_id(token)
    assert number is not None, f"{token!r} is no token"
    return number


def _named_specials(path: Path) -> dict[str, str]:
    """Special tokens a tokenizer_config.json names, as plain strings."""
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError.of("data.tokenizer", str(path), f"readable JSON ({error})", "repair or remove it") from error
    found = {}
    for key in ("bos_token", "eos_token"):
        value = config.get(key)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            found[key] = value
    return found


def _parts(text: str) -> list[str]:
    """`text` in parts of at most PART_CHARS, cut after a line end where there is one."""
    parts = []
    while len(text) > PART_CHARS:
        end = text.rfind("\n", 1, PART_CHARS) + 1 or PART_CHARS
        parts.append(text[:end])
        text = text[end:]
    return [*parts, text]


def _groups(parts: Sequence[str]) -> Iterator[list[str]]:
    """Consecutive parts, a few PART_CHARS together."""
    group: list[str] = []
    size = 0
    for part in parts:
        group.append(part)
        size += len(part)
        if size >= 4 * PART_CHARS:
            yield group
            group, size = [], 0
    if group:
        yield group
