"""The pipeline axis: what each rank holds, its line of the schedule, what it sends; the same loss under each schedule.

    python examples/pipeline.py --ranks 2 --micro-batches 4

Really trains one step of a small decoder on forked CPU ranks; bytes are the ledger's, without the sums of one number
(count, loss, norm). A rank's first line is the schedule's (stage, kind, micro-batch), the next what that is of units.
"""

from __future__ import annotations

import argparse
from collections import Counter
from typing import Any

import torch

from heptad import api
from heptad.config.schema import Job
from heptad.launch.forked import forked
from heptad.loader.loader import Loader
from heptad.loader.synthetic import synthetic
from heptad.schedule.pipeline import format_schedule, peak_live
from heptad.train.step import Trainer

NAMES = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient", "S": "send", "T": "send back"}


def one_rank(rank: int, job: Job) -> dict[str, Any]:
    trainer = Trainer(job, rank, torch.device("cpu"))
    loader = Loader(job, 0, 1, synthetic(job))
    trainer.mesh.ledger.reset()
    result = trainer.step(1, loader.step(0))
    found = {"loss": result.loss, "sent": trainer.mesh.ledger.transfers(), "line": "", "live": 0}
    stages, units = trainer.parallel.stages, trainer.parallel.model.unit_specs
    held = range(len(units)) if stages is None else stages.held(rank)
    if stages is not None:
        found["line"] = format_schedule(stages.schedule).splitlines()[rank]
        found["live"] = peak_live(stages.schedule)[rank]
    kinds = Counter(action.kind.value for action in trainer.program)
    found["actions"] = ", ".join(f"{kinds[kind]} {name}" for kind, name in NAMES.items() if kinds[kind])
    found["units"] = ", ".join(units[unit].name for unit in held)
    found["numel"] = sum(shard.stop - shard.start for shard in trainer.engine.shards)
    return found


def show(title: str, ranks: list[dict[str, Any]]) -> None:
    print(f"\n{title}")
    for index, rank in enumerate(ranks):
        print(f"rank {index} holds {rank['numel']:,} parameters: {rank['units']}")
        if rank["line"]:
            print(f"    {rank['line']}\n    at most {rank['live']} alive; of units: {rank['actions']}")
        for item in rank["sent"]:
            if item.phase not in ("count", "loss", "norm"):
                print(f"    sends {item.count:>3} × {item.op} ({item.phase}): {item.num_bytes:,} B")
    print(f"    loss {ranks[0]['loss']:.6f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="2 or 4")
    parser.add_argument("--micro-batches", type=int, default=4, help="even, at least twice the ranks")
    args = parser.parse_args()
    sizes = ["data.seq_len=16", "optimizer.schedule=constant", f"train.global_batch={args.micro_batches}"]
    show("one rank", forked(1, one_rank, api.job("debug", sets=[*sizes, "layout.zero=0"])))
    for name in ("gpipe", "1f1b", "interleaved", "zbv", "dualpipe"):
        sets = [f"layout.pp={args.ranks}", "layout.zero=0"] + ([] if name == "1f1b" else [f"layout.schedule={name}"])
        show(name, forked(args.ranks, one_rank, api.job("debug", sets=[*sizes, *sets])))


if __name__ == "__main__":
    main()
