"""The lines of the tensor axis: its step against torch's, against one core, its memory against the formulas.

A step of two ranks on two cores is compared with torch's DTensor (`dtensor.py`) under the same plan, and with the same
model on one core. The share of communication is the time the step's own thread stands in `Work.wait` and `wait_sent`
of any collective: waiting for the slower rank is in it, the copies gloo's threads make meanwhile are not.
Memory is what one block's forward leaves alive on a rank (`heptad/mesh/meter.py`). Read next: `dtensor.py`,
`loss.py`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from benchmarks.dtensor import TensorPeer
from benchmarks.lines import Effort, Row, launches, row_of
from benchmarks.measure import alternate, ratio
from benchmarks.peers import CPU, Contender, Ours, Size, batch_of, check, job_of
from benchmarks.ranks import launch

from benchmarks import loss
from heptad.config.schema import DataSection, Job, LayoutSection, ModelSection, PrecisionSection, TrainSection
from heptad.mesh.collectives import Work
from heptad.mesh.meter import MemoryMeter
from heptad.models.resolve import resolve
from heptad.train.step import Trainer

SMALL = Size(layers=6, width=256, heads=4, mlp_width=688, vocab=2048, seq_len=128, sequences=4)
CUT = {"sequence_parallel": True}
KEPT = {"sequence_parallel": True, "keep_gathered": True}
ALONE = "same model on one core"


def two_ranks(size: Size, rank: int, name: str, **layout: bool) -> Ours:
    """Heptad's step at T = 2; both ranks read rank 0's batches."""
    return Ours(size, rank, job_of(size, 1, 0, tp=2, **layout), name, reads=0)


def _whole(rank: int, size: Size) -> list[Contender]:
    return [two_ranks(size, rank, "heptad"), TensorPeer("dtensor", size, sequence=False)]


def _cut(rank: int, size: Size) -> list[Contender]:
    return [
        two_ranks(size, rank, "heptad", **CUT),
        two_ranks(size, rank, "kept", **KEPT),
        TensorPeer("dtensor", size, sequence=True),
    ]


def against_dtensor(effort: Effort) -> list[Row]:
    """T = 2 on two ranks, both forms of the stream."""
    whole, cut = launches(2, SMALL, _whole, effort), launches(2, SMALL, _cut, effort)
    what = "tensor T=2 ÷ torch DTensor, same plan, 2 loopback ranks, 512 tokens"
    again = "Heptad gathers a region's input again in the backward, torch keeps it"
    return [
        row_of(f"{what}, whole stream", ratio(whole, "heptad", ["dtensor"]), 0.80),
        row_of(f"{what}, cut stream, gathered kept", ratio(cut, "kept", ["dtensor"]), 0.80),
        row_of(f"{what}, cut stream (default)", ratio(cut, "heptad", ["dtensor"]), 0.80, note=again),
    ]


@dataclass(slots=True)
class Waited:
    """Seconds so far."""

    seconds: float = 0.0


@contextmanager
def waiting() -> Iterator[Waited]:
    """Time of this process in `Work.wait` and `wait_sent` while the block runs."""
    waited, originals = Waited(), {name: getattr(Work, name) for name in ("wait", "wait_sent")}

    def timed(inner: Any) -> Any:
        def call(work: Work) -> None:
            start = time.perf_counter()
            inner(work)
            waited.seconds += time.perf_counter() - start

        return call

    for name, inner in originals.items():
        setattr(Work, name, timed(inner))
    try:
        yield waited
    finally:
        for name, inner in originals.items():
            setattr(Work, name, inner)


def _against_one(rank: int, size: Size, rounds: int, steps: int) -> dict[str, Any]:
    """Times, the medians of the share waited, and bytes sent a step."""
    forms = [two_ranks(size, rank, "whole"), two_ranks(size, rank, "cut", **CUT)]
    alone = Ours(size, 0, job_of(size, 1, 0), name=ALONE)
    check([*forms, alone])
    shares, sent = {}, {}
    for form in forms:
        seen = []
        for number in range(1, 4 * rounds + 1):
            form.trainer.mesh.ledger.reset()
            start = time.perf_counter()
            with waiting() as waited:
                form.step(number)
            seen.append(waited.seconds / (time.perf_counter() - start))
        shares[form.name] = statistics.median(seen)
        sent[form.name] = sum(transfer.num_bytes for transfer in form.trainer.mesh.ledger.transfers())
    return {"times": alternate([*forms, alone], rounds, steps), "shares": shares, "sent": sent}


def against_one_core(effort: Effort) -> list[Row]:
    """T = 2 on two cores ÷ T = 1 on one (both cores run one each, so both sides share the machine alike)."""
    found = [
        rank for _ in range(effort.launches) for rank in launch(2, _against_one, SMALL, effort.rounds, effort.steps)
    ]
    rows = []
    for form in ("whole", "cut"):
        share = statistics.median(rank["shares"][form] for rank in found)
        note = f"{share:.0%} of the step waited in collectives, {found[0]['sent'][form] / 1e6:.1f} MB sent a rank"
        times = [rank["times"] for rank in found[::2]]
        rows.append(row_of(f"T=2 ÷ T=1, {ALONE}, {form} stream", ratio(times, form, [ALONE]), None, note=note))
    return rows


GPT = Size(layers=2, width=256, heads=8, mlp_width=1024, vocab=256, seq_len=64, sequences=2)
"""Blocks of the paper's kind: MLP of 4 widths, dropout after attention and MLP, half precision."""


def block_bytes(rank: int, sequence: bool) -> int:
    """Bytes one GPT-style block's forward leaves alive on one of four tensor ranks; its input is the block before's."""
    model = ModelSection(
        layers=GPT.layers, width=GPT.width, heads=GPT.heads, mlp_width=GPT.mlp_width, vocab=GPT.vocab,
        norm="layer", mlp="plain", activation="gelu", positions="learned", max_positions=GPT.seq_len, dropout=0.1,
    )  # fmt: skip
    job = Job(
        model=model,
        layout=LayoutSection(tp=4, zero=0, sequence_parallel=sequence),
        precision=PrecisionSection(params="bf16"),
        data=DataSection(seq_len=GPT.seq_len),
        train=TrainSection(global_batch=GPT.sequences, micro_batch=GPT.sequences, steps=1),
    )
    trainer, batch = Trainer(resolve(job), rank, CPU), batch_of(GPT, 0, 0)
    executor = trainer.parallel.executor
    embedded, _ = executor.forward(0, None, batch, taped=True, sink=trainer.engine)
    x = embedded.detach().requires_grad_()
    meter = MemoryMeter([x, *trainer.parallel.model.params.values(), batch.ids, batch.positions, batch.index])
    before = meter.current_bytes()
    with meter:
        kept = executor.forward(1, x, batch, taped=True, sink=trainer.engine)
        left = at_rest(meter) - before
        del kept
    return left


def at_rest(meter: MemoryMeter) -> int:
    """Live bytes once they have not changed for 0.1 s: gloo's thread lets go of a buffer some time after its wait."""
    seen = [meter.current_bytes()]
    while len(seen) < 6 or len(set(seen[-6:])) > 1:
        time.sleep(0.02)
        seen.append(meter.current_bytes())
    return seen[-1]


def memory(effort: Effort) -> list[Row]:
    """What a block keeps at T = 4, cut stream ÷ whole stream, beside the formulas' (34/T) ÷ (10 + 24/T)."""
    whole, cut = (max(launch(4, block_bytes, sequence)) for sequence in (False, True))
    unit = GPT.sequences * GPT.seq_len * GPT.width
    formula = (34 / 4) / (10 + 24 / 4)
    note = (
        f"{cut} bytes against {whole}: {cut / unit:.3f} and {whole / unit:.3f} · B·L·D, by the formulas {34 / 4:g} and "
        f"{10 + 24 / 4:g}, their ratio {formula:.3f}; the rest: statistics of norms and attention in fp32"
    )
    return [Row("a GPT block's activations, T=4, cut ÷ whole stream", cut / whole, note=note)]


def loss_memory(effort: Effort) -> list[Row]:
    """Peak bytes of the head's loss at Llama 3's vocabulary."""
    rows = []
    for num_ranks in (2, 4):
        ours, naive = loss.peak_bytes(num_ranks=num_ranks)
        note = f"{ours / 1e6:.1f} MB against {naive / 1e6:.1f} MB; 512 tokens of width 64 in fp32, gradients included"
        what = f"peak bytes, cut vocabulary in chunks ÷ all logits at once, V = {loss.VOCAB:,}, T={num_ranks}"
        rows.append(Row(what, ours / naive, 0.15, note=note))
    return rows
