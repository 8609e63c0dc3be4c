"""The tensor axis: what each rank holds of a model and sends in a step, with the residual stream whole and cut.

    python examples/tensor.py --ranks 2

Really trains one step of a small decoder on forked CPU ranks; bytes are the ledger's. Every rank prints the same loss:
a layout changes who holds and who sends, not what is computed.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from heptad import api
from heptad.config.schema import Job
from heptad.launch.forked import forked
from heptad.loader.loader import Loader
from heptad.loader.synthetic import synthetic
from heptad.train.step import Trainer

WATCHED = ("attention.q.weight", "attention.k.weight", "attention.out.weight", "mlp.down.weight", "mlp.norm.weight")


def one_rank(rank: int, job: Job) -> dict[str, Any]:
    trainer = Trainer(job, rank, torch.device("cpu"))
    layout = trainer.mesh.layout
    loader = Loader(job, layout.data_rank(rank), layout.data_ranks, synthetic(job))
    trainer.mesh.ledger.reset()
    result = trainer.step(1, loader.step(0))
    watched = {f"blocks.0.{name}" for name in WATCHED} | {"embed.tokens.weight"}
    rows = []
    for shard in trainer.engine.shards:
        if shard.spec.name in watched:
            width = shard.spec.numel // shard.spec.shape[0]
            held = f"rows {shard.start // width:>4} to {shard.stop // width:>4} of {shard.spec.shape[0]:>4}"
            summed = "" if shard.sum_group is None else f", gradient summed over {shard.sum_group.size} ranks"
            rows.append(f"{shard.spec.name:<30} {held}{'' if shard.owner else ' (a copy)'}{summed}")
    held_numel = sum(shard.stop - shard.start for shard in trainer.engine.shards)
    return {"loss": result.loss, "rows": rows, "numel": held_numel, "sent": trainer.mesh.ledger.transfers()}


def show(title: str, ranks: list[dict[str, Any]]) -> None:
    print(f"\n{title}")
    for index, rank in enumerate(ranks):
        print(f"rank {index} holds {rank['numel']:,} parameters")
        print("".join(f"    {row}\n" for row in rank["rows"]), end="")
    for item in ranks[0]["sent"]:
        print(f"    sends {item.count:>3} × {item.op} {item.axis} ({item.phase}): {item.num_bytes:,} B")
    print(f"    loss {ranks[0]['loss']:.6f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="2, 4 or 8")
    args = parser.parse_args()
    sizes = ["model.layers=2", "data.seq_len=16", "optimizer.schedule=constant"]
    sizes += ["train.global_batch=2", "layout.zero=0"]
    cut, kept = "layout.sequence_parallel=true", "layout.keep_gathered=true"
    layouts = {"one rank": (1, []), "tensor, stream whole": (args.ranks, []), "tensor, stream cut": (args.ranks, [cut])}
    layouts["tensor, stream cut, gathered inputs kept"] = (args.ranks, [cut, kept])
    for title, (num_ranks, options) in layouts.items():
        job = api.job("debug", sets=[*sizes, f"layout.tp={num_ranks}", *options])
        show(title, forked(num_ranks, one_rank, job))


if __name__ == "__main__":
    main()
