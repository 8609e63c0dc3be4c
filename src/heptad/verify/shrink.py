"""A job made small enough to prove on a laptop, with the same structure: what can go wrong in it still can. No torch.

Kept: every axis's degree, how a cut sequence attends, stage, engine, prefetch, sequence parallel, recompute, offload,
compilation, kind of attention, tied head, norms, biases, dropout, frozen parameters, query heads per kv head, ranks
that share a kv head, kind of router and of attention (`experts.py`), optimizer and its rules, clipping, how many units
share a bucket (`bucket_mb` shrinks with the blocks), whether blocks are left out of recompute, and whether its segments
and the loss's chunks are one or several. Shrunk: sizes, to distinct odd primes where the model allows (a prime divides
by no degree, so every shard is uneven), and the number of blocks (`blocks.py`), sequences and micro-batches, to 3 where
there are more; with a pipeline, stages and schedule are kept, with as many blocks and micro-batches as they need
(`stages.py`). Raised: initial spread and learning rate, so that attention is not uniform and a stale parameter differs
visibly. `notes` says all of it in words.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass
from itertools import count
from math import isqrt
from typing import Literal

from heptad.config.context import degrees
from heptad.config.schema import (
    DtypeName,
    Job,
    LayoutSection,
    ModelSection,
    OptimizerSection,
    PrecisionSection,
    RecomputeSection,
)
from heptad.config.sizes import holds_rows
from heptad.models.chunk import chunk_tokens
from heptad.models.resolve import resolve
from heptad.models.spec import param_specs
from heptad.precision.dtypes import dtypes_of
from heptad.units import BYTES_PER_ELEMENT, MB
from heptad.verify import experts
from heptad.verify.blocks import shrink_blocks, shrink_frozen
from heptad.verify.stages import shrink_microbatches, shrink_stages, stage_sizes

WIDTH, MLP_WIDTH, VOCAB, SEQ_LEN, POSITIONS, HEAD_DIM = 13, 23, 37, 11, 17, 4
MAX_MICROBATCHES, MAX_MICRO_BATCH, MAX_CHUNKS = 3, 2, 3
INIT_STD, LR, MUON_LR = 0.3, 0.02, 0.05


@dataclass(frozen=True, slots=True)
class Shrunk:
    """The job that is run, and one line a change."""

    job: Job
    notes: tuple[str, ...]


def shrink(job: Job, steps: int, full: bool = False, params: DtypeName = "fp64") -> Shrunk:
    """The job `verify` runs for a resolved `job`; `full` keeps sizes and batch. `params`: dtype of the computation."""
    reduce = job.precision.reduce if params == job.precision.params else "auto"
    precision = PrecisionSection(params=params, reduce=reduce)
    small = job.model_copy(update={"precision": precision})
    notes = [f"precision: {params} parameters"]
    if full:
        return Shrunk(small, (*notes, "sizes as in the job (--full)"))
    sizes, recompute = _sizes(job.layout), job.recompute
    stages: tuple[int, ...] = ()
    if job.model.class_ is not None:
        model = job.model
        notes.append("model: a class of your own keeps its sizes")
    else:
        if job.layout.pp > 1:
            stages, recompute = shrink_stages(job)
            layers = sum(stages)
        else:
            layers, recompute = shrink_blocks(job)
        model = _model(job, layers, sizes)
        changed = [_change(job.model, model, name) for name in _SIZES]
        notes.append("model: " + ", ".join(change for change in changed if change))
    layout = _layout(job, model, precision)
    if layout.bucket_mb != job.layout.bucket_mb:
        notes.append(f"buckets: bucket_mb {job.layout.bucket_mb:g} -> {layout.bucket_mb:.2g}, as the blocks shrank")
    micro_batch = min(job.train.micro_batch, MAX_MICRO_BATCH)
    data_ranks = job.layout.dp_replicate * job.layout.dp_shard
    before = job.train.global_batch // (data_ranks * job.train.micro_batch)
    microbatches = min(before, MAX_MICROBATCHES) if job.layout.pp == 1 else shrink_microbatches(job, before)
    train = job.train.model_copy(
        update={
            "global_batch": data_ranks * microbatches * micro_batch,
            "micro_batch": micro_batch,
            "steps": max(steps, 2),
            "loss_chunk": _loss_chunk(job, micro_batch * -(-min(job.data.seq_len, sizes.seq_len) // job.layout.cp)),
        }
    )
    seq_len = min(job.data.seq_len, sizes.seq_len)
    notes.append(
        f"batch: {job.train.global_batch} -> {train.global_batch} sequences of {job.data.seq_len} -> {seq_len} tokens, "
        f"{before} -> {microbatches} micro-batches of {job.train.micro_batch} -> {micro_batch} on each rank"
    )
    if recompute != job.recompute:
        notes.append(f"recompute: {_shown(job.recompute)} -> {_shown(recompute)}")
    if train.loss_chunk != job.train.loss_chunk:
        notes.append(f"loss: loss_chunk {job.train.loss_chunk} -> {train.loss_chunk} tokens")
    optimizer = _optimizer(job.optimizer)
    notes.append(f"optimizer: lr {optimizer.lr:g}, its schedule squeezed into {train.steps} steps")
    data = job.data.model_copy(update={"seq_len": seq_len})
    parts = {"model": model, "layout": layout, "train": train, "data": data, "optimizer": optimizer}
    parts["recompute"] = recompute
    small = resolve(small.model_copy(update=parts))
    return Shrunk(_staged(small, stages, notes) if stages else small, tuple(notes))


def _staged(job: Job, wanted: tuple[int, ...], notes: list[str]) -> Job:
    """`job` with `wanted` blocks a stage: by the balance of costs if that gives them, else named."""
    balanced = job.model_copy(update={"layout": job.layout.model_copy(update={"layers_per_stage": ()})})
    named = job.layout.layers_per_stage or stage_sizes(balanced) != wanted
    notes.append(f"stages of {', '.join(map(str, wanted))} blocks{' by layers_per_stage' if named else ''}")
    if not named:
        return job
    layout = job.layout.model_copy(update={"layers_per_stage": wanted})
    return job.model_copy(update={"layout": layout})


_SIZES = (
    "layers", "width", "heads", "kv_heads", "head_dim", "mlp_width", "vocab", "max_positions", "init_std", "window",
    *experts.SIZES,
)  # fmt: skip


def _change(before: ModelSection, after: ModelSection, name: str) -> str:
    old, new = getattr(before, name), getattr(after, name)
    return "" if old == new else f"{name} {old} -> {new}"


def _shown(section: RecomputeSection) -> str:
    named = f", layers {list(section.layers)}" if section.layers else ""
    return f"{section.mode}, segment {section.segment}{named}"


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Distinct odd primes that leave none of the tensor ranks without rows of the MLP and of the vocabulary, and none
    of the context ranks without two chunks of a sequence."""

    mlp_width: int
    vocab: int
    seq_len: int
    positions: int


def _sizes(layout: LayoutSection) -> _Sizes:
    tp, cp = layout.tp, layout.cp
    mlp_width = next(size for size in _primes(MLP_WIDTH, {WIDTH}) if holds_rows(size, tp))
    vocab = next(size for size in _primes(VOCAB, {WIDTH, mlp_width}) if holds_rows(size, tp))
    seq_len = next(_primes(max(SEQ_LEN, tp * cp, 2 * cp), {WIDTH, mlp_width, vocab}))
    return _Sizes(mlp_width, vocab, seq_len, next(_primes(max(POSITIONS, seq_len + 1), {mlp_width, vocab})))


def _primes(start: int, taken: Set[int]) -> Iterator[int]:
    """Primes from `start` on, but those that are another size."""
    for number in count(start):
        if number not in taken and all(number % divisor for divisor in range(2, isqrt(number) + 1)):
            yield number


def _heads(model: ModelSection, layout: LayoutSection) -> tuple[int, int]:
    """Query and kv heads that ranks hold in the same way: as many ranks share a kv head, or each has whole ones.

    Ranks are the tensor ranks and, for each, those that deal its heads. With several kv heads a rank before, several
    now, unless each serves many query heads.
    """
    assert model.kv_heads is not None, "the job is resolved"
    ranks = layout.tp * degrees(layout)[1]
    if model.kv_heads % ranks:
        return model.heads, model.kv_heads
    group = model.heads // model.kv_heads
    kv_heads = ranks * min(model.kv_heads // ranks, 2 if group <= 4 else 1)
    return kv_heads * group, kv_heads


def _model(job: Job, layers: int, sizes: _Sizes) -> ModelSection:
    model = job.model
    assert model.head_dim is not None, "the job is resolved"
    heads, kv_heads = _heads(model, job.layout)
    return model.model_copy(
        update={
            "preset": None,
            "layers": layers,
            "width": min(model.width, WIDTH),
            "heads": heads,
            "kv_heads": kv_heads,
            "head_dim": min(model.head_dim, HEAD_DIM),
            "mlp_width": min(model.mlp_width, sizes.mlp_width),
            "vocab": min(model.vocab, sizes.vocab),
            "max_positions": min(model.max_positions, sizes.positions),
            "init_std": max(model.init_std, INIT_STD),
            "window": model.window if (model.window or 0) < sizes.seq_len else sizes.seq_len // 2,
            "frozen": shrink_frozen(model, layers),
            **experts.shrink_experts(model, layers, job.layout, min(job.data.seq_len, sizes.seq_len)),
        }
    )


def _layout(job: Job, model: ModelSection, precision: PrecisionSection) -> LayoutSection:
    """The same number of blocks a bucket: `bucket_mb` in proportion to the bytes of a block's gradients."""
    if model is job.model or job.layout.engine == "fsdp2":
        return job.layout
    before, after = (_block_bytes(item, form) for item, form in ((job.model, job.precision), (model, precision)))
    bucket_mb = job.layout.bucket_mb * after / before
    if job.model.layers * before > job.layout.bucket_mb * MB:  # several buckets before, so several now
        bucket_mb = min(bucket_mb, after / MB)
    return job.layout.model_copy(update={"bucket_mb": bucket_mb})


def _block_bytes(model: ModelSection, precision: PrecisionSection) -> int:
    """Bytes of one block's gradients as they are reduced: what `bucket_mb` counts."""
    numel = sum(spec.numel for spec in param_specs(model) if spec.name.startswith("blocks.0."))
    return numel * BYTES_PER_ELEMENT[dtypes_of(precision, "cpu").reduce]


def _loss_chunk(job: Job, tokens: int) -> int | Literal["auto"]:
    """Chunks of the loss of a micro-batch that now has `tokens` tokens: several, where there were several."""
    setting, before = job.train.loss_chunk, job.train.micro_batch * -(-job.data.seq_len // job.layout.cp)
    if job.layout.engine == "fsdp2":  # all logits at once
        return setting
    itemsize = BYTES_PER_ELEMENT["fp64" if job.precision.params == "fp64" else "fp32"]
    chunk = chunk_tokens(setting, before, -(-job.model.vocab // job.layout.tp), itemsize)
    if chunk == before:
        return "auto" if setting == "auto" else tokens
    return min(chunk, -(-tokens // min(-(-before // chunk), MAX_CHUNKS)))


def _optimizer(optimizer: OptimizerSection) -> OptimizerSection:
    """A visible learning rate from the first step on; warm-up and decay as short as the run."""
    changes = {
        "lr": max(optimizer.lr, LR),
        "decay_steps": None,
        "warmup_steps": min(optimizer.warmup_steps, 1),
    }
    if "muon" in (optimizer.name, *optimizer.roles.values()):
        changes["muon_lr"] = max(optimizer.muon_lr, MUON_LR)
    return optimizer.model_copy(update=changes)
