"""The context axis: which tokens each rank holds, how much it attends to and what it sends in a step.

    python examples/context.py --ranks 2

Really trains one step of a small decoder on forked CPU ranks; bytes are the ledger's. Tokens are shown as runs, with |
between documents; pairs are those of a query and a key that it sees, once a head, in the first row. Every layout prints
the same loss but the last, which is of another model: its queries see the last 8 tokens alone.
"""

from __future__ import annotations

import argparse
from itertools import groupby
from typing import Any

import torch

from heptad import api
from heptad.axes.context.split import pairs, place
from heptad.config.context import degrees
from heptad.config.schema import Job
from heptad.launch.forked import forked
from heptad.loader.loader import Loader
from heptad.loader.synthetic import synthetic
from heptad.train.step import Trainer


def runs(tokens: list[int], documents: list[int]) -> str:
    found = []
    for _, part in groupby(tokens, key=lambda token: documents[token]):
        places = groupby(enumerate(part), key=lambda item: item[1] - item[0])
        ends = [[token for _, token in run] for _, run in places]
        found.append(" ".join(f"{run[0]}-{run[-1]}" if run[1:] else str(run[0]) for run in ends))
    return " | ".join(found)


def one_rank(rank: int, job: Job) -> dict[str, Any]:
    trainer = Trainer(job, rank, torch.device("cpu"))
    layout, (ring, dealt) = trainer.mesh.layout, degrees(job.layout)
    batches = Loader(job, layout.data_rank(rank), layout.data_ranks, synthetic(job)).step(0)
    trainer.mesh.ledger.reset()
    result = trainer.step(1, batches)
    documents, heads = batches[0].documents.numpy(), job.model.heads // dealt
    placement = place(documents, ring, dealt, job.layout.context_split)
    tokens = placement.part(rank, job.layout.cp)[0].tolist()
    seen = int(pairs(placement, job.model.window)[rank // dealt]) * heads
    held = f"holds {len(tokens)} tokens of a row: {runs(tokens, documents[0].tolist())}"
    rows = [held, f"attends with {placement.tokens} queries of {heads} heads: {seen:,} pairs"]
    return {"loss": result.loss, "rows": rows, "sent": trainer.mesh.ledger.transfers()}


def show(title: str, ranks: list[dict[str, Any]]) -> None:
    print(f"\n{title}")
    for index, rank in enumerate(ranks):
        print("".join(f"rank {index} {row}\n" for row in rank["rows"]), end="")
    for item in ranks[0]["sent"]:
        print(f"    sends {item.count:>3} × {item.op} {item.axis} ({item.phase}): {item.num_bytes:,} B")
    print(f"    loss {ranks[0]['loss']:.6f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="2 or 4")
    ranks = parser.parse_args().ranks
    sizes = ["model.layers=2", "data.seq_len=64", "optimizer.schedule=constant"]
    sizes += ["train.global_batch=2", "layout.zero=0"]
    layouts = {"one rank": (1, list[str]()), "ring, plain order": (ranks, ["layout.context_split=contiguous"])}
    layouts |= {"ring, zigzag": (ranks, []), "ulysses": (ranks, ["layout.context=ulysses"])}
    if ranks > 2:
        layouts["ring+ulysses"] = (ranks, ["layout.context=ring+ulysses", "layout.cp_ulysses=2"])
    layouts |= {"gather": (ranks, ["layout.context=gather"]), "ring, window of 8": (ranks, ["model.window=8"])}
    for title, (num_ranks, options) in layouts.items():
        job = api.job("debug", sets=[*sizes, f"layout.cp={num_ranks}", *options])
        show(title, forked(num_ranks, one_rank, job))


if __name__ == "__main__":
    main()
