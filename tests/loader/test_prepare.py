"""Tokenizers, token stores, the validation split, and the cache under concurrent, killed and damaged builders."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors

from heptad.config.schema import DataSection, Job, ModelSection, SourceSection, TrainSection
from heptad.errors import ConfigError
from heptad.loader import prepare as prepare_module
from heptad.loader.cache import built, cache_folder
from heptad.loader.documents import Document
from heptad.loader.prepare import PreparedData, prepare
from heptad.loader.store import FILES, StoreWriter, Tokens
from heptad.loader.tokenise import EOS, TextTokenizer, load_tokenizer, train_bpe

TEXT = "the cat sat on the mat\nand the dog sat on the log\n"


def write(folder: Path, *texts: str) -> Path:
    folder.mkdir(exist_ok=True)
    for number, text in enumerate(texts):
        (folder / f"{number:03d}.txt").write_text(text)
    return folder


def job(tmp_path: Path, vocab: int = 300, cache: str = "cache", **data: Any) -> Job:
    data.setdefault("path", None if "sources" in data else str(tmp_path / "corpus"))
    return Job(
        model=ModelSection(vocab=vocab),
        data=DataSection(seq_len=8, cache_dir=str(tmp_path / cache), **data),
        train=TrainSection(global_batch=2),
    )


def words(tmp_path: Path, template: bool, config: dict[str, Any] | None = None, eos: str = "</s>") -> Path:
    """A word-level tokenizer.json: <s> 0, eos 1, words 2…; with or without a template that puts <s> in front."""
    vocab = {word: number for number, word in enumerate(["<s>", eos, "a", "b", "c"])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="c"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken(eos, special=True)])
    if template:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    folder = tmp_path / "words"
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_text_survives_a_trained_tokenizer() -> None:
    trained = train_bpe([TEXT] * 5, 300)
    assert trained.to_str() == train_bpe([TEXT] * 5, 300).to_str()
    tokenizer = TextTokenizer(trained, EOS, None)
    for text in (TEXT, "naïve 🎉 日本\t\x00", " leading"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    ((ids, prompt_length),) = tokenizer.encode_documents([Document("cat", "the ")])
    assert ids[-1] == tokenizer.eos and prompt_length == len(tokenizer.encode("the "))


def test_c_130_one_bos_one_eos(tmp_path: Path) -> None:
    """Template and text both begin with BOS: one stays. A text that already ends with EOS gets no second."""
    tokenizer = load_tokenizer(words(tmp_path, template=True))
    found = tokenizer.encode_documents(
        [Document("a b"), Document("<s> a b"), Document("a </s>"), Document("b", "<s> a")]
    )
    assert [ids.tolist() for ids, _ in found] == [[0, 2, 3, 1], [0, 2, 3, 1], [0, 2, 1], [0, 2, 3, 1]]
    assert [length for _, length in found] == [0, 0, 0, 2]
    assert tokenizer.encode("a") == [0, 2]
    plain = load_tokenizer(words(tmp_path, template=False))
    assert plain.encode_documents([Document("a b")])[0][0].tolist() == [2, 3, 1]


def test_the_end_token_is_named_by_the_config_or_refused(tmp_path: Path) -> None:
    folder = words(tmp_path, template=False, eos="STOP")
    with pytest.raises(ConfigError, match=r"data.tokenizer[\s\S]*end token"):
        load_tokenizer(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "STOP"}}))
    assert load_tokenizer(folder / "tokenizer.json").eos == 1
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer_config"):
        load_tokenizer(folder)


def test_a_tokenizer_that_pads_or_truncates_does_neither_here(tmp_path: Path) -> None:
    folder = words(tmp_path, template=False)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=7)
    tokenizer.save(str(folder / "tokenizer.json"))
    found = load_tokenizer(folder).encode_documents([Document("a b c a"), Document("b")])
    assert [ids.tolist() for ids, _ in found] == [[2, 3, 4, 2, 1], [3, 1]]


def test_unreadable_tokenizers_are_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    for path in (tmp_path / "absent", tmp_path):
        with pytest.raises(ConfigError, match=r"data\.tokenizer"):
            load_tokenizer(path)


def test_long_texts_are_encoded_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = TextTokenizer(train_bpe([TEXT] * 5, 300), EOS, None)
    text = TEXT * 3 + "x" * 40
    whole = tokenizer.encode(text)
    monkeypatch.setattr("heptad.loader.tokenise.PART_CHARS", 30)
    assert tokenizer.decode(tokenizer.encode(text)) == text and len(tokenizer.encode(text)) <= len(whole) + 5


def test_prepare_makes_stores_once_and_says_what_is_in_them(tmp_path: Path) -> None:
    write(tmp_path / "corpus", *[f"{TEXT} {i}" for i in range(40)], "", " ")
    said: list[str] = []
    made = prepare(job(tmp_path, val_fraction=0.2), said.append)
    assert len(said) == 2
    again = prepare(job(tmp_path, val_fraction=0.2), said.append)
    assert len(said) == 2 and again.digest == made.digest
    summary = made.summary()
    (source,) = made.sources
    assert summary["documents"] == 40 and summary["skipped_empty"] == 2 and summary["replaced"] == 0
    assert 2 <= source.validation.num_documents <= 16
    assert summary["tokens"] == source.train.num_tokens + source.validation.num_tokens
    assert json.loads(json.dumps(summary)) == summary and made.tokenizer is not None
    for tokens in (source.train, source.validation):
        assert tokens.tokens.dtype == np.uint16 and isinstance(tokens.tokens, np.memmap)
        assert all(int(tokens.tokens[end - 1]) == made.tokenizer.eos for end in tokens.ends)
    texts = [made.tokenizer.decode(part.tolist()) for part in np.split(source.train.tokens, source.train.ends[:-1])]
    assert set(texts) < {f"{TEXT} {i}" for i in range(40)}
    made.verify()


def test_a_changed_corpus_or_setting_is_tokenised_again(tmp_path: Path) -> None:
    write(tmp_path / "corpus", TEXT, TEXT)
    first = prepare(job(tmp_path))
    assert prepare(job(tmp_path, val_fraction=0.5)).sources[0].folder != first.sources[0].folder
    write(tmp_path / "corpus", TEXT, TEXT, TEXT)
    assert prepare(job(tmp_path)).digest != first.digest


@pytest.mark.parametrize(("texts", "fraction", "expected"), [
    ((TEXT, TEXT), 0.001, (1, 1)), ((TEXT, TEXT, TEXT), 0.999, (1, 2)), ((TEXT,), 0.3, (1, 1)),
    ((TEXT,) * 3, 0.0, (3, 0)), (("x",), 0.5, (1, 0)),
])  # fmt: skip
def test_validation_has_a_document_whenever_there_are_two(
    tmp_path: Path, texts: tuple[str, ...], fraction: float, expected: tuple[int, int]
) -> None:
    write(tmp_path / "corpus", *texts)
    (source,) = prepare(job(tmp_path, val_fraction=fraction)).sources
    assert (source.train.num_documents, source.validation.num_documents) == expected


def test_the_prompt_mask_reaches_the_store(tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "a.jsonl").write_text('{"prompt": "a a a", "text": "b"}\n' * 3)
    tokenizer = str(words(tmp_path, template=True))
    (source,) = prepare(job(tmp_path, tokenizer=tokenizer, prompt_field="prompt", val_fraction=0.0)).sources
    assert source.train.ids(0, 6).tolist() == [0, 2, 2, 2, 3, 1]
    assert source.train.may_be_target(0, 18).tolist() == [False] * 4 + [True] * 2 + ([False] * 4 + [True] * 2) * 2
    assert source.train.may_be_target(5, 11).tolist() == [True, False, False, False, False, True]


def test_sources_share_a_tokenizer_and_have_stores_of_their_own(tmp_path: Path) -> None:
    write(tmp_path / "one", TEXT, TEXT)
    write(tmp_path / "two", TEXT * 3, TEXT)
    sources = tuple(SourceSection(name=name, path=str(tmp_path / name)) for name in ("two", "one"))
    made = prepare(job(tmp_path, sources=sources))
    assert [entry["name"] for entry in made.summary()["sources"]] == ["one", "two"]
    assert made.summary()["documents"] == 4


def test_vocabularies_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "corpus", TEXT, TEXT)
    with pytest.raises(ConfigError, match=r"model.vocab = 100[\s\S]*at least 257"):
        prepare(job(tmp_path, vocab=100))
    with pytest.raises(ConfigError, match=r"model.vocab = 4[\s\S]*ids up to 4[\s\S]*at least 5"):
        prepare(job(tmp_path, vocab=4, tokenizer=str(words(tmp_path, template=False))))
    writer = StoreWriter(tmp_path / "store", vocab=10)
    with pytest.raises(ConfigError, match=r"model.vocab = 10[\s\S]*holds 10, 12[\s\S]*at least 13"):
        writer.add(np.asarray([1, 12, 10, 3]))
    writer.abort()


def test_wide_vocabularies_use_four_bytes(tmp_path: Path) -> None:
    writer = StoreWriter(tmp_path / "store", vocab=70_000)
    writer.add(np.asarray([69_999, 1]))
    writer.close({})
    assert Tokens.open(tmp_path / "store").ids(0, 2).tolist() == [69_999, 1]


def test_a_corpus_without_text_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    write(tmp_path / "corpus", "", "\n")
    with pytest.raises(ConfigError, match=r"2 files hold none \(2 empty documents\)"):
        prepare(job(tmp_path, tokenizer=str(words(tmp_path, template=False))))
    assert not list((tmp_path / "cache").glob("tokens-*/*"))


def test_damage_is_named(tmp_path: Path) -> None:
    write(tmp_path / "corpus", TEXT, TEXT)
    folder = prepare(job(tmp_path)).sources[0].folder
    assert folder is not None
    file = folder / "train" / FILES[0]
    content = bytearray(file.read_bytes())
    content[0] ^= 1
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"tokens\.bin'[\s\S]*SHA-256"):
        prepare(job(tmp_path)).verify()
    file.write_bytes(content[:-1])
    with pytest.raises(ConfigError, match=r"tokens\.bin'[\s\S]*damaged[\s\S]*delete"):
        prepare(job(tmp_path))
    (folder / "train" / "manifest.json").write_text("{")
    with pytest.raises(ConfigError, match=r"manifest\.json"):
        prepare(job(tmp_path))


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "corpus", TEXT, TEXT)
    (tmp_path / "cache").write_text("a file where the folder should be")
    with pytest.raises(ConfigError, match=r"data.cache_dir[\s\S]*writable"):
        prepare(job(tmp_path))
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    with pytest.raises(ConfigError, match=r"data\.cache_dir"):
        cache_folder(None)
    assert cache_folder("/x") == Path("/x")


def forked(work: Callable[[], None]) -> int:
    """Run `work` in a child; returns its pid."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return pid


def slow(started: Path, release: Path) -> Callable[[Path], None]:
    """A builder that says it has begun and waits to be let go on."""

    def build(folder: Path) -> None:
        (folder / "half").write_text("half")
        started.touch()
        until(release)
        (folder / "whole").write_text("whole")

    return build


def until(path: Path) -> None:
    deadline = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} never came"
        time.sleep(0.005)


def test_c_134_readers_wait_for_a_slow_builder_and_see_a_complete_folder(tmp_path: Path) -> None:
    started, release = tmp_path / "started", tmp_path / "release"
    builder = forked(lambda: void(built(tmp_path / "cache", "x", slow(started, release))))
    until(started)
    readers = [forked(lambda: void(seen(built(tmp_path / "cache", "x", never)))) for _ in range(3)]
    time.sleep(0.05)
    assert all(os.waitpid(reader, os.WNOHANG) == (0, 0) for reader in readers)
    release.touch()
    assert all(os.waitpid(pid, 0)[1] == 0 for pid in (builder, *readers))
    assert [path.name for path in (tmp_path / "cache" / "x").iterdir()] == ["complete"]


def test_c_134_a_killed_builder_leaves_nothing_that_is_taken_for_good(tmp_path: Path) -> None:
    started = tmp_path / "started"
    builder = forked(lambda: void(built(tmp_path / "cache", "x", slow(started, tmp_path / "never"))))
    until(started)
    os.kill(builder, signal.SIGKILL)
    os.waitpid(builder, 0)
    assert list((tmp_path / "cache" / "x").glob("building-*/half"))
    seen(built(tmp_path / "cache", "x", lambda folder: void((folder / "whole").write_text("whole"))))
    assert [path.name for path in (tmp_path / "cache" / "x").iterdir()] == ["complete"]


def test_c_134_builders_without_locks_both_build_and_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A filesystem without locks: the second to finish drops its copy."""

    def refuse(descriptor: int, kind: int) -> None:
        raise OSError("no locks here")

    monkeypatch.setattr("heptad.loader.cache.fcntl.flock", refuse)
    release = tmp_path / "release"
    builders = [
        forked(lambda n=n: void(seen(built(tmp_path / "cache", "x", slow(tmp_path / f"started{n}", release)))))  # type: ignore[misc]
        for n in range(2)
    ]
    for number in range(2):
        until(tmp_path / f"started{number}")
    release.touch()
    assert all(os.waitpid(pid, 0)[1] == 0 for pid in builders)
    assert [path.name for path in (tmp_path / "cache" / "x").iterdir()] == ["complete"]


def test_c_134_nodes_with_caches_of_their_own_end_with_the_same_index(tmp_path: Path) -> None:
    write(tmp_path / "corpus", *[f"{TEXT} {i}" for i in range(9)])
    pids = [forked(lambda c=c: void(prepare(job(tmp_path, cache=c)))) for c in ("one", "two", "two")]  # type: ignore[misc]
    assert all(os.waitpid(pid, 0)[1] == 0 for pid in pids)
    here, there = (prepare(job(tmp_path, cache=cache), never_say) for cache in ("one", "two"))
    assert here.digest == there.digest and isinstance(here, PreparedData)


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        built(tmp_path, "x", lambda folder: void(1 // 0))
    assert list((tmp_path / "x").iterdir()) == []


def test_documents_are_encoded_in_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "corpus", *[f"{TEXT} {i}" for i in range(9)])
    whole = prepare(job(tmp_path)).digest
    monkeypatch.setattr("heptad.loader.tokenise.BATCH_CHARS", 100)
    monkeypatch.setattr(prepare_module, "FORMAT", 0)
    assert prepare(job(tmp_path)).digest == whole


def seen(folder: Path) -> None:
    assert (folder / "whole").read_text() == "whole"


def never(folder: Path) -> None:
    raise AssertionError("built twice")


def never_say(sentence: str) -> None:
    raise AssertionError(f"not taken from the cache: {sentence}")


def void(value: object) -> None:
    """For lambdas that are called for their effect."""
