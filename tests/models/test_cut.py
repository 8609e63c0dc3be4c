"""What a tensor rank holds: owners tile every parameter, kv heads are whole, padding is at the end."""

from __future__ import annotations

import pytest
from tests.models.helpers import GPT, LLAMA, QWEN

from heptad.models.cut import cuts
from heptad.models.spec import complete, param_specs

SECTIONS = {"gpt": GPT, "llama": LLAMA, "qwen": QWEN}


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("name", SECTIONS)
def test_owners_tile_every_parameter(name: str, tp: int, sequence: bool) -> None:
    section = complete(SECTIONS[name].model_copy(update={"heads": 4, "kv_heads": 2, "head_dim": 6}))
    specs = param_specs(section)
    held = cuts(specs, section, tp, sequence)
    for spec in specs:
        mine = [ranks[spec.name] for ranks in held]
        at = 0
        for cut in mine:
            if cut.owner and cut.start < cut.stop:
                assert cut.start == at, spec.name
                at = cut.stop
            assert cut.local.shape[1:] == spec.shape[1:] and cut.stop - cut.start <= cut.local.numel
            assert cut.local.shape == mine[0].local.shape, "ranks have equal buffers"
        assert at == spec.numel, spec.name
        assert sum(cut.owner for cut in mine) * mine[0].copies == tp
        rows = spec.shape[0]
        if spec.dims[0] in ("mlp", "vocab"):
            assert mine[0].local.shape[0] == -(-rows // tp)


def test_gradients_that_are_a_part_are_summed_and_no_others() -> None:
    section = complete(QWEN.model_copy(update={"heads": 4, "kv_heads": 2, "head_dim": 6, "norm": "layer"}))
    specs = param_specs(section)
    for sequence in (False, True):
        held = cuts(specs, section, 4, sequence)[0]
        for spec in specs:
            kind = spec.name.rpartition(".")[0].rpartition(".")[2]
            expected = "none"
            if kind in ("q_norm", "k_norm") or (kind == "norm" and sequence):
                expected = "tensor"
            elif kind in ("k", "v"):
                expected = "copies"
            assert held[spec.name].summed == expected, spec.name


def test_one_rank_holds_everything_as_it_is() -> None:
    for spec in param_specs(GPT):
        (held,) = cuts([spec], GPT, 1, False)
        cut = held[spec.name]
        assert cut.local is spec and (cut.start, cut.stop, cut.owner, cut.summed) == (0, spec.numel, True, "none")
