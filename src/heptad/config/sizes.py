"""Arithmetic of a job: which sizes divide which degrees. Each problem says the numbers and the nearest legal values.

The pipeline's sizes are `pipeline.py`'s, the context axis's `context.py`'s.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from heptad.config.schema import Job, LayoutSection, ModelSection
from heptad.errors import Problem

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Axes of the dense ranks, in the default order."""

BITS = {"bf16": 16, "fp32": 32, "fp64": 64}


def problems(job: Job, model: ModelSection, devices_per_node: int | None) -> Iterator[Problem]:
    """`model` is the section with its preset filled in; `devices_per_node` None means as many as the layout needs."""
    yield from _model(job, model)
    yield from _attention(model)
    yield from _world(job, devices_per_node)
    yield from _layout(job, model)
    yield from _precision(job)
    yield from _data(job)
    yield from _batch(job)


def world(layout: LayoutSection) -> int:
    """Number of ranks: pp × dp_replicate × dp_shard × cp × tp."""
    return math.prod(getattr(layout, axis) for axis in AXES)


def around(value: int, step: int) -> str:
    """The multiples of `step` next to `value`: '16 or 24' (never 0)."""
    below = value // step * step
    return f"{below} or {below + step}" if below else str(step)


def divisors_near(number: int, value: int) -> str:
    """The divisors of `number` next to `value`, at most one on each side: '2 or 3'."""
    return _nearest_two(divisors(number), value)


def divisors(number: int) -> list[int]:
    """All of them, ascending."""
    low = [item for item in range(1, math.isqrt(number) + 1) if number % item == 0]
    return low + [number // item for item in reversed(low) if item * item != number]


def _nearest_two(ascending: list[int], value: int) -> str:
    near = [*[item for item in ascending if item <= value][-1:], *[item for item in ascending if item > value][:1]]
    return " or ".join(map(str, near))


def _model(job: Job, model: ModelSection) -> Iterator[Problem]:
    heads, kv_heads = model.heads, model.kv_heads or model.heads
    if heads % kv_heads:
        rule = f"kv_heads divides heads ({heads} % {kv_heads} = {heads % kv_heads})"
        yield Problem("model.kv_heads", kv_heads, rule, f"kv_heads = {divisors_near(heads, kv_heads)}")
    if model.head_dim is None and model.width % heads and model.attention_kind == "gqa":
        rule = f"heads divides width ({model.width} % {heads} = {model.width % heads}) unless head_dim is given"
        fix = f"width = {around(model.width, heads)}, heads = {divisors_near(model.width, heads)}, or give head_dim"
        yield Problem("model.heads", heads, rule, fix)
    head_dim = model.head_dim or model.width // heads
    if model.positions == "rotary" and head_dim % 2 and model.attention_kind == "gqa":
        rule = f"rotary positions turn pairs of elements, so head_dim is even (it is {head_dim})"
        yield Problem("model.head_dim", head_dim, rule, f"head_dim = {head_dim - 1 or 2} or {head_dim + 1}")
    if job.data.seq_len > model.max_positions:
        rule = f"a sequence fits the model's positions (model.max_positions = {model.max_positions})"
        fix = f"data.seq_len <= {model.max_positions}, or raise model.max_positions"
        yield Problem("data.seq_len", job.data.seq_len, rule, fix)
    if model.class_ is not None and not all(map(str.isidentifier, _names(model.class_))):
        rule = 'a class is named "package.module:Name"'
        yield Problem("model.class", model.class_, rule, "write the module, a colon and the class")
    yield from _scaling(model)


def _scaling(model: ModelSection) -> Iterator[Problem]:
    scaling = model.rope_scaling
    if scaling is not None and scaling.kind == "llama3" and scaling.low_freq_factor >= scaling.high_freq_factor:
        rule = f"low_freq_factor lies below high_freq_factor = {scaling.high_freq_factor:g}"
        yield Problem(
            "model.rope_scaling.low_freq_factor", scaling.low_freq_factor, rule, "e.g. 1 and 4, as Llama 3 has"
        )
    if scaling is not None and scaling.kind == "yarn" and scaling.beta_slow >= scaling.beta_fast:
        rule = f"beta_slow lies below beta_fast = {scaling.beta_fast:g}"
        yield Problem("model.rope_scaling.beta_slow", scaling.beta_slow, rule, "e.g. 1 and 32, as the paper has")


def _attention(model: ModelSection) -> Iterator[Problem]:
    """Dropped attention weights are chosen one by one, so the weights must be formed."""
    dropout = model.attention_dropout
    if dropout and model.attention == "flash":
        rule = f"flash attention never forms the weights that attention_dropout = {dropout:g} would drop"
        yield Problem("model.attention", "flash", rule, 'attention = "math" or "auto", or attention_dropout = 0')


def _names(class_: str) -> list[str]:
    module, _, name = class_.partition(":")
    return [*module.split("."), name]


def _world(job: Job, devices_per_node: int | None) -> Iterator[Problem]:
    layout, nodes = job.layout, job.cluster.nodes
    ranks = world(layout)
    product = f"{' × '.join(AXES)} = {' × '.join(str(getattr(layout, axis)) for axis in AXES)} = {ranks}"
    if devices_per_node is None:
        if ranks % nodes:
            rule = f"every node holds the same number of ranks, but the layout has {ranks} ({product})"
            yield Problem("cluster.nodes", nodes, rule, f"nodes = {divisors_near(ranks, nodes)}")
        return
    devices = nodes * devices_per_node
    if ranks == devices:
        return
    rule = f"the degrees use every device: {product}, but {nodes} × {devices_per_node} = {devices} devices"
    fixes = []
    others = ranks // layout.dp_shard
    if devices % others == 0:
        fixes.append(f"layout.dp_shard = {devices // others}")
    if ranks % nodes == 0:
        fixes.append(f"cluster.devices_per_node = {ranks // nodes}")
    if devices % layout.tp:
        fixes.append(f"for {devices} devices layout.tp = {divisors_near(devices, layout.tp)}")
    yield Problem("layout", ranks, rule, ", or ".join(fixes) or f"degrees whose product is {devices}")


def _layout(job: Job, model: ModelSection) -> Iterator[Problem]:
    layout = job.layout
    if sorted(layout.order.split("-")) != sorted(AXES):
        rule = f"order names each of {', '.join(AXES)} once, outermost first, joined by '-'"
        yield Problem("layout.order", layout.order, rule, f'e.g. order = "{"-".join(AXES)}"')
    yield from _tensor(layout, model)
    block, experts = layout.dp_shard * layout.cp * layout.tp, layout.ep * layout.etp
    if block % experts:
        rule = f"ep × etp = {experts} divides dp_shard × cp × tp = {block}, from which expert ranks are carved"
        more = layout.dp_shard * (experts // math.gcd(block, experts))
        yield Problem("layout.ep", layout.ep, rule, f"ep × etp = {divisors_near(block, experts)}, or dp_shard = {more}")
    if layout.engine == "fsdp2" and layout.zero != 3:
        rule = 'engine = "fsdp2" is torch\'s fully_shard, which is stage 3'
        yield Problem("layout.zero", layout.zero, rule, 'zero = 3, or engine = "heptad" for the other stages')
    if layout.engine == "fsdp2" and model.tied and model.class_ is None:
        rule = 'engine = "fsdp2" wraps each unit by itself, and a tied head would share its weight with the embedding'
        yield Problem("model.tied", model.tied, rule, 'engine = "heptad", or tied = false')
    if layout.engine == "fsdp2" and layout.tp > 1:
        rule = f"fsdp2 is the reference of the data axis alone, but tp = {layout.tp}"
        yield Problem("layout.engine", layout.engine, rule, 'engine = "heptad", or tp = 1')


def _tensor(layout: LayoutSection, model: ModelSection) -> Iterator[Problem]:
    tp, heads, kv_heads = layout.tp, model.heads, model.kv_heads or model.heads
    if heads % tp:
        rule = f"tp divides heads ({heads} % {tp} = {heads % tp})"
        yield Problem("model.heads", heads, rule, f"heads = {around(heads, tp)}, or tp = {divisors_near(heads, tp)}")
    rule, group = "", heads // kv_heads
    if kv_heads >= tp and kv_heads % tp:
        rule = f"tp divides kv_heads ({kv_heads} % {tp} = {kv_heads % tp}), or kv_heads divides tp"
    elif kv_heads < tp and tp % kv_heads:
        rule = f"with kv_heads = {kv_heads} < tp = {tp}, kv_heads divides tp ({tp} % {kv_heads} = {tp % kv_heads})"
    elif kv_heads < tp and heads % kv_heads == 0 and group % (tp // kv_heads):
        share = tp // kv_heads
        rule = (
            f"with kv_heads = {kv_heads} < tp = {tp}, {share} ranks share a kv head and "
            f"its {group} query heads ({group} % {share} = {group % share})"
        )
    if rule:
        yield Problem("model.kv_heads", kv_heads, rule, _kv_fix(tp, heads, kv_heads))
    if model.experts is None or model.dense_layers:
        yield from _rows("model.mlp_width", model.mlp_width, tp, heads)
    inner = model.shared_experts * (model.expert_width or model.mlp_width) if model.experts is not None else 0
    if inner:
        yield from _rows("model.expert_width", inner, tp, heads, model.shared_experts)
    yield from _rows("model.vocab", model.vocab, tp, heads)


def _kv_fix(tp: int, heads: int, kv_heads: int) -> str:
    """Degrees that suit these heads, and kv heads that suit this degree."""
    fits = [item for item in divisors(heads) if kv_heads % item == 0 or item % kv_heads == 0]
    best = sorted(sorted(fits, key=lambda item: abs(item - tp))[:2])
    fix = f"tp = {' or '.join(map(str, best))} (heads = {heads})"
    if heads % tp == 0:
        others = [item for item in divisors(heads) if tp % item == 0 or item % tp == 0]
        fix += f", or kv_heads = {_nearest_two(others, kv_heads)}"
    return fix


def _rows(field: str, rows: int, tp: int, heads: int, each: int = 1) -> Iterator[Problem]:
    """Rows are cut into equal parts, the last ones padded; a part of padding alone would compute nothing. each: rows of
    the size that `field` counts (of shared experts, which are one MLP, all have it)."""
    if holds_rows(rows, tp):
        return
    key, part = field.partition(".")[2], -(-rows // tp)
    if rows < tp:
        product = f" ({each} × {rows // each})" if each > 1 else ""
        rule = f"each of the tp = {tp} ranks holds a row, but there are {rows}{product}"
    else:
        rule = f"each of the tp = {tp} ranks holds a row, but with {part} rows a rank {-(-rows // part)} ranks hold all"
    below = [item for item in range(1, -(-rows // each)) if holds_rows(each * item, tp)][-1:]
    above = next(item for item in range(rows // each, rows + tp * tp) if holds_rows(each * item, tp))
    degree = max(item for item in divisors(heads) if item < tp and holds_rows(rows, item))
    sizes = " or ".join(map(str, [*below, above]))
    yield Problem(field, rows // each, rule, f"{key} = {sizes}, or tp = {degree}")


def holds_rows(rows: int, tp: int) -> bool:
    """Whether each of `tp` ranks holds at least one of `rows` rows, ceil(rows / tp) a rank and the last ones fewer."""
    return (tp - 1) * -(-rows // tp) < rows


def _precision(job: Job) -> Iterator[Problem]:
    params, reduce = job.precision.params, job.precision.reduce
    if params == "auto":
        if reduce not in ("auto", "fp32"):
            rule = 'params = "auto" is bf16 on CUDA and fp32 on CPU; both are reduced in fp32'
            yield Problem("precision.reduce", reduce, rule, 'reduce = "fp32" or "auto", or name params too')
        return
    if params == "fp64" and reduce not in ("auto", "fp64"):
        rule = "fp64 parameters are reduced in fp64"
        yield Problem("precision.reduce", reduce, rule, 'reduce = "fp64" or "auto"')
    elif reduce != "auto" and BITS[reduce] < BITS[params]:
        rule = f"gradients are not summed in less than the parameters' dtype ({params})"
        yield Problem("precision.reduce", reduce, rule, f'reduce = "{params}" or wider, or "auto"')
    elif reduce == "fp64" and params != "fp64":
        rule = f"the master copy of {params} parameters is fp32, so an fp64 sum would be rounded to it"
        yield Problem("precision.reduce", reduce, rule, 'reduce = "fp32", or params = "fp64"')


def _data(job: Job) -> Iterator[Problem]:
    names = [source.name for source in job.data.sources]
    for name in sorted({name for name in names if names.count(name) > 1}):
        rule = "each source has a name of its own (state and metrics are kept by name)"
        yield Problem("data.sources", name, rule, "rename one of them")
    if job.train.val_every and not job.data.val_fraction:
        rule = "validation needs text held back (data.val_fraction > 0)"
        yield Problem("train.val_every", job.train.val_every, rule, "data.val_fraction = 0.05, or val_every = 0")


def _batch(job: Job) -> Iterator[Problem]:
    data_ranks, micro_batch = job.layout.dp_replicate * job.layout.dp_shard, job.train.micro_batch
    unit, batch = data_ranks * micro_batch, job.train.global_batch
    if batch % unit:
        rule = (
            f"data ranks × micro_batch = {data_ranks} × {micro_batch} = {unit} divides global_batch "
            f"({batch} % {unit} = {batch % unit})"
        )
        fixes = [f"global_batch = {around(batch, unit)}"]
        if batch % data_ranks == 0:
            fixes.append(f"micro_batch = {divisors_near(batch // data_ranks, micro_batch)}")
        yield Problem("train.global_batch", batch, rule, ", or ".join(fixes))
    chunk, tokens = job.train.loss_chunk, micro_batch * -(-job.data.seq_len // job.layout.cp)
    if isinstance(chunk, int) and chunk > tokens:
        rule = f"a chunk of the loss is a part of a micro-batch, which has {tokens} tokens on a rank"
        yield Problem("train.loss_chunk", chunk, rule, f'loss_chunk <= {tokens} (all at once), or "auto"')
