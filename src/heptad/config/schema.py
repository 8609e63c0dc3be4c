"""The job file as frozen types: one class a section, one field an option, every default in sight.

Names and sections are the contract of the design; unknown keys are refused with the nearest name (`load.py`), rules
that need more than one field stand in `check.py`. This module never imports torch.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator


def _no_bool(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("one of 0, 1, 2 or 3, not true or false")
    return value


Stage = Annotated[Literal[0, 1, 2, 3], BeforeValidator(_no_bool)]
DtypeName = Literal["auto", "fp64", "fp32", "bf16"]
Beta = Annotated[float, Field(ge=0, lt=1)]
OptimizerName = Literal["adamw", "sgd", "muon"]
RoleName = Literal["matrix", "embedding", "head", "norm", "bias"]


class Section(BaseModel):
    """Base of all sections: immutable, no unknown keys, no silent conversion between kinds of value.

    TOML has no null: "none" stands for it in every optional field that is not text (`clip_norm = "none"`).
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, populate_by_name=True, allow_inf_nan=False, protected_namespaces=()
    )

    @model_validator(mode="before")
    @classmethod
    def _none_is_a_word(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {key: None if value == "none" and key in cls.nullable() else value for key, value in values.items()}

    @classmethod
    def nullable(cls) -> frozenset[str]:
        """Names of the fields in which "none" means no value."""
        kinds = {name: get_args(field.annotation) for name, field in cls.model_fields.items()}
        return frozenset(name for name, args in kinds.items() if type(None) in args and str not in args)


class RopeScaling(Section):
    """Stretching of rotary frequencies beyond the trained length: Llama 3 (its code) or YaRN (arXiv 2309.00071)."""

    kind: Literal["llama3", "yarn"]
    factor: float = Field(gt=0)
    original_max_positions: int = Field(gt=0)
    low_freq_factor: float = Field(default=1.0, gt=0)
    high_freq_factor: float = Field(default=4.0, gt=0)
    beta_fast: float = Field(default=32.0, gt=0)
    beta_slow: float = Field(default=1.0, gt=0)
    attention_factor: float | None = Field(default=None, gt=0)


class ModelSection(Section):
    """A decoder. `preset` fills every field that is not given; `class` names a model of the user's own."""

    preset: str | None = None
    class_: str | None = Field(default=None, alias="class")
    options: dict[str, int | float | str | bool] = {}
    layers: int = Field(default=2, ge=1)
    width: int = Field(default=64, ge=1)
    heads: int = Field(default=4, ge=1)
    kv_heads: int | None = Field(default=None, ge=1)
    head_dim: int | None = Field(default=None, ge=1)
    mlp_width: int = Field(default=256, ge=1)
    vocab: int = Field(default=257, ge=2)
    max_positions: int = Field(default=2048, ge=1)
    norm: Literal["rms", "layer"] = "rms"
    norm_eps: float = Field(default=1e-5, gt=0)
    mlp: Literal["gated", "plain"] = "gated"
    activation: Literal["silu", "gelu", "gelu_tanh"] = "silu"
    positions: Literal["rotary", "learned"] = "rotary"
    rope_theta: float = Field(default=10000.0, gt=0)
    rope_scaling: RopeScaling | None = None
    qk_norm: bool = False
    qkv_bias: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    tied: bool = False
    dropout: float = Field(default=0.0, ge=0, lt=1)
    attention_dropout: float = Field(default=0.0, ge=0, lt=1)
    init_std: float = Field(default=0.02, gt=0)
    attention: Literal["auto", "flash", "math"] = "auto"
    window: int | None = Field(default=None, ge=1)
    attention_kind: Literal["gqa", "mla"] = "gqa"
    q_lora_rank: int | None = Field(default=None, ge=1)
    kv_lora_rank: int | None = Field(default=None, ge=1)
    qk_nope_head_dim: int | None = Field(default=None, ge=1)
    qk_rope_head_dim: int | None = Field(default=None, ge=1)
    v_head_dim: int | None = Field(default=None, ge=1)
    experts: int | None = Field(default=None, ge=2)
    experts_per_token: int = Field(default=2, ge=1)
    shared_experts: int = Field(default=0, ge=0)
    expert_width: int | None = Field(default=None, ge=1)
    dense_layers: int = Field(default=0, ge=0)
    router: Literal["softmax", "deepseek"] = "softmax"
    router_groups: int = Field(default=1, ge=1)
    router_group_limit: int | None = Field(default=None, ge=1)
    normalise_top_k: bool = True
    routed_scale: float = Field(default=1.0, gt=0)
    capacity_factor: float | None = Field(default=None, gt=0)
    aux_loss: float = Field(default=0.0, ge=0)
    balance_loss: float = Field(default=0.0, ge=0)
    z_loss: float = Field(default=0.0, ge=0)
    jitter: float = Field(default=0.0, ge=0, lt=1)
    bias_update_speed: float = Field(default=0.0, ge=0)
    mtp_depth: int = Field(default=0, ge=0)
    mtp_weight: float = Field(default=0.3, gt=0)
    frozen: tuple[str, ...] = ()


class ClusterSection(Section):
    """The machines: a preset of the catalogue ("cpu", "h100", …) or a measured cluster file."""

    preset: str | None = None
    file: str | None = None
    nodes: int = Field(default=1, ge=1)
    devices_per_node: int | None = Field(default=None, ge=1)


class LayoutSection(Section):
    """Degrees of the axes and how the data axis works. `ep` and `etp` are carved from dp_shard × cp × tp."""

    pp: int = Field(default=1, ge=1)
    dp_replicate: int = Field(default=1, ge=1)
    dp_shard: int = Field(default=1, ge=1)
    cp: int = Field(default=1, ge=1)
    tp: int = Field(default=1, ge=1)
    ep: int = Field(default=1, ge=1)
    etp: int = Field(default=1, ge=1)
    ep_inner: int = Field(default=1, ge=1)
    vpp: int | None = Field(default=None, ge=1)
    layers_per_stage: tuple[Annotated[int, Field(ge=1)], ...] = ()
    order: str = "pp-dp_replicate-dp_shard-cp-tp"
    zero: Stage = 3
    engine: Literal["heptad", "fsdp2"] = "heptad"
    schedule: str = "1f1b"
    context: Literal["ring", "ulysses", "ring+ulysses", "gather"] = "ring"
    cp_ulysses: int = Field(default=1, ge=1)
    context_split: Literal["zigzag", "contiguous"] = "zigzag"
    sequence_parallel: bool = False
    keep_gathered: bool = False
    bucket_mb: float = Field(default=1.0, ge=0)
    prefetch: int = Field(default=1, ge=0)
    reduce_grads: Literal["auto", "step", "microbatch"] = "auto"


class RecomputeSection(Section):
    """Which forward is run again in the backward instead of being kept; `layers` empty means every block."""

    mode: Literal["none", "selective", "full"] = "none"
    segment: Annotated[int, Field(ge=1)] | Literal["sqrt"] = 1
    layers: tuple[Annotated[int, Field(ge=0)], ...] = ()


class PrecisionSection(Section):
    """`params`: dtype that computes and is gathered; `reduce`: dtype in which gradients are summed and kept.

    "auto" is bf16 with fp32 reduction on CUDA, fp32 on CPU. The master copy and the moments are fp32 (fp64 for fp64).
    """

    params: DtypeName = "auto"
    reduce: DtypeName = "auto"
    float8: bool = False


class ZeroppSection(Section):
    """ZeRO++ (arXiv 2306.10209)."""

    qwz: bool = False
    hpz: bool = False
    qgz: bool = False


class OffloadSection(Section):
    """What leaves the device between uses."""

    optimizer: Literal["none", "cpu", "nvme"] = "none"
    params: Literal["none", "cpu", "nvme"] = "none"
    activations: Literal["none", "cpu", "nvme"] = "none"


class OptimizerSection(Section):
    """`name` updates every role; `roles` overrides by role, e.g. {matrix = "muon"}.

    Learning rate: step i of a warm-up of w steps has i/w of `lr`.
    """

    name: OptimizerName = "adamw"
    roles: dict[RoleName, OptimizerName] = {}
    lr: float = Field(default=3e-4, gt=0)
    muon_lr: float = Field(default=0.02, gt=0)
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    eps: float = Field(default=1e-8, gt=0)
    momentum: float = Field(default=0.0, ge=0, lt=1)
    muon_momentum: float = Field(default=0.95, ge=0, lt=1)
    weight_decay: float = Field(default=0.1, ge=0)
    decay_roles: tuple[RoleName, ...] = ("matrix", "embedding", "head")
    clip_norm: float | None = Field(default=1.0, gt=0)
    nonfinite: Literal["skip", "raise"] = "skip"
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    warmup_steps: int = Field(default=0, ge=0)
    decay_steps: int | None = Field(default=None, ge=0)
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1)


class SourceSection(Section):
    """One source of a mixture: `weight` is its share of the samples."""

    name: str = Field(min_length=1)
    path: str = Field(min_length=1)
    weight: float = Field(default=1.0, gt=0)


class DataSection(Section):
    """The corpus. Without `path` and `sources`: the source files of the Python standard library."""

    path: str | None = Field(default=None, min_length=1)
    sources: tuple[SourceSection, ...] = ()
    tokenizer: str | None = Field(default=None, min_length=1)
    seq_len: int = Field(default=128, ge=1)
    text_field: str = "text"
    prompt_field: str | None = None
    pack: bool = True
    shuffle: bool = True
    seed: int = Field(default=0, ge=0)
    val_fraction: float = Field(default=0.05, ge=0, lt=1)
    max_bytes: int | None = Field(default=None, ge=1)
    cache_dir: str | None = Field(default=None, min_length=1)


class TrainSection(Section):
    """One step reads `global_batch` sequences in micro-batches of `micro_batch` on each data rank."""

    global_batch: int = Field(default=8, ge=1)
    micro_batch: int = Field(default=1, ge=1)
    steps: int = Field(default=10, ge=1)
    seed: int = Field(default=0, ge=0)
    deterministic: bool = False
    compile: bool = False
    loss_chunk: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    val_every: int = Field(default=0, ge=0)
    val_batches: int = Field(default=8, ge=1)
    sample_tokens: int = Field(default=64, ge=0)


class CheckpointSection(Section):
    """`resume`: "auto" takes the newest complete step of this run or starts fresh; "must" refuses to start fresh."""

    dir: str | None = Field(default=None, min_length=1)
    every: int = Field(default=0, ge=0)
    keep: int = Field(default=2, ge=1)
    async_: bool = Field(default=False, alias="async")
    resume: Literal["auto", "must", "never"] = "auto"


class LogSection(Section):
    """Where the run folder is (`dir`/`name`), what is written into it. The name becomes part of file names."""

    dir: str = Field(default="runs", min_length=1)
    name: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=200)
    tensorboard: bool = True
    every: int = Field(default=1, ge=1)


class Job(Section):
    """A whole training job. Frozen; `load.py` reads it, `check.py` proves it, the run folder keeps it resolved."""

    model: ModelSection = ModelSection()
    cluster: ClusterSection = ClusterSection()
    layout: LayoutSection = LayoutSection()
    recompute: RecomputeSection = RecomputeSection()
    precision: PrecisionSection = PrecisionSection()
    zeropp: ZeroppSection = ZeroppSection()
    offload: OffloadSection = OffloadSection()
    optimizer: OptimizerSection = OptimizerSection()
    data: DataSection = DataSection()
    train: TrainSection = TrainSection()
    checkpoint: CheckpointSection = CheckpointSection()
    log: LogSection = LogSection()
