"""A shrunk job cuts its sequences as the whole one did, in uneven parts, and its ranks deal heads in the same way."""

from __future__ import annotations

import math

import pytest

from heptad.cli.job import ready
from heptad.config.check import problems
from heptad.config.context import degrees
from heptad.config.schema import Job
from heptad.verify.shrink import shrink

LAYOUTS: dict[str, list[str]] = {
    "ring": ["layout.cp=8"],
    "contiguous": ["layout.cp=4", "layout.context_split=contiguous", "model.window=100"],
    "ulysses": ["layout.cp=4", "layout.context=ulysses", "layout.tp=2"],
    "ulysses over more ranks than kv heads": ["layout.cp=8", "layout.context=ulysses", "layout.tp=2"],
    "both": ["layout.cp=6", "layout.context='ring+ulysses'", "layout.cp_ulysses=2", "layout.tp=2"],
    "gather": ["layout.cp=16", "layout.context=gather", "layout.pp=2"],
}


def shared_by(job: Job) -> int:
    """Ranks that deal a kv head of theirs to each other."""
    assert job.model.kv_heads is not None
    return max(job.layout.tp * degrees(job.layout)[1] // job.model.kv_heads, 1)


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_cut_of_a_sequence_is_kept(name: str) -> None:
    job = ready("debug", ["model.preset=llama3-8b", "data.seq_len=4096", *LAYOUTS[name]])
    small = shrink(job, 3).job
    layout, length = small.layout, small.data.seq_len
    assert layout == job.layout.model_copy(
        update={"bucket_mb": layout.bucket_mb, "layers_per_stage": layout.layers_per_stage}
    )
    assert not problems(small)
    assert length % layout.cp and length % (2 * layout.cp) and length >= max(2 * layout.cp, layout.cp * layout.tp)
    assert all(length % divisor for divisor in range(2, math.isqrt(length) + 1))
    assert shared_by(small) == shared_by(job) and small.model.heads <= job.model.heads
    assert (small.model.window is None) == (job.model.window is None)
    assert small.model.window is None or small.model.window < length
    assert shrink(small, 3).job.model == small.model


def test_several_chunks_of_a_ranks_own_tokens_stay_several() -> None:
    job = ready("debug", ["data.seq_len=128", "layout.cp=2", "train.loss_chunk=32"])
    assert shrink(job, 3).job.train.loss_chunk == 3  # two chunks of 64 tokens: two of the 6 that a rank has now
    whole = ready("debug", ["data.seq_len=128", "layout.cp=2", "train.loss_chunk=64"])
    assert shrink(whole, 3).job.train.loss_chunk == 6
