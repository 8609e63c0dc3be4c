"""What a tensor rank holds: owners tile every parameter, kv heads are whole, padding is at the end."""

from __future__ import annotations

import numpy as np
import pytest
from tests.models.helpers import GPT, LLAMA, QWEN

from heptad.config.schema import LayoutSection, ModelSection
from heptad.models.cut import cuts, expert_cut, family_cuts, family_of, local_specs
from heptad.models.spec import Init, ParamSpec, complete, param_specs

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


def stack(experts: int, inner: int, width: int = 3) -> ParamSpec:
    dims = ("experts", "expert_mlp", "width")
    return ParamSpec("e", (experts, inner, width), dims, "matrix", Init("normal", 0.1))


@pytest.mark.parametrize("etp", [1, 2, 3])
@pytest.mark.parametrize("ep", [1, 2, 4])
def test_expert_ranks_hold_experts_and_rows_of_them(ep: int, etp: int) -> None:
    """Read back through the runs, a rank's tensor is its experts and its rows, zeros where there are none."""
    spec = stack(7, 5)
    whole = np.arange(1, spec.numel + 1).reshape(spec.shape)
    here, rows = -(-7 // ep), -(-5 // etp)
    seen = np.zeros(spec.numel, dtype=int)
    for index in range(ep * etp):
        cut = expert_cut(spec, ep, etp, index)
        assert cut.local.shape == (here, rows, 3) and len(cut.runs) == (1 if etp == 1 else here)
        local = np.zeros(cut.local.numel, dtype=int)
        for run in cut.runs:
            local[run.start : run.start + run.numel] = whole.reshape(-1)[run.whole : run.whole + run.numel]
            seen[run.whole : run.whole + run.numel] += 1
        at_ep, at_etp = divmod(index, etp)
        padded = np.zeros((ep * here, etp * rows, 3), dtype=int)
        padded[:7, :5] = whole
        want = padded[at_ep * here : (at_ep + 1) * here, at_etp * rows : (at_etp + 1) * rows]
        assert np.array_equal(local.reshape(cut.local.shape), want)
    assert (seen == 1).all()


def test_a_part_of_a_run() -> None:
    run = expert_cut(stack(2, 5), 1, 2, 1).runs[1]  # rows 3 and 4 of the second expert
    assert (run.start, run.whole, run.numel) == (9, 24, 6)
    assert run.within(0, 9).numel == 0 and run.within(15, 18).numel == 0 and run.within(0, 18) == run
    part = run.within(10, 12)
    assert (part.start, part.whole, part.numel) == (10, 25, 2)


MOE = complete(
    ModelSection(layers=2, width=8, heads=2, mlp_width=5, vocab=7, experts=5, expert_width=3, dense_layers=1)
)


def test_families_are_cut_by_axes_of_their_own() -> None:
    specs = param_specs(MOE)
    held = family_cuts(specs, MOE, LayoutSection(dp_shard=2, tp=2, ep=2, etp=2))
    assert len(held["dense"]) == 2 and len(held["expert"]) == 4
    stacks = [spec.name for spec in specs if family_of(spec) == "expert"]
    assert stacks == [f"blocks.1.mlp.experts.{part}.weight" for part in ("gate", "up", "down")]
    assert set(held["expert"][0]) == set(stacks)
    assert set(held["dense"][0]) == {spec.name for spec in specs} - set(stacks)
    shapes = {spec.name: spec.shape for spec in local_specs(held, specs)}
    assert shapes[stacks[0]] == (3, 2, 8) and shapes["blocks.0.mlp.up.weight"] == (3, 8)
    router = held["dense"][0]["blocks.1.mlp.router.gate.weight"]
    assert router.summed == "tensor" and router.local.shape == (5, 8)  # each tensor rank routes tokens of its own
