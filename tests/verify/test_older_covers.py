"""Why the covers of single axes run under `slow`: each pair of options that one of their jobs has, a job of the cover
of everything has too. What is theirs alone (a tensor degree with its stream against each other option: a triple) runs
there as before, and so do their special jobs in the fast part."""

from __future__ import annotations

import pytest
from tests.sweep import Pair
from tests.verify import test_context_layouts, test_pipeline_layouts, test_tensor_layouts
from tests.verify.cover import pairs_of, read
from tests.verify.everything import FACTORS
from tests.verify.several import Item

RECOMPUTE = {"segment2": "segments"}


def tensor_of(levels: Item) -> Item:
    """Of a level such as "2kept"."""
    tp, stream = int(levels["tensor"][0]), levels["tensor"][1:] or "whole"
    return {"tp": tp, "stream": stream if tp > 1 else "none"}


def of_tensor(item: Item) -> Item:
    """A job of `test_tensor_layouts`."""
    degrees = {"dp_shard": 1, "dp_replicate": 1} | test_tensor_layouts.DATA[item["data"]]
    dropped = "none" if not item["dropout"] else "scores" if item["attention"] == "math" else "features"
    same = {name: item[name] for name in ("zero", "tied", "attention", "loss_chunk", "offload")}
    recompute = RECOMPUTE.get(item["recompute"], item["recompute"])
    return same | degrees | tensor_of(item) | dict(block=item["blocks"], dropout=dropped, recompute=recompute)


def of_pipeline(item: Item) -> Item:
    """A job of `test_pipeline_layouts`."""
    same = {name: item[name] for name in ("schedule", "pp", "vpp", "microbatches", "zero", "recompute", "tied")}
    return same | tensor_of(item) | dict(dp_shard=item["data"])


def of_context(item: Item) -> Item:
    """A job of `test_context_layouts`."""
    same = {name: item[name] for name in ("cp", "heads", "zero", "recompute", "length", "rows")}
    dropped = (
        dict(attention="math", dropout="scores")
        if item["attention"] == "dropped"
        else dict(attention=item["attention"])
    )
    split = dict(split="none" if item["kind"] == "ulysses" else item["split"])
    piped = dict(pp=1 if item["pipeline"] == "none" else 2, schedule=item["pipeline"])
    sight = dict(sight=item["sight"].replace(" ", "-"))
    return same | tensor_of(item) | dropped | split | piped | sight | dict(context=item["kind"], dp_shard=item["data"])


def ordered(item: Item) -> Item:
    """In the order of the factors, as pairs are written; a level that the cover has not is an error."""
    assert all(level in FACTORS[name] for name, level in item.items()), item
    return {name: item[name] for name in FACTORS if name in item}


@pytest.mark.parametrize(
    ("items", "translated"),
    [
        (test_tensor_layouts.COVER, of_tensor),
        (test_pipeline_layouts.COVER, of_pipeline),
        (test_context_layouts.COVER, of_context),
    ],
    ids=["tensor", "pipeline", "context"],
)
def test_every_pair_of_an_older_cover_is_in_the_new_one(items: list[Item], translated: object) -> None:
    assert callable(translated)
    wanted: set[Pair] = pairs_of(ordered(translated(item)) for item in items)
    assert wanted <= pairs_of(read()[0]) and len(wanted) > 200
