"""The data axis: what each rank holds between steps and sends in a step, for stages 0 to 3 and HSDP.

    python examples/data.py --ranks 4 --micro-batches 2

Each layout really trains one step of a small decoder on forked CPU ranks; bytes are those of live storages and of the
ledger. Every rank prints the same loss: a layout changes who holds and who sends, not what is computed.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from heptad import api
from heptad.config.schema import Job
from heptad.launch.forked import forked
from heptad.loader.loader import Loader
from heptad.loader.synthetic import synthetic
from heptad.trace import Transfer
from heptad.train.step import Trainer

WATCHED = "head.out.weight"


def num_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the distinct storages behind `tensors`, as they are now (a dropped buffer has none)."""
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def one_rank(rank: int, job: Job) -> dict[str, Any]:
    trainer = Trainer(job, rank, torch.device("cpu"))
    layout, buckets = trainer.mesh.layout, trainer.engine.buckets
    loader = Loader(job, layout.data_rank(rank), layout.data_ranks, synthetic(job))
    trainer.mesh.ledger.reset()
    result = trainer.step(1, loader.step(0))
    watched = next(shard for shard in trainer.engine.shards if shard.spec.name == WATCHED)
    return {
        "loss": result.loss,
        "params": num_bytes(tensor for bucket in buckets for tensor in (bucket.full, bucket.master)),
        "grads": num_bytes(tensor for bucket in buckets for tensor in (bucket.grad_full, bucket.grad_shard)),
        "moments": sum(piece.tensor.nbytes for piece in trainer.optimizer.pieces()),
        "range": (watched.start, watched.stop, watched.spec.numel),
        "sent": trainer.mesh.ledger.transfers(),
    }


def show(title: str, ranks: list[dict[str, Any]]) -> None:
    print(f"\n{title}\nrank  params B   grads B  moments B  updates of {WATCHED}")
    for index, rank in enumerate(ranks):
        held = f"{rank['params']:>9,} {rank['grads']:>9,} {rank['moments']:>10,}"
        print(f"{index:>4} {held}  [{rank['range'][0]}, {rank['range'][1]}) of {rank['range'][2]}")
    sent: list[Transfer] = ranks[0]["sent"]
    for item in sent:
        print(f"     sends {item.count:>2} × {item.op} {item.axis} ({item.phase}): {item.num_bytes:,} B")
    print(f"     sends {sum(item.num_bytes for item in sent):,} B in all; loss {ranks[0]['loss']:.6f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4, help="even, at least 4")
    parser.add_argument("--micro-batches", type=int, default=2, help="of one sequence, a rank and step")
    args = parser.parse_args()
    batch = f"train.global_batch={args.ranks * args.micro_batches}"
    sizes = [batch, "model.layers=2", "layout.bucket_mb=0", "data.seq_len=16", "optimizer.schedule=constant"]
    layouts = [(f"stage {zero}: dp_shard {args.ranks}", zero, 1, args.ranks) for zero in range(4)]
    layouts.append((f"HSDP: stage 3, dp_replicate 2 × dp_shard {args.ranks // 2}", 3, 2, args.ranks // 2))
    for title, zero, replicate, shard in layouts:
        degrees = [f"layout.zero={zero}", f"layout.dp_replicate={replicate}", f"layout.dp_shard={shard}"]
        show(title, forked(args.ranks, one_rank, api.job("debug", sets=[*sizes, *degrees])))


if __name__ == "__main__":
    main()
