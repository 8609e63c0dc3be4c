"""Custom models: layers tapped in place, loose parameters found, specs derived, bad classes refused with a reason."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tests.models.helpers import packed, plain_backward, split_backward, worst
from torch import nn

from heptad.config.schema import Job, ModelSection
from heptad.errors import ConfigError
from heptad.models import layers, norms
from heptad.models.batch import Batch
from heptad.models.build import build, loose_params, specs_of, tap_linears, tapped_modules, wrap
from heptad.models.decoder import Head, loss_sum

EXAMPLE = ModelSection(class_="examples.custom_model:TokenShift", layers=3, width=13, mlp_width=29, vocab=53)


def test_layers_are_tapped_in_place_and_variants_are_not() -> None:
    plain = nn.ModuleList(
        [nn.Linear(3, 5), nn.Embedding(7, 3), nn.LayerNorm(3), nn.LayerNorm(3, bias=False), nn.RMSNorm(3, eps=1e-6)]
    )
    special = nn.ModuleList(
        [
            nn.Bilinear(3, 5, 7),
            nn.Embedding(7, 3, padding_idx=1),
            nn.Embedding(7, 3, max_norm=1.0),
            nn.LayerNorm((3, 5)),
            nn.LayerNorm(3, elementwise_affine=False),
            nn.RMSNorm(3),
            nn.MultiheadAttention(4, 2),
        ]
    )
    before = dict(plain.named_parameters())
    tap_linears(plain)
    tap_linears(special)
    kinds = [layers.Linear, layers.Embedding, norms.LayerNorm, norms.LayerNorm, norms.RMSNorm]
    assert [type(child) for child in plain] == kinds and len(tapped_modules(plain)) == 5
    assert all(param is before[key] for key, param in plain.named_parameters())
    assert tapped_modules(special) == []


def test_the_example_is_a_model_like_any_other() -> None:
    model = build(Job(model=EXAMPLE))
    assert [item.name for item in model.specs] == [key for key, _ in model.module.named_parameters()]
    assert {item.name for item in model.specs if not item.trainable} == {"tables.places.weight"}
    assert [unit.name for unit in model.unit_specs] == ["tables", "shifts.0", "shifts.1", "shifts.2", "predict"]
    assert all(unit.backward_reads == unit.params and not unit.borrowed for unit in model.unit_specs)
    roles = {item.name: item.role for item in model.specs}
    assert roles["tables.tokens.weight"] == "embedding" and roles["shifts.0.norm.weight"] == "norm"
    assert roles["shifts.0.up.weight"] == "matrix" and roles["shifts.0.up.bias"] == "bias"
    model.materialise(4, torch.device("cpu"), torch.float64)
    loose = [loose_params(unit) for unit in model.units]
    batch = packed([[9, 4]])
    expected = plain_backward(model.module, model.loss(batch))
    _, sink = split_backward(model.units, batch, loose)
    assert (
        worst({key: sink.grads[param] for key, param in model.params.items() if param in sink.grads}, expected) < 1e-12
    )
    assert "tables.places.weight" not in expected


def test_frozen_patterns_reach_custom_models() -> None:
    model = build(Job(model=EXAMPLE.model_copy(update={"frozen": ("shifts.0.*",)})))
    assert not any(param.requires_grad for key, param in model.params.items() if key.startswith("shifts.0."))
    assert model.params["shifts.1.gain"].requires_grad


class Shared(nn.Module):
    def __init__(self, section: ModelSection) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Embedding(5, 3), nn.Linear(3, 3), nn.Linear(3, 5)
        self.last.weight = self.first.weight

    def units(self) -> list[nn.Module]:
        return [self.first, self.middle, self.middle, self.last]


def test_shared_modules_are_owned_once() -> None:
    with torch.device("meta"):
        model = wrap(Shared(ModelSection()), ModelSection())
    specs = {unit.name: unit for unit in model.unit_specs}
    assert list(specs) == ["first", "middle", "middle#2", "last"]
    assert specs["middle"].params == ("middle.weight", "middle.bias") == specs["middle#2"].borrowed
    assert specs["last"].borrowed == ("first.weight",) and specs["last"].params == ("last.bias",)
    assert specs["middle#2"].params == ()
    model.materialise(0, torch.device("cpu"), torch.float32)
    assert model.module.last.weight is model.module.first.weight is model.params["first.weight"]


class TiedByHand(nn.Module):
    """The usual way to tie: the head holds the embedding and multiplies by its weight, without calling it."""

    class Head(nn.Module):
        def __init__(self, tokens: nn.Embedding) -> None:
            super().__init__()
            self.tokens = tokens

        def forward(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
            return loss_sum(F.linear(x, self.tokens.weight), batch.labels)

    class Start(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(53, 7)

        def forward(self, x: None, batch: Batch) -> torch.Tensor:
            return torch.tanh(self.tokens(batch.ids))

    def __init__(self, section: ModelSection) -> None:
        super().__init__()
        self.start = TiedByHand.Start()
        self.head = TiedByHand.Head(self.start.tokens)

    def units(self) -> list[nn.Module]:
        return [self.start, self.head]


def test_a_weight_used_by_hand_loses_no_gradient() -> None:
    with torch.device("meta"):
        model = wrap(TiedByHand(ModelSection()), ModelSection())
    assert model.unit_specs[1].borrowed == ("start.tokens.weight",) == model.unit_specs[1].backward_reads
    model.materialise(4, torch.device("cpu"), torch.float64)
    batch = packed([[9, 4]])
    expected = plain_backward(model.module, model.loss(batch))
    _, sink = split_backward(model.units, batch, [loose_params(unit) for unit in model.units])
    assert worst({"start.tokens.weight": sink.grads[model.params["start.tokens.weight"]]}, expected) < 1e-12


class Buffered(Shared):
    def __init__(self, section: ModelSection) -> None:
        super().__init__(section)
        self.register_buffer("table", torch.ones(3))


class Unlisted(Shared):
    def units(self) -> list[nn.Module]:
        return [self.first, self.last]


class Misnamed(Shared):
    def param_specs(self) -> list[object]:
        return list(specs_of(self))[1:]


class NoUnits(nn.Linear):
    def __init__(self, section: ModelSection) -> None:
        super().__init__(3, 5)


@pytest.mark.parametrize(
    ("kind", "rule"),
    [
        (Buffered, "must hold no buffers"),
        (Unlisted, "'middle.bias' does not|'middle.weight' does not"),
        (Misnamed, "'first.weight' differs"),
        (NoUnits, r"must have units\(\)"),
    ],
)
def test_a_class_that_cannot_be_used_is_refused(kind: type[nn.Module], rule: str) -> None:
    with torch.device("meta"):
        module = kind(ModelSection())
    with pytest.raises(ConfigError, match=rule):
        wrap(module, ModelSection())


@pytest.mark.parametrize(
    ("pattern", "rule"), [("first.weights", "each pattern must match"), ("*", "something is left to train")]
)
def test_frozen_patterns_of_a_custom_model_name_something_and_leave_something(pattern: str, rule: str) -> None:
    with torch.device("meta"):
        module = Shared(ModelSection())
    with pytest.raises(ConfigError, match=rule):
        wrap(module, ModelSection(frozen=(pattern,)))


@pytest.mark.parametrize(
    ("path", "rule"),
    [
        ("nowhere.at_all:Model", "can be imported"),
        ("heptad.models.decoder:Nothing", "can be imported"),
        ("heptad.models.decoder", "can be imported"),
        (":", "can be imported"),
        ("heptad.models.decoder:loss_sum", "subclass"),
    ],
)
def test_a_path_that_names_no_model_is_refused(path: str, rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        build(Job(model=ModelSection(class_=path)))


def test_the_heads_loss_is_chunked_as_the_job_says_and_a_class_of_its_own_refuses_it() -> None:
    job = Job.model_validate({"train": {"loss_chunk": 7}})
    head = build(job).units[-1]
    assert isinstance(head, Head) and head.loss_chunk == 7
    assert isinstance(build(Job()).units[-1], Head)
    with pytest.raises(ConfigError, match="computes its own loss"):
        build(job.model_copy(update={"model": EXAMPLE}))
    build(Job(model=EXAMPLE))


class Other(nn.Module):
    """A class whose inside is not known."""

    def __init__(self, section: ModelSection) -> None:
        super().__init__()
        self.first, self.last = nn.Embedding(section.vocab, section.width), nn.Linear(section.width, section.vocab)

    def units(self) -> list[nn.Module]:
        return [self.first, self.last]


@pytest.mark.parametrize("axis", ["tp", "pp", "cp"])
def test_a_class_whose_inside_is_not_known_is_not_cut(axis: str) -> None:
    job = Job.model_validate({"model": {"class": f"{__name__}:Other"}, "layout": {axis: 2}})
    with pytest.raises(ConfigError, match=rf"layout.{axis} = 2\n.*it is not known"):
        build(job)
