"""What a user reads when the data cannot work, verbatim."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from heptad.config.schema import DataSection, Job, ModelSection, TrainSection
from heptad.errors import ConfigError
from heptad.loader.loader import Loader
from heptad.loader.prepare import PreparedData, Source, prepare
from heptad.loader.store import Tokens


def test_messages_of_the_loader(tmp_path: Path, snapshot: Callable[[str, str], None]) -> None:
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "a.jsonl").write_text('{"body": "x"}\n')
    (tmp_path / "empty").mkdir()

    def job(path: str, vocab: int = 300) -> Job:
        data = DataSection(path=str(tmp_path / path), cache_dir=str(tmp_path / "cache"), seq_len=4)
        return Job(model=ModelSection(vocab=vocab), data=data, train=TrainSection(global_batch=6))

    stream = Tokens.from_arrays(np.arange(290), np.asarray([290]))
    made = PreparedData((Source("data", 1.0, stream, stream),), 4, True)
    state = Loader(job("bad"), 0, 2, made).state(1)
    other = Tokens.from_arrays(np.arange(200), np.asarray([200]))
    shorter = PreparedData((Source("data", 1.0, other, other),), 4, True)
    cases: list[Callable[[], object]] = [
        lambda: prepare(job("absent")),
        lambda: prepare(job("empty")),
        lambda: prepare(job("bad")),
        lambda: prepare(job("bad", vocab=100)),
        lambda: Loader(job("bad"), 0, 4, made),
        lambda: Loader(job("bad", vocab=200), 0, 2, made),
        lambda: Loader(job("bad"), 0, 2, shorter, {**state, "seed": 7}),
    ]
    messages = []
    for case in cases:
        try:
            case()
        except ConfigError as error:
            messages.append(str(error).replace(str(tmp_path), "TMP"))
    assert len(messages) == len(cases)
    snapshot("loader", "\n\n".join(messages))
