"""Jobs with expert axes made small, and their axes turned off one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from tests.verify.layouts import compared, layout_job
from tests.verify.test_moe_layouts import SOFTMAX
from torch import Tensor

from heptad.axes.expert import transfer
from heptad.config.check import check
from heptad.config.load import load
from heptad.config.schema import Job
from heptad.config.sizes import holds_rows
from heptad.mesh.collectives import Group, Work
from heptad.models.resolve import resolve
from heptad.verify.localise import guilty, present, without
from heptad.verify.shrink import shrink

LAYOUTS: dict[str, dict[str, int]] = {
    "ep 2": dict(ep=2),
    "ep 4 in two nodes, etp 2": dict(ep=4, ep_inner=2, etp=2),
    "ep 8": dict(ep=8),
    "etp 8": dict(etp=8),
    "tp inside": dict(ep=4, tp=2),
}


def moe(preset: str, **layout: int) -> Job:
    sets = [f"model.preset={preset}", "layout.dp_shard=8", "train.global_batch=48"]
    return resolve(load("debug-moe", sets + [f"layout.{name}={value}" for name, value in layout.items()]))


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "tp inside"])
@pytest.mark.parametrize("preset", ["deepseek-v3", "qwen3-30b-a3b", "mixtral-8x7b", "debug-moe"])
def test_shrunk_experts_keep_every_rank_at_work_some_with_fewer(preset: str, layout: str) -> None:
    job = moe(preset, **LAYOUTS[layout])
    check(job)
    small = shrink(job, 3).job
    check(small)
    after, axes = small.model, small.layout
    assert (axes.ep, axes.etp, axes.ep_inner) == (job.layout.ep, job.layout.etp, job.layout.ep_inner)
    assert after.experts is not None and after.expert_width is not None
    assert holds_rows(after.experts, axes.ep) and holds_rows(after.expert_width, axes.etp)
    assert (job.model.experts or 0) <= 8 or (after.experts < 20 and (axes.ep == 1 or after.experts % axes.ep))
    assert after.expert_width < 20 and (axes.etp == 1 or after.expert_width % axes.etp)


@pytest.mark.parametrize("factor", [7.5, 1.25])
def test_a_capacity_still_drops_something(factor: float) -> None:
    job = moe("qwen3-30b-a3b", ep=4)
    job = job.model_copy(update={"model": job.model.model_copy(update={"capacity_factor": factor})})
    check(job)
    small = shrink(job, 3).job
    check(small)
    model, length = small.model, small.data.seq_len
    assert model.experts is not None and model.capacity_factor is not None
    assert model.capacity_factor * model.experts_per_token * length <= model.experts * (length - 1)
    assert factor > 2 or model.capacity_factor == factor


def test_a_small_width_of_the_shared_experts_suits_the_tensor_ranks() -> None:
    job = moe("deepseek-v3", tp=16)
    small = shrink(job, 3).job.model
    assert small.shared_experts == 1 and small.expert_width is not None and holds_rows(small.expert_width, 16)


def test_what_turns_off_the_expert_axes() -> None:
    job = moe("mixtral-8x7b", ep=4, ep_inner=2, etp=2, dp_replicate=3)
    assert present(job)[:5] == ["ep_inner", "etp", "ep", "dp_replicate", "dp_shard"]
    found: dict[str, Any] = {}
    for axis in ("ep_inner", "etp", "ep", "dp_shard"):
        layout = without(job, (axis,)).layout
        found[axis] = (layout.ep, layout.etp, layout.ep_inner, layout.dp_shard)
    assert found == {"ep_inner": (4, 2, 1, 8), "etp": (4, 1, 2, 8), "ep": (1, 2, 1, 8), "dp_shard": (1, 1, 1, 1)}
    some = without(moe("mixtral-8x7b", ep=4, ep_inner=2, tp=2), ("dp_shard",)).layout
    assert (some.ep, some.ep_inner, some.tp) == (2, 1, 2)


def test_ep_is_named_when_what_comes_from_other_ranks_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    right = transfer.all_to_all_rows

    def doubled(out: Tensor, inp: Tensor, send: Sequence[int], recv: Sequence[int], group: Group, phase: str) -> Work:
        work = right(out, inp, send, recv, group, phase)
        if group.size > 1:
            work.wait()
            out.mul_(2)
        return work

    monkeypatch.setattr(transfer, "all_to_all_rows", doubled)
    job = layout_job(zero=1, ranks=2, model=SOFTMAX, layout=dict(ep=2), accumulation=1)
    blame = guilty(job, lambda variant: not compared(variant).differences)
    assert blame.axis == "ep" and blame.also == ("dp_shard",)
