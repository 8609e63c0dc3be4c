"""Options that would do nothing in this job: refused, so that a set option always means something.

An option counts as set when it differs from its default, so that a resolved job (every option written out) loads again.
What is not built yet is `unbuilt.py`'s; [optimizer] is `optimizer.py`'s, [recompute] `recompute.py`'s.
"""

from __future__ import annotations

from collections.abc import Iterator

from heptad.config.schema import Job, ModelSection, RopeScaling, Section
from heptad.errors import Problem


def problems(job: Job, model: ModelSection) -> Iterator[Problem]:
    """`model` is the section with its preset filled in."""
    yield from _model(model, job.data.seq_len)
    yield from _layout(job)
    yield from _data(job)
    yield from _run(job)


def is_set(section: Section, name: str) -> bool:
    """Whether option `name` differs from its default."""
    return bool(getattr(section, name) != type(section).model_fields[name].default)


def idle(path: str, section: Section, names: tuple[str, ...], why: str, fix: str) -> Iterator[Problem]:
    """A problem for each option in `names` that is set; `why` says what must be for it to be read."""
    for name in names:
        if is_set(section, name):
            value = getattr(section, name)
            shown = list(value) if isinstance(value, tuple) else value
            yield Problem(f"{path}.{name}", shown, f"it would have no effect: {why}", f"remove it, or {fix}")


def _model(model: ModelSection, seq_len: int) -> Iterator[Problem]:
    if model.class_ is None:
        yield from idle("model", model, ("options",), "only a class of your own reads it", 'set class = "pkg.mod:Name"')
    if model.positions == "learned":
        yield from idle("model", model, ("rope_theta", "rope_scaling"), "positions are learned", 'positions = "rotary"')
    elif model.rope_scaling is not None:
        yield from _scaling(model.rope_scaling)
    if model.window is not None and model.window >= seq_len:
        why = f"a sequence of data.seq_len = {seq_len} tokens has none that is {model.window} before another"
        fix = f"window <= {seq_len - 1}, or a longer seq_len" if seq_len > 1 else "a longer seq_len"
        yield from idle("model", model, ("window",), why, fix)


def _scaling(scaling: RopeScaling) -> Iterator[Problem]:
    readers = {
        "llama3": ("low_freq_factor", "high_freq_factor"),
        "yarn": ("beta_fast", "beta_slow", "attention_factor"),
    }
    for kind, names in readers.items():
        if kind != scaling.kind:
            yield from idle("model.rope_scaling", scaling, names, f'only kind = "{kind}" reads it', f'kind = "{kind}"')


def _layout(job: Job) -> Iterator[Problem]:
    layout = job.layout
    if layout.pp == 1:
        why = "there is no pipeline (pp = 1)"
        yield from idle("layout", layout, ("schedule", "vpp", "layers_per_stage"), why, "pp > 1")
    if layout.tp == 1:
        names = ("sequence_parallel", "keep_gathered")
        yield from idle("layout", layout, names, "there is no tensor axis (tp = 1)", "tp > 1")
    elif not layout.sequence_parallel:
        why = "a tensor region's input is whole on every rank without sequence_parallel"
        yield from idle("layout", layout, ("keep_gathered",), why, "sequence_parallel = true")
    if layout.engine == "fsdp2":
        why = 'engine = "fsdp2" makes its own buckets and prefetches its own way'
        yield from idle("layout", layout, ("bucket_mb", "prefetch", "reduce_grads"), why, 'engine = "heptad"')
        why = 'under engine = "fsdp2" autograd differentiates the loss of all logits at once'
        yield from idle("train", job.train, ("loss_chunk",), why, 'engine = "heptad"')
    elif layout.zero == 0:
        why = "stage 0 gathers nothing and waits for its reductions at the step's end"
        yield from idle("layout", layout, ("prefetch",), why, "zero >= 1")
    if layout.zero < 2 and layout.engine == "heptad":
        why = f"stage {layout.zero} keeps whole gradients and reduces them once a step"
        yield from idle("layout", layout, ("reduce_grads",), why, "zero >= 2")


def _data(job: Job) -> Iterator[Problem]:
    data, cluster = job.data, job.cluster
    if data.path is not None and data.sources:
        rule = "path and sources are two ways to name the corpus; only one can be read"
        yield Problem("data.path", data.path, rule, "keep one of them")
    if data.path is None and not data.sources:
        why = "the default corpus is plain text, which has no fields"
        yield from idle("data", data, ("text_field", "prompt_field"), why, "set data.path or data.sources")
    if not data.val_fraction:
        yield from idle(
            "train", job.train, ("val_batches",), "no text is held back (data.val_fraction = 0)", "raise val_fraction"
        )
    if not data.shuffle:
        yield from idle("data", data, ("seed",), "the order is not shuffled", "set shuffle = true")
    if len(data.sources) == 1:
        yield from idle("data.sources[0]", data.sources[0], ("weight",), "it is the only source", "name another one")
    if cluster.preset is not None and cluster.file is not None:
        rule = "preset and file both describe the cluster; only one can be read"
        yield Problem("cluster.preset", cluster.preset, rule, "keep one of them")


def _run(job: Job) -> Iterator[Problem]:
    checkpoint = job.checkpoint
    if not checkpoint.every:
        yield from idle("checkpoint", checkpoint, ("keep",), "nothing is saved (checkpoint.every = 0)", "set every")
