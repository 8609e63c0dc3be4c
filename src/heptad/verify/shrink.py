"""A job made small enough to prove on a laptop, with the same structure: what can go wrong in it still can. No torch.

Kept: every axis's degree, stage, engine, prefetch, recompute, tied head, norms, biases, dropout, frozen parameters,
query heads per kv head, optimizer and its rules, clipping, and how many units share a bucket (`bucket_mb` shrinks with
the blocks). Shrunk: sizes, to distinct odd primes where the model allows (a prime divides by no degree, so every shard
is uneven), and the number of blocks, sequences and micro-batches, to 3 where there are more. Raised: initial spread and
learning rate, so that attention is not uniform and a stale parameter differs visibly. `notes` says all of it in words.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from heptad.config.schema import DtypeName, Job, LayoutSection, ModelSection, OptimizerSection, PrecisionSection
from heptad.models.resolve import resolve
from heptad.models.spec import param_specs
from heptad.precision.dtypes import dtypes_of
from heptad.units import BYTES_PER_ELEMENT, MB

LAYERS, WIDTH, MLP_WIDTH, VOCAB, SEQ_LEN, POSITIONS, HEAD_DIM = 3, 13, 23, 37, 11, 17, 4
MAX_MICROBATCHES, MAX_MICRO_BATCH = 3, 2
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
    model = _model(job.model)
    if model is job.model:
        notes.append("model: a class of your own keeps its sizes")
    else:
        changed = [_change(job.model, model, name) for name in _SIZES]
        notes.append("model: " + ", ".join(change for change in changed if change))
    layout = _layout(job, model, precision)
    if layout.bucket_mb != job.layout.bucket_mb:
        notes.append(f"buckets: bucket_mb {job.layout.bucket_mb:g} -> {layout.bucket_mb:.2g}, as the blocks shrank")
    micro_batch = min(job.train.micro_batch, MAX_MICRO_BATCH)
    data_ranks = job.layout.dp_replicate * job.layout.dp_shard
    before = job.train.global_batch // (data_ranks * job.train.micro_batch)
    microbatches = min(before, MAX_MICROBATCHES)
    train = job.train.model_copy(
        update={
            "global_batch": data_ranks * microbatches * micro_batch,
            "micro_batch": micro_batch,
            "steps": max(steps, 2),
        }
    )
    seq_len = min(job.data.seq_len, SEQ_LEN)
    notes.append(
        f"batch: {job.train.global_batch} -> {train.global_batch} sequences of {job.data.seq_len} -> {seq_len} tokens, "
        f"{before} -> {microbatches} micro-batches of {job.train.micro_batch} -> {micro_batch} on each rank"
    )
    optimizer = _optimizer(job.optimizer)
    notes.append(f"optimizer: lr {optimizer.lr:g}, its schedule squeezed into {train.steps} steps")
    data = job.data.model_copy(update={"seq_len": seq_len})
    parts = {"model": model, "layout": layout, "train": train, "data": data, "optimizer": optimizer}
    return Shrunk(resolve(small.model_copy(update=parts)), tuple(notes))


_SIZES = ("layers", "width", "heads", "kv_heads", "head_dim", "mlp_width", "vocab", "max_positions", "init_std")


def _change(before: ModelSection, after: ModelSection, name: str) -> str:
    old, new = getattr(before, name), getattr(after, name)
    return "" if old == new else f"{name} {old} -> {new}"


def _model(model: ModelSection) -> ModelSection:
    if model.class_ is not None:
        return model
    assert model.kv_heads is not None and model.head_dim is not None, "the job is resolved"
    group = model.heads // model.kv_heads
    kv_heads = min(model.kv_heads, 2 if group <= 4 else 1)
    layers = min(model.layers, LAYERS)
    frozen = [re.sub(r"(?<=blocks\.)\d+", lambda found: str(int(found[0]) % layers), item) for item in model.frozen]
    return model.model_copy(
        update={
            "preset": None,
            "layers": layers,
            "width": min(model.width, WIDTH),
            "heads": kv_heads * group,
            "kv_heads": kv_heads,
            "head_dim": min(model.head_dim, HEAD_DIM),
            "mlp_width": min(model.mlp_width, MLP_WIDTH),
            "vocab": min(model.vocab, VOCAB),
            "max_positions": min(model.max_positions, POSITIONS),
            "init_std": max(model.init_std, INIT_STD),
            "frozen": tuple(dict.fromkeys(frozen)),
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


def _optimizer(optimizer: OptimizerSection) -> OptimizerSection:
    """A visible learning rate from the first step on; warm-up and decay as short as the run."""
    changes = {"lr": max(optimizer.lr, LR), "muon_lr": max(optimizer.muon_lr, MUON_LR), "decay_steps": None}
    return optimizer.model_copy(update={**changes, "warmup_steps": min(optimizer.warmup_steps, 1)})
