"""A mixture whose experts are cut over forked ranks, beside the same on one device: what this folder's tests run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tests.models.helpers import DictSink, packed
from tests.models.moe import LOSSES, filled
from torch import Tensor, nn

from heptad.axes.expert.apply import dispatch_over
from heptad.config.schema import LayoutSection, ModelSection
from heptad.mesh.device import Mesh
from heptad.mesh.layout import Layout
from heptad.models.batch import Batch
from heptad.models.build import tapped_modules
from heptad.models.decoder import Mlp
from heptad.models.moe import Dispatch, MoE, sorted_dispatch
from heptad.models.spec import complete
from heptad.models.taps import Tape, write_weight_grads
from heptad.trace import Transfer

SOFTMAX = ModelSection(
    layers=2, width=13, heads=1, head_dim=4, mlp_width=11, vocab=53, init_std=0.3,
    experts=7, experts_per_token=3, expert_width=11, **LOSSES,
)  # fmt: skip
DEEPSEEK = ModelSection(
    layers=2, width=13, heads=1, mlp_width=11, vocab=53, init_std=0.3, attention_kind="mla", q_lora_rank=13,
    kv_lora_rank=9, qk_nope_head_dim=5, qk_rope_head_dim=4, v_head_dim=7, experts=9, experts_per_token=3,
    expert_width=7, shared_experts=2, router="deepseek", router_groups=3, router_group_limit=2, routed_scale=1.7,
    bias_update_speed=0.1, balance_loss=0.5,
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A mixture on ep × etp ranks, `inner` of them a node. tokens[rank % len]: lengths of documents; how many tokens
    at the end of the row only fill it up. whole: I and W at once. to: the experts that all tokens go to."""

    section: ModelSection
    ep: int
    etp: int = 1
    inner: int = 1
    whole: bool = False
    changes: tuple[tuple[str, Any], ...] = ()
    tokens: tuple[tuple[tuple[int, ...], int], ...] = (((9, 4), 0), ((5,), 0), ((11, 6), 3), ((3,), 0))
    to: tuple[int, ...] | None = None

    @property
    def world(self) -> int:
        return self.ep * self.etp

    @property
    def model(self) -> ModelSection:
        return complete(ModelSection.model_validate({**self.section.model_dump(by_alias=True), **dict(self.changes)}))

    def batch(self, rank: int) -> Batch:
        """What `rank` routes."""
        lengths, padding = self.tokens[rank % len(self.tokens)]
        return filled([list(lengths)], padding) if padding else packed([list(lengths)], seed=rank)

    def stream(self, rank: int) -> Tensor:
        """What enters the mixture there [1, L, D]."""
        shape = (1, sum(self.tokens[rank % len(self.tokens)][0]), self.section.width)
        return torch.randn(shape, generator=torch.Generator().manual_seed(100 + rank), dtype=torch.float64)

    def groups(self, rank: int) -> tuple[Mesh, Dispatch]:
        """The dispatch over this case's groups."""
        layout = Layout.of(LayoutSection(dp_shard=self.world, ep=self.ep, etp=self.etp))
        mesh = Mesh(layout, rank, [("etp",), ("edp",)], torch.device("cpu"))
        across = mesh.strided("ep", self.inner)
        if self.inner == 1:
            return mesh, dispatch_over(across, mesh.group("etp"))
        return mesh, dispatch_over(mesh.neighbours("ep", self.inner), mesh.group("etp"), across)


def mixture(case: Case) -> MoE:
    """The whole of it, with random weights; `to`: a router that always chooses the same."""
    section = case.model
    moe = MoE(section, Mlp(section, section.shared_experts) if section.shared_experts else None, 5, "blocks.0.mlp")
    generator = torch.Generator().manual_seed(7)
    moe.double()
    for param in moe.parameters():
        nn.init.normal_(param, std=0.5, generator=generator)
    moe.router.place(torch.device("cpu"), torch.float64)
    if case.to is not None:
        chosen = torch.tensor(case.to)
        moe.router.choose = lambda scores: chosen.expand(scores.shape[0], -1)  # type: ignore[method-assign]
    return moe


def cut(whole: Tensor, case: Case, rank: int) -> Tensor:
    """Of a stack [E, F, D] what `rank` holds [⌈E/ep⌉, ⌈F/etp⌉, D], zeros where there is nothing."""
    experts, rows = -(-whole.shape[0] // case.ep), -(-whole.shape[1] // case.etp)
    ep, etp = divmod(rank, case.etp)
    found = whole.new_zeros(experts, rows, whole.shape[2])
    own = whole[ep * experts : (ep + 1) * experts, etp * rows : (etp + 1) * rows]
    found[: own.shape[0], : own.shape[1]] = own
    return found


def stacks(moe: MoE) -> Iterator[tuple[str, nn.Module]]:
    for name in ("gate", "up", "down"):
        stack = getattr(moe.experts, name)
        if stack is not None:
            yield name, stack


def local_mixture(case: Case, rank: int, dispatch: Dispatch) -> MoE:
    moe = mixture(case)
    for _, stack in stacks(moe):
        stack.weight = nn.Parameter(cut(stack.weight.detach(), case, rank))
    moe.dispatch = dispatch
    return moe


def run(moe: MoE, case: Case, rank: int) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Output, gradient of the input and of every parameter of Σ output · (random numbers), by I and W or B."""
    sink = DictSink()
    tape = Tape(sink if case.whole else None)
    for module in tapped_modules(moe):
        module.tape = tape
    x = case.stream(rank).requires_grad_()
    y = moe(x, case.batch(rank))
    for module in tapped_modules(moe):
        module.tape = None
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(200 + rank), dtype=y.dtype)
    dx, *dys = torch.autograd.grad([y], [x, *tape.leaves()], [dy], allow_unused=True)
    write_weight_grads(tape, [] if case.whole else list(dys), sink)
    names = {param: name for name, param in moe.named_parameters()}
    return y.detach(), dx, {names[param]: grad for param, grad in sink.grads.items()}


@dataclass(frozen=True)
class Found:
    """Worst difference to one device by what it is of; what was sent; the choices of this rank [n, K], -1: not kept."""

    errors: dict[str, float]
    transfers: list[Transfer]
    choices: Tensor
    grads: dict[str, Tensor]


def beside_one_device(rank: int, case: Case) -> Found:
    """This rank's part, and all of it on one device."""
    mesh, dispatch = case.groups(rank)
    moe = local_mixture(case, rank, dispatch)
    moe.router.choices = {}
    y, dx, grads = run(moe, case, rank)
    single = mixture(case)
    single.dispatch = sorted_dispatch
    every = [run(single, case, source) for source in range(case.world)]
    errors = {"output": worst(y, every[rank][0]), "input": worst(dx, every[rank][1])}
    for name, grad in grads.items():
        expected = [found[2][name] for found in every]
        if name.startswith("experts."):
            errors[name] = worst(grad, cut(torch.stack(expected).sum(0), case, rank))
        else:
            errors[name] = worst(grad, expected[rank])
    assert set(grads) == set(every[rank][2])
    (choices,) = moe.router.choices.values()
    return Found(errors, mesh.ledger.transfers(), choices, grads)


def worst(a: Tensor, b: Tensor) -> float:
    """Largest difference over the largest value; of nothing, none."""
    assert a.shape == b.shape
    return float((a - b).abs().max() / b.abs().max().clamp(min=1.0)) if a.numel() else 0.0


def several(rank: int, cases: Sequence[Case]) -> list[Found]:
    return [beside_one_device(rank, case) for case in cases]
