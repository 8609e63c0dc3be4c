"""Parameters that are frozen, unused, shared or loose; units used twice; the fake process group; repeated runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.tiny import reference, tiny_batches, tiny_job, worst_error
from torch import Tensor, nn

from heptad.account.traffic import step_traffic
from heptad.axes.program import recomputed
from heptad.config.schema import Job, ModelSection
from heptad.errors import ConfigError
from heptad.launch.forked import forked
from heptad.models.batch import Batch
from heptad.models.build import wrap
from heptad.models.decoder import loss_sum
from heptad.trace import total
from heptad.train.step import Trainer


class Embed(nn.Module):
    def __init__(self, vocab: int, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(vocab, width)

    def forward(self, x: None, batch: Batch) -> Tensor:
        return self.table(batch.ids)


class Mix(nn.Module):
    """A frozen linear, a loose scale, a layer that nothing calls."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.fixed = nn.Linear(width, width)
        self.fixed.requires_grad_(False)
        self.free = nn.Linear(width, width)
        self.scale = nn.Parameter(torch.empty(width))
        self.unused = nn.Linear(width, 3)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        return x + self.scale * self.free(torch.tanh(self.fixed(self.norm(x))))


class Head(nn.Module):
    def __init__(self, vocab: int, width: int) -> None:
        super().__init__()
        self.out = nn.Linear(width, vocab)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        return loss_sum(self.out(x), batch.labels)


class Twice(nn.Module):
    """The middle unit runs twice in one forward: one gather a use."""

    def __init__(self, section: ModelSection) -> None:
        super().__init__()
        self.embed, self.mix = Embed(section.vocab, section.width), Mix(section.width)
        self.between, self.head = Mix(section.width), Head(section.vocab, section.width)

    def units(self) -> list[nn.Module]:
        return [self.embed, self.mix, self.between, self.mix, self.head]


def twice(job: Job) -> Any:
    with torch.device("meta"):
        return wrap(Twice(job.model), job.model)


def run(rank: int, job: Job) -> list[tuple[Any, ...]]:
    trainer = Trainer(job, rank, torch.device("cpu"), twice(job))
    layout = trainer.mesh.layout
    for step in (1, 2):
        trainer.step(step, tiny_batches(job, layout.data_rank(rank), layout.data_ranks, step))
    return [
        (s.spec, s.start, s.stop, None if s.grad is None else s.grad.clone(), s.master.clone())
        for s in trainer.engine.shards
    ]


def test_frozen_loose_unused_and_shared_parameters() -> None:
    for layout in (
        dict(zero=3, dp_shard=2),
        dict(zero=2, dp_shard=2),
        dict(zero=0, dp_shard=2),
        dict(zero=1, dp_shard=4),
    ):
        job = tiny_job(**layout)
        want = reference(job, 2, twice(job))[-1]
        for shards in forked(layout["dp_shard"], run, job):
            for spec, start, stop, grad, master in shards:
                assert (grad is None) == (not spec.trainable)
                assert worst_error(master, start, stop, want.params[spec.name], 1e-3) <= 1e-10, spec.name
                if grad is not None:
                    assert worst_error(grad, start, stop, want.grads[spec.name], 1e-6) <= 1e-10, spec.name
                if "unused" in spec.name:
                    assert grad is not None and not grad.any()


def test_fsdp2_runs_a_unit_twice() -> None:
    job = tiny_job(zero=3, dp_shard=2, engine="fsdp2")
    want = reference(job, 2, twice(job))[-1]
    for shards in forked(2, run, job):
        for spec, start, stop, _, master in shards:
            assert worst_error(master, start, stop, want.params[spec.name], 1e-3) <= 1e-10, spec.name


class Tied(Twice):
    """The head's weight is the embedding's."""

    def __init__(self, section: ModelSection) -> None:
        super().__init__(section)
        self.head.out.weight = self.embed.table.weight


def build_tied(rank: int, job: Job) -> str:
    with torch.device("meta"):
        model = wrap(Tied(job.model), job.model)
    with pytest.raises(ConfigError) as refused:
        Trainer(job, rank, torch.device("cpu"), model)
    return str(refused.value)


def test_fsdp2_refuses_units_that_share_a_parameter() -> None:
    """Each unit would keep a gradient of its own: wrong without a word."""
    (message,) = forked(1, build_tied, tiny_job(zero=3, engine="fsdp2"))
    assert "layout.engine" in message and "'embed.table.weight' belongs to two" in message


def optimizer_and_buckets(rank: int, job: Job) -> tuple[set[str], list[bool]]:
    trainer = Trainer(job, rank, torch.device("cpu"), twice(job))
    trainer.step(1, tiny_batches(job, trainer.mesh.layout.data_rank(rank), 2, 1))
    state = {piece.name.split("/", 1)[1] for piece in trainer.optimizer.pieces()}
    return state, [hasattr(bucket, "grad_full") for bucket in trainer.engine.buckets if not bucket.spec.trainable]


def test_frozen_parameters_cost_no_gradient_no_state_and_no_reduction() -> None:
    job = tiny_job(zero=3, dp_shard=2)
    job = job.model_copy(update={"optimizer": job.optimizer.model_copy(update={"momentum": 0.5})})
    for state, frozen_grads in forked(2, optimizer_and_buckets, job):
        assert state and not any("fixed" in name for name in state)
        assert frozen_grads and not any(frozen_grads)


def repeated(rank: int, job: Job) -> list[Tensor]:
    trainer = Trainer(job, rank, torch.device("cpu"))
    for step in (1, 2, 3):
        trainer.step(step, tiny_batches(job, trainer.mesh.layout.data_rank(rank), 4, step))
    return [shard.master.clone() for shard in trainer.engine.shards]


def test_a_repeated_run_has_the_same_bits() -> None:
    job = tiny_job(zero=3, dp_shard=4)
    job = job.model_copy(update={"precision": job.precision.model_copy(update={"params": "fp32"})})
    first, second = forked(4, repeated, job), forked(4, repeated, job)
    assert all(torch.equal(a, b) for one, two in zip(first, second, strict=True) for a, b in zip(one, two, strict=True))


def fake_step(rank: int, job: Job) -> tuple[int, float]:
    """The stage-3 step of one of 4 ranks, on fake tensors and the fake process group: nothing is computed or sent."""
    import torch.distributed as dist
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.destroy_process_group()
    dist.init_process_group("fake", rank=2, world_size=4, store=FakeStore())
    with FakeTensorMode(allow_non_fake_inputs=True):
        trainer = Trainer(job, 2, torch.device("cpu"))
        ids = torch.zeros(1, 11, dtype=torch.int64)
        batches = [Batch(ids, ids, ids, ids, ids, 1, mixed=False) for _ in range(2)]
        result = trainer.step(1, batches)
    model = trainer.parallel.model
    counted = total(trainer.mesh.ledger.transfers())
    assert counted == total(step_traffic(job, model.unit_specs, model.specs))
    sent = sum(num_bytes for _, num_bytes in counted.values())
    dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    return sent, result.num_targets


def test_the_step_runs_on_fake_tensors_and_a_fake_process_group() -> None:
    job = tiny_job(zero=3, dp_shard=4)
    ((sent, num_targets),) = forked(1, fake_step, job)
    assert sent > 0
    assert num_targets == 2 * 11


class Broken(nn.Module):
    """A unit that breaks the contract: `mid` returns two tensors, or the head a loss for each token."""

    def __init__(self, section: ModelSection, bad: str) -> None:
        super().__init__()
        self.embed, self.mid = Embed(section.vocab, section.width), Mix(section.width)
        self.head = Head(section.vocab, section.width)
        if bad == "mid":
            self.mid.forward = lambda x, batch: (x, x)  # type: ignore[method-assign,assignment]
        else:
            self.head.forward = lambda x, batch: self.head.out(x)[..., 0]  # type: ignore[method-assign]

    def units(self) -> list[nn.Module]:
        return [self.embed, self.mid, self.head]


def broken_step(rank: int, job: Job, bad: str) -> str:
    with torch.device("meta"):
        model = wrap(Broken(job.model, bad), job.model)
    trainer = Trainer(job, rank, torch.device("cpu"), model)
    with pytest.raises(TypeError) as refused:
        trainer.step(1, tiny_batches(job, 0, 1, 1))
    return str(refused.value)


def test_a_unit_that_breaks_the_contract_is_named() -> None:
    job = tiny_job()
    assert forked(1, broken_step, job, "mid") == ["unit 1 (mid) returned tuple: a unit returns one tensor"]
    (message,) = forked(1, broken_step, job, "head")
    assert message == "unit 2 (head) is the last one and returned [1, 11]: it returns the sum of losses"


class Short(nn.Module):
    def __init__(self, section: ModelSection) -> None:
        super().__init__()
        self.embed, self.head = Embed(section.vocab, section.width), Head(section.vocab, section.width)

    def units(self) -> list[nn.Module]:
        return [self.embed, self.head]


def test_c_120_recompute_is_refused_where_there_is_nothing_to_recompute() -> None:
    job = tiny_job(recompute="full")
    with torch.device("meta"):
        model = wrap(Short(job.model), job.model)
    with pytest.raises(ConfigError, match=r"recompute\.mode[\s\S]*no effect"):
        recomputed(job, model.unit_specs)
