"""The list of parameters equals the torch model's, published sizes come out, and the preset is filled as meant."""

from __future__ import annotations

import pytest
import torch
from tests.models.helpers import GPT, LLAMA, QWEN
from tests.published import PUBLISHED

from heptad.config.presets import model_preset, model_presets
from heptad.config.schema import Job, LayoutSection, ModelSection
from heptad.errors import ConfigError
from heptad.models.build import build
from heptad.models.decoder import Decoder
from heptad.models.parallel import RowLinear
from heptad.models.resolve import derived, resolve
from heptad.models.spec import param_specs, unit_specs

VARIANTS = {"gpt": GPT, "llama": LLAMA, "qwen": QWEN, "layer with qk-norm": GPT.model_copy(update={"qk_norm": True})}


def section_of(name: str) -> ModelSection:
    return VARIANTS[name] if name in VARIANTS else ModelSection.model_validate(model_preset(name))


@pytest.mark.parametrize("name", [*model_presets(), *VARIANTS])
def test_specs_equal_the_torch_model(name: str) -> None:
    model = Decoder(section_of(name))
    listed = [(item.name, item.shape) for item in model.param_specs()]
    assert listed == [(key, tuple(param.shape)) for key, param in model.named_parameters()]
    assert all(param.is_meta for param in model.parameters())
    assert all(len(item.dims) == len(item.shape) for item in model.param_specs())


@pytest.mark.parametrize("name", [*model_presets(), *VARIANTS])
def test_units_partition_the_parameters(name: str) -> None:
    section = section_of(name)
    model, units = Decoder(section), unit_specs(section)
    assert len(units) == len(model.unit_list()) == section.layers + 2
    owned = [param for unit in units for param in unit.params]
    assert owned == [item.name for item in param_specs(section)]
    for unit, module in zip(units, model.unit_list(), strict=True):
        held = {id(param) for param in module.parameters()}
        assert held == {id(model.get_parameter(param)) for param in (*unit.params, *unit.borrowed)}
        assert set(unit.backward_reads) <= {*unit.params, *unit.borrowed}
    assert [key for key, _ in model.blocks[0].segments] == list(units[1].segments)
    assert units[0].backward_reads == ()
    assert ("embed.tokens.weight" in units[-1].backward_reads) == section.tied
    assert bool(units[-1].borrowed) == (section.tied or section.mtp_depth > 0)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_totals(name: str) -> None:
    assert sum(item.numel for item in param_specs(section_of(name))) == PUBLISHED[name]


def test_every_linear_has_a_role() -> None:
    model = Decoder(LLAMA)
    roles = {module.role for module in model.modules() if isinstance(module, torch.nn.Linear | RowLinear)}
    assert roles == {"q", "k", "v", "out", "gate", "up", "down", "head"}


def test_frozen_patterns() -> None:
    section = LLAMA.model_copy(update={"frozen": ("embed.*", "blocks.1.mlp.*")})
    model = Decoder(section)
    frozen = {item.name for item in param_specs(section) if not item.trainable}
    assert frozen == {key for key, param in model.named_parameters() if not param.requires_grad}
    assert "embed.tokens.weight" in frozen and "blocks.1.mlp.up.weight" in frozen and len(frozen) == 5


def test_c_019_tied_names_are_one_object_from_meta_to_memory() -> None:
    model = build(Job(model=GPT))
    assert model.module.head.out.weight is model.module.embed.tokens.weight
    model.materialise(1, torch.device("cpu"), torch.float64)
    head, table = model.module.head.out.weight, model.module.embed.tokens.weight
    assert head is table is model.params["embed.tokens.weight"] and not head.is_meta
    assert "head.out.weight" not in model.params
    real = Decoder(GPT, seed=1, device="cpu", dtype=torch.float64)
    assert all(torch.equal(param, real.get_parameter(name)) for name, param in model.params.items())


def test_resolve_fills_and_is_idempotent() -> None:
    job = Job(model=ModelSection(preset="llama3-8b", layers=3), layout=LayoutSection(dp_shard=4))
    resolved = resolve(job)
    assert (resolved.model.layers, resolved.model.width, resolved.model.kv_heads) == (3, 4096, 8)
    assert resolve(resolved) == resolved
    plain = resolve(Job(model=ModelSection(width=64, heads=4)))
    assert (plain.model.kv_heads, plain.model.head_dim) == (4, 16)


def test_resolve_reports_all_sizes_that_do_not_fit() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(Job(model=ModelSection(width=30, heads=4, kv_heads=3)))
    assert [problem.field for problem in caught.value.problems] == ["model.heads", "model.kv_heads"]
    with pytest.raises(ConfigError, match=r"model\.head_dim = 7"):
        resolve(Job(model=ModelSection(width=28, heads=4)))
    with pytest.raises(ConfigError, match="must match a parameter"):
        resolve(Job(model=ModelSection(frozen=("blocks.9.mlp.*",))))


@pytest.mark.parametrize("axis", ["cp", "tp", "pp"])
def test_c_123_tokens_count_once(axis: str) -> None:
    for degree in (1, 2):
        layout = LayoutSection(dp_shard=2, **{axis: degree})
        job = Job(model=LLAMA, layout=layout)
        job = job.model_copy(
            update={
                "train": job.train.model_copy(update={"global_batch": 8}),
                "data": job.data.model_copy(update={"seq_len": 16}),
            }
        )
        figures = derived(job)
        assert (figures["data_ranks"], figures["micro_batches"], figures["tokens_per_step"]) == (2, 4, 128)
