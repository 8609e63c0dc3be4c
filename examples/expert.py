"""The expert axis: which experts each rank holds, where its tokens go and what it sends, in one level and two.

    python examples/expert.py --ranks 4

Really trains one step of a small mixture of experts on forked CPU ranks; bytes are the ledger's, and equal to what
follows from the router's choices. Rows are those of the first block with experts: one for each expert that a token
chose, or in two levels one for each node. Every layout prints the same loss.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from heptad import api
from heptad.axes.expert.flow import Sizes, flow_of
from heptad.config.schema import Job
from heptad.launch.forked import forked
from heptad.loader.loader import Loader
from heptad.loader.synthetic import synthetic
from heptad.models.moe import MoE
from heptad.precision.dtypes import dtypes_of
from heptad.train.step import Trainer


def one_rank(rank: int, job: Job) -> dict[str, Any]:
    trainer = Trainer(job, rank, torch.device("cpu"))
    layout = trainer.mesh.layout
    moe = next(module for module in trainer.parallel.model.module.modules() if isinstance(module, MoE))
    moe.router.choices = {}
    batches = Loader(job, layout.data_rank(rank), layout.data_ranks, synthetic(job)).step(0)
    trainer.mesh.ledger.reset()
    result = trainer.step(1, batches)
    (chosen,) = moe.router.choices.values()
    number, inner, _ = moe.experts.up.weight.shape
    at, width = layout.expert_coords(rank), job.model.expert_width
    first, row = at["ep"] * number, at["etp"] * inner
    held = f"experts {first} to {first + number} of {job.model.experts}, rows {row} to {row + inner} of {width}"
    return {"loss": result.loss, "held": held, "chosen": chosen.numpy(), "sent": trainer.mesh.ledger.transfers()}


def show(title: str, job: Job) -> None:
    print(f"\n{title}")
    ranks = forked(job.layout.dp_shard, one_rank, job)
    sizes = Sizes.of(job, dtypes_of(job.precision, "cpu"))
    flow = flow_of(sizes, [rank["chosen"] for rank in ranks])
    for index, rank in enumerate(ranks):
        print(f"rank {index} holds {rank['held']}")
        if sizes.nodes > 1:
            print(f"    rows to each node: {flow.across[index].astype(int).tolist()}")
        print(f"    rows to each rank{' of its node' * (sizes.nodes > 1)}: {flow.inside[index].astype(int).tolist()}")
    for item in ranks[0]["sent"]:
        if item.axis in ("ep", "etp") and item.phase != "norm":
            print(f"    sends {item.count:>3} × {item.op} {item.axis} ({item.phase}): {item.num_bytes:,} B")
    print(f"    loss {ranks[0]['loss']:.6f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4, help="2 or 4")
    ranks = parser.parse_args().ranks
    layouts = {"experts whole everywhere": list[str](), "one level": [f"layout.ep={ranks}"]}
    if ranks > 2:
        layouts["one level, each expert on two ranks"] = [f"layout.ep={ranks // 2}", "layout.etp=2"]
        layouts["two levels, nodes of two ranks"] = [f"layout.ep={ranks}", "layout.ep_inner=2"]
    sizes = ["model.layers=2", "model.experts=16", "model.experts_per_token=4"]  # of at most 2 of 4 groups
    sizes += ["model.router_groups=4", "model.router_group_limit=2"]
    sizes += ["data.seq_len=32", "optimizer.schedule=constant", f"train.global_batch={ranks}", "layout.zero=0"]
    for title, options in layouts.items():
        show(title, api.job("debug-moe", sets=[*sizes, f"layout.dp_shard={ranks}", *options]))


if __name__ == "__main__":
    main()
