"""Every axis and option at once: one item says a level of each factor, `job_of` makes the job of it.

A factor that a job does not read (the schedule of a job without a pipeline) has the level "none" there, so that a pair
of levels always means something. Which items are jobs is asked of the project itself (`refusals`); no rule of it is
written down here. `python -m tests.verify.everything 'pp=2 schedule=zbv ...'` runs one item against one device and
prints the same job as a call of `heptad verify`. Read next: `cover.py` (few items with all pairs), `tally.py`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from typing import Any

from tests.verify.layouts import GPT
from tests.verify.several import Item

from heptad.axes.pipeline.generate import GENERATORS
from heptad.axes.pipeline.legal import check_job
from heptad.axes.program import check_program
from heptad.config.pipeline import STAGES_A_RANK, even_split
from heptad.config.schema import Job
from heptad.errors import ConfigError, Problem
from heptad.models.resolve import resolve

RANKS = 8
"""At most."""

NONE = "none"
ORDERS = {
    "data-outside": "pp-dp_replicate-dp_shard-cp-tp",
    "tensor-outside": "tp-pp-dp_replicate-dp_shard-cp",
    "context-outside": "cp-tp-pp-dp_replicate-dp_shard",
    "shards-inside": "pp-dp_replicate-tp-cp-dp_shard",
}
FROZEN: dict[str, tuple[str, ...]] = {
    NONE: (),
    "below": ("embed.*", "blocks.0.*"),
    "inside": ("*norm.weight", "*.down.weight"),
    "head": ("head.*",),
    "routers": ("*.router.*",),
    "experts": ("*.experts.*",),
}
LATENT = dict(
    kv_heads=None, head_dim=None, attention_kind="mla", q_lora_rank=11, kv_lora_rank=9, qk_nope_head_dim=5,
    qk_rope_head_dim=4, v_head_dim=3,
)  # fmt: skip
HEADS: dict[str, dict[str, Any]] = {
    "GQA": dict(kv_heads=12),
    "MHA": dict(kv_heads=24),
    "two-kv": dict(kv_heads=2),
    "MQA": dict(kv_heads=1),
    "MLA": LATENT,
}
BLOCKS: dict[str, dict[str, Any]] = {"llama": {}, "gpt": GPT | dict(attention_bias=True), "qwen3": dict(qk_norm=True)}
ROUTERS: dict[str, dict[str, Any]] = {
    "dense": {},
    "softmax": dict(experts=7, experts_per_token=2, expert_width=7),
    "deepseek": dict(
        experts=14, experts_per_token=3, expert_width=7, router="deepseek", router_groups=7, router_group_limit=3,
        routed_scale=1.7, bias_update_speed=0.05,
    ),
}  # fmt: skip
LOSSES: dict[str, dict[str, float]] = {
    "softmax": dict(aux_loss=0.3, z_loss=0.05, jitter=0.1),
    "deepseek": dict(balance_loss=0.1, z_loss=0.05),
}
RECOMPUTE: dict[str, dict[str, Any]] = {
    NONE: {},
    "full": dict(mode="full"),
    "segments": dict(mode="full", segment=2),
    "sqrt": dict(mode="full", segment="sqrt"),
    "layers": dict(mode="full", layers=(0, 2)),
    "selective": dict(mode="selective"),
}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": dict(lr=0.02),
    "sgd": dict(name="sgd", lr=0.02, momentum=0.9),
    "muon": dict(name="muon", lr=0.02, muon_lr=0.05),
}
FACTORS: dict[str, tuple[Any, ...]] = {
    "pp": (1, 2, 3, 4),
    "schedule": (NONE, *GENERATORS),
    "vpp": (NONE, "own", 1, 2),
    "stages": (NONE, "balanced", "uneven"),
    "microbatches": ("P", "2P", "2P+1"),
    "dp_replicate": (1, 2),
    "dp_shard": (1, 2),
    "zero": (0, 1, 2, 3),
    "engine": ("heptad", "fsdp2"),
    "tp": (1, 2, 4),
    "stream": (NONE, "whole", "cut", "kept"),
    "cp": (1, 2, 3, 4),
    "context": (NONE, "ring", "ulysses", "ring+ulysses", "gather"),
    "split": (NONE, "zigzag", "contiguous"),
    "ep": (1, 2, 4),
    "etp": (1, 2),
    "ep_inner": (NONE, 1, 2),
    "order": tuple(ORDERS),
    "block": tuple(BLOCKS),
    "heads": tuple(HEADS),
    "router": tuple(ROUTERS),
    "routing": (NONE, "dropless", "capacity"),
    "losses": (NONE, "off", "on"),
    "shared": (NONE, 0, 1),
    "first": (NONE, "routed", "dense"),
    "mtp": (0, 1),
    "tied": (False, True),
    "frozen": tuple(FROZEN),
    "dropout": (NONE, "features", "scores"),
    "attention": ("flash", "math"),
    "sight": ("packed", "causal", "window", "packed-window", "padded"),
    "length": (7, 5, 8, 13),
    "rows": (1, 2),
    "recompute": tuple(RECOMPUTE),
    "offload": (NONE, "cpu"),
    "loss_chunk": ("auto", 3),
    "bucket_mb": (0.0, 0.02, 1.0),
    "prefetch": (1, 0, 2),
    "reduce_grads": ("auto", "step", "microbatch"),
    "optimizer": tuple(OPTIMIZERS),
    "clip": (0.5, NONE),
}
"""Name -> levels; the first is the one that a line leaves out. These are the pairwise cover's."""

DEGREES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
WIDE: dict[str, tuple[Any, ...]] = (
    FACTORS
    | {name: tuple(range(1, RANKS + 1)) for name in DEGREES}
    | {"ep": (1, 2, 3, 4, 5, 6, 7, 8), "etp": (1, 2, 3, 4), "ep_inner": (NONE, 1, 2, 3, 4), "mtp": (0, 1, 2)}
    | {"vpp": (NONE, "own", 1, 2, 3), "shared": (NONE, 0, 1, 2)}
    | {"context": (*FACTORS["context"], "ring+ulysses3", "ring+ulysses4"), "rows": (1, 2, 3)}
)
"""With every degree: the sample's and the enumeration's."""

READ = {
    "schedule": lambda item: item["pp"] > 1,
    "vpp": lambda item: item["pp"] > 1,
    "stages": lambda item: item["pp"] > 1,
    "stream": lambda item: item["tp"] > 1,
    "context": lambda item: item["cp"] > 1,
    "split": lambda item: item["cp"] > 1 and item["context"] != "ulysses",
    "ep_inner": lambda item: item["ep"] > 1,
    "routing": lambda item: item["router"] != "dense",
    "losses": lambda item: item["router"] != "dense",
    "shared": lambda item: item["router"] != "dense",
    "first": lambda item: item["router"] != "dense",
}
"""When a factor that has a level "none" for it is read."""


def ranks_of(item: Item) -> int:
    """Number of ranks."""
    return math.prod(item[name] for name in DEGREES)


def well_named(item: Item) -> bool:
    """Whether what is not read, and only that, is called "none"."""
    return all((item[name] != NONE) == read(item) for name, read in READ.items())


def renamed(item: Item, kept: Mapping[str, Any], generator: random.Random | None = None) -> Item:
    """`item` with "none" where it belongs, but for `kept`; what is read now gets a level, the first one or drawn."""
    found = dict(item)
    for name, read in READ.items():
        if name not in kept and (found[name] != NONE) != read(found):
            levels = FACTORS[name][1:]
            found[name] = (generator.choice(levels) if generator else levels[0]) if read(found) else NONE
    return found


def neutral(**levels: Any) -> Item:
    """The first level of each factor, but for `levels`."""
    return renamed({name: found[0] for name, found in FACTORS.items()} | levels, levels)


def line_of(item: Item) -> str:
    """The levels that are not the first ones."""
    return " ".join(f"{name}={item[name]}" for name, levels in FACTORS.items() if item[name] != levels[0])


def item_of(line: str) -> Item:
    """Inverse of `line_of`."""
    said = dict(word.split("=") for word in line.split())
    assert said.keys() <= FACTORS.keys(), f"no such factor: {said.keys() - FACTORS.keys()}"
    levels = {name: {str(level): level for level in found} for name, found in WIDE.items()}
    return {name: levels[name][said[name]] if name in said else found[0] for name, found in FACTORS.items()}


def microbatches_of(item: Item) -> int:
    """On each data rank."""
    found: int = {"P": item["pp"], "2P": 2 * item["pp"], "2P+1": 2 * item["pp"] + 1}[item["microbatches"]]
    return found


def stages_of(item: Item) -> int:
    """Along the pipeline."""
    own = STAGES_A_RANK.get(item["schedule"], 1)
    found: int = item["pp"] * (own if item["vpp"] in (NONE, "own") else item["vpp"])
    return found


def layers_of(item: Item) -> int:
    """As few blocks as show everything: a stage each, three for segments, one with experts behind a dense one."""
    least = 3 if item["recompute"] in ("segments", "sqrt", "layers") else 2
    return max(stages_of(item), least) + (item["stages"] == "uneven")


def _model(item: Item) -> dict[str, Any]:
    router = item["router"]
    found = dict(
        layers=layers_of(item), width=13, heads=24, head_dim=4, mlp_width=23, vocab=29, max_positions=13, init_std=0.3,
        tied=item["tied"], mtp_depth=item["mtp"], frozen=FROZEN[item["frozen"]], attention=item["attention"],
        window=3 if "window" in item["sight"] else None,
    )  # fmt: skip
    found |= BLOCKS[item["block"]] | HEADS[item["heads"]] | ROUTERS[router] | dict(tied=item["tied"])
    if item["dropout"] != NONE:
        found |= dict(dropout=0.1, attention_dropout=0.1 if item["dropout"] == "scores" else 0.0)
    if router != "dense":
        found |= dict(mlp_bias=False, shared_experts=item["shared"], dense_layers=int(item["first"] == "dense"))
        found |= dict(capacity_factor=0.8 if item["routing"] == "capacity" else None)
        found |= LOSSES[router] if item["losses"] == "on" else {}
    return found


def _layout(item: Item) -> dict[str, Any]:
    names = (*DEGREES, "zero", "engine", "ep", "etp", "bucket_mb", "prefetch", "reduce_grads")
    found = {name: item[name] for name in names} | dict(order=ORDERS[item["order"]])
    if item["pp"] > 1:
        found |= dict(schedule=item["schedule"], vpp=None if item["vpp"] == "own" else item["vpp"])
    if item["stages"] == "uneven":
        first, *others = even_split(layers_of(item), stages_of(item))[::-1]
        found |= dict(layers_per_stage=(*others, first))
    if item["tp"] > 1:
        found |= dict(sequence_parallel=item["stream"] != "whole", keep_gathered=item["stream"] == "kept")
    if item["cp"] > 1:
        kind, _, inner = item["context"].partition("+ulysses")
        found |= (
            dict(context=f"{kind}+ulysses", cp_ulysses=int(inner or 2))
            if "+" in item["context"]
            else dict(context=kind)
        )
        found |= dict(context_split=item["split"]) if item["split"] != NONE else {}
    return found | (dict(ep_inner=item["ep_inner"]) if item["ep_inner"] not in (NONE, 1) else {})


def written(item: Item) -> Job:
    """The job as a file would say it, neither checked nor resolved."""
    rows, clip = item["rows"], None if item["clip"] == NONE else item["clip"]
    batch = item["dp_replicate"] * item["dp_shard"] * microbatches_of(item) * rows
    sections = {
        "model": _model(item),
        "layout": _layout(item),
        "precision": {"params": "fp64"},
        "recompute": RECOMPUTE[item["recompute"]],
        "offload": {"activations": item["offload"]},
        "optimizer": {"clip_norm": clip, "schedule": "linear"} | OPTIMIZERS[item["optimizer"]],
        "data": {"seq_len": item["length"], "pack": item["sight"] != "padded"},
        "train": {"global_batch": batch, "micro_batch": rows, "steps": 3, "loss_chunk": item["loss_chunk"]},
    }
    return Job.model_validate(sections)


def job_of(item: Item) -> Job:
    """The resolved job. Raises ConfigError."""
    job = written(item)
    check_job(job)
    resolved = resolve(job)
    check_program(resolved)
    return resolved


def refusals(item: Item) -> tuple[Problem, ...]:
    """Why the item is no job: every problem that the project names; empty where it is one."""
    try:
        job_of(item)
    except ConfigError as error:
        return error.problems
    return ()
