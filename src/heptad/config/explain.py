"""What pydantic found wrong in a job file, said as field, value, rule, fix.

A wrong key is explained by where it would be right: the nearest key of its section, the section that has it, or the key
that another system's word stands for. Read next: `load.py`, which calls this.
"""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from heptad.config.schema import Job, RopeScaling, Section, SourceSection
from heptad.config.write import toml_value
from heptad.errors import Problem, nearest

OTHER_WORDS = {
    "learning_rate": "optimizer.lr",
    "min_lr": "optimizer.min_lr_ratio",
    "max_norm": "optimizer.clip_norm",
    "max_grad_norm": "optimizer.clip_norm",
    "grad_clip": "optimizer.clip_norm",
    "gradient_clipping": "optimizer.clip_norm",
    "lr_scheduler": "optimizer.schedule",
    "batch_size": "train.global_batch",
    "train_batch_size": "train.global_batch",
    "micro_batch_size": "train.micro_batch",
    "gradient_accumulation_steps": "train.global_batch",
    "max_steps": "train.steps",
    "sequence_length": "data.seq_len",
    "max_length": "data.seq_len",
    "hidden_size": "model.width",
    "num_layers": "model.layers",
    "num_hidden_layers": "model.layers",
    "num_attention_heads": "model.heads",
    "num_key_value_heads": "model.kv_heads",
    "intermediate_size": "model.mlp_width",
    "vocab_size": "model.vocab",
    "max_position_embeddings": "model.max_positions",
    "rms_norm_eps": "model.norm_eps",
    "tie_word_embeddings": "model.tied",
    "attn_implementation": "model.attention",
    "num_experts": "model.experts",
    "num_local_experts": "model.experts",
    "n_routed_experts": "model.experts",
    "num_experts_per_tok": "model.experts_per_token",
    "n_shared_experts": "model.shared_experts",
    "moe_intermediate_size": "model.expert_width",
    "first_k_dense_replace": "model.dense_layers",
    "n_group": "model.router_groups",
    "topk_group": "model.router_group_limit",
    "norm_topk_prob": "model.normalise_top_k",
    "routed_scaling_factor": "model.routed_scale",
    "router_aux_loss_coef": "model.aux_loss",
    "router_jitter_noise": "model.jitter",
    "num_nextn_predict_layers": "model.mtp_depth",
    "tensor_parallel": "layout.tp",
    "tensor_model_parallel_size": "layout.tp",
    "pipeline_parallel": "layout.pp",
    "context_parallel": "layout.cp",
    "expert_parallel": "layout.ep",
    "data_parallel": "layout.dp_shard",
    "activation_checkpointing": "recompute.mode",
    "gradient_checkpointing": "recompute.mode",
    "recompute_granularity": "recompute.mode",
    "recompute_num_layers": "recompute.segment",
    "torch_compile": "train.compile",
    "zero_stage": "layout.zero",
    "save_every": "checkpoint.every",
    "dtype": "precision.params",
}
"""Words of other systems -> the option that does it here."""

_KINDS = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "text in quotes",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "dict_type": "a table",
    "model_type": "a table",
    "model_attributes_type": "a table",
}


def explain(error: ValidationError, values: Mapping[str, object]) -> list[Problem]:
    """One problem a field, in the file's order; `values` is the raw file, to show what stood there."""
    by_field: dict[str, list[ErrorDetails]] = {}
    for item in error.errors(include_url=False):
        by_field.setdefault(_field(item["loc"], values), []).append(item)
    return [_problem(field, items) for field, items in by_field.items()]


def _problem(field: str, items: list[ErrorDetails]) -> Problem:
    value = items[0]["input"]
    kind = items[0]["type"]
    if kind == "extra_forbidden":
        return _unknown(field, value)
    if kind == "missing" and isinstance(value, Mapping):
        return Problem(field, "(absent)", "this key must be given here", f"add {field.rpartition('.')[2]} = ...")
    rules = [_rule(item) for item in items]
    rule = f"{field} is {' or '.join(dict.fromkeys(rules))}"
    if kind in _KINDS and kind != "finite_number" and all(item["type"] in (*_KINDS, "literal_error") for item in items):
        rule += f", but this is {_kind(value)}"
    return Problem(field, value, rule, _fix(field, value, items))


def _rule(item: ErrorDetails) -> str:
    context = item.get("ctx", {})
    match item["type"]:
        case "greater_than_equal":
            return f"at least {_number(context['ge'])}"
        case "greater_than":
            return f"greater than {_number(context['gt'])}"
        case "less_than_equal":
            return f"at most {_number(context['le'])}"
        case "less_than":
            return f"less than {_number(context['lt'])}"
        case "literal_error":
            return f"one of {context['expected']}"
        case "string_too_short":
            return "text that is not empty"
        case "string_too_long":
            return f"text of at most {context['max_length']} characters"
        case "string_pattern_mismatch":
            return "letters, digits, '.', '_' and '-', the first a letter or a digit"
        case "too_long" | "too_short" | "missing":
            return "a list of the right length"
        case "value_error":
            return str(context["error"])
        case other:
            return _KINDS.get(other, item["msg"])


def _fix(field: str, value: object, items: list[ErrorDetails]) -> str:
    key = field.rpartition(".")[2]
    if isinstance(value, str):
        for item in items:
            if item["type"] == "literal_error":
                close = nearest(value, item["ctx"]["expected"].replace("'", "").replace(" or ", ", ").split(", "))
                return f'did you mean "{close}"?' if close else _example(field)
        if any(item["type"] in ("int_type", "float_type", "bool_type") for item in items):
            return f"write {key} = {value} without quotes" if _looks_plain(value) else _example(field)
    elif any(item["type"] == "string_type" for item in items):
        return f'write {key} = "{value}" (with --set: {field}=\'"{value}"\')'
    return _example(field)


def _example(field: str) -> str:
    """The default as an example of a legal value."""
    where, _, key = field.rpartition(".")
    section = _section(where)
    infos = {info.alias or name: info for name, info in section.model_fields.items()} if section else {}
    if key not in infos or infos[key].is_required() or infos[key].default is None:
        return f"give {key} such a value"
    return f"give {key} such a value; the default is {toml_value(infos[key].default)}"


def _unknown(field: str, value: object) -> Problem:
    """A key that its section does not have: the nearest here, else the section that has it, else what there is."""
    where, _, key = field.rpartition(".")
    if not where:
        return _unknown_top(key, value)
    section = _section(where)
    here = [info.alias or name for name, info in section.model_fields.items()] if section else []
    plain = key.replace("-", "_")
    owners = [path for path in _paths() if path.rpartition(".")[2] == plain]
    if plain in here:
        fix = f"write {plain}: keys have underscores, no hyphens"
    elif owners:
        fix = f"it stands in another section: {' or '.join(owners)}"
    elif word := nearest(plain, [*OTHER_WORDS, *here]):
        fix = f"did you mean {OTHER_WORDS.get(word, f'{where}.{word}')}?"
    elif close := nearest(plain, [path.rpartition(".")[2] for path in _paths()]):
        fix = f"did you mean {' or '.join(path for path in _paths() if path.rpartition('.')[2] == close)}?"
    else:
        fix = f"remove it; [{where}] has {', '.join(here)}"
    return Problem(field, value, f"[{where}] has no key {key!r}", fix)


def _unknown_top(key: str, value: object) -> Problem:
    sections = list(Job.model_fields)
    plain = key.replace("-", "_")
    owners = [path for path in _paths() if path.rpartition(".")[2] == plain]
    word = nearest(plain, [*sections, *OTHER_WORDS])
    if owners:
        fix = f"it stands in a section: {' or '.join(owners)}"
    elif word is not None:
        fix = f"did you mean {OTHER_WORDS.get(word, f'[{word}]')}?"
    else:
        fix = "move it into its section, or remove it"
    return Problem(key, value, f"a job has the sections {', '.join(sections)} and nothing beside them", fix)


def _paths() -> list[str]:
    """Dotted path of every option."""
    return [
        f"{section}.{info.alias or name}"
        for section, outer in Job.model_fields.items()
        if isinstance(outer.annotation, type) and issubclass(outer.annotation, BaseModel)
        for name, info in outer.annotation.model_fields.items()
    ]


def _section(where: str) -> type[Section] | None:
    nested: dict[str, type[Section]] = {"model.rope_scaling": RopeScaling}
    if where in nested:
        return nested[where]
    if where.startswith("data.sources"):
        return SourceSection
    field = Job.model_fields.get(where)
    return field.annotation if field is not None and isinstance(field.annotation, type) else None


def _field(loc: tuple[int | str, ...], values: object) -> str:
    """The part of pydantic's location that stands in the file: without the tags of unions and list lengths."""
    path = []
    for part in loc:
        if isinstance(values, Mapping):
            path.append(str(part))
            values = values.get(part) if isinstance(part, str) else None
        elif isinstance(values, list | tuple) and isinstance(part, int) and part < len(values):
            path[-1] += f"[{part}]"
            values = values[part]
        else:
            break
    return ".".join(path)


def _kind(value: object) -> str:
    names = {bool: "a truth value", int: "a whole number", float: "a number", str: "text", dict: "a table"}
    return names.get(type(value), "a list" if isinstance(value, list | tuple) else f"a {type(value).__name__}")


def _number(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _looks_plain(text: str) -> bool:
    return text in ("true", "false") or text.replace(".", "", 1).replace("-", "", 1).replace("e", "", 1).isdigit()
