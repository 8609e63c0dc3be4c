"""`train.compile`: results and messages as without, the same bits with recompute, few graphs, no processes left.

All in forked ranks: the compiler is not loaded into the process that runs the other tests.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.axes.data.test_contract import train
from tests.tiny import floor_of, reference, tiny_job, worst_error
from torch import nn

from heptad.config.schema import Job
from heptad.errors import ConfigError
from heptad.launch.environ import check_compiler
from heptad.launch.forked import forked
from heptad.models.dropout import Dropout

TIMEOUT_S = 600.0  # a first compilation on a busy machine
DROPPED = dict(layers=2, dropout=0.1, attention_dropout=0.1, qk_norm=True)


def compiled(job: Job, **precision: str) -> Job:
    train_section = job.train.model_copy(update={"compile": True})
    return job.model_copy(
        update={"train": train_section, "precision": job.precision.model_copy(update=dict(precision))}
    )


def train_all(rank: int, jobs: list[Job]) -> tuple[list[list[dict[str, Any]]], bool, str]:
    """Each job's steps, whether the compiler was loaded, and the processes that were left."""
    steps = [train(rank, job) for job in jobs]
    children = "".join(path.read_text() for path in Path("/proc/self/task").glob("*/children"))
    return steps, "heptad.models.compiled" in sys.modules, children


@pytest.mark.slow
def test_a_cut_stream_computes_the_same_and_recompute_changes_no_bit() -> None:
    layout: dict[str, Any] = dict(zero=3, tp=2, sequence_parallel=True)
    job, *again = (tiny_job(DROPPED, recompute=mode, **layout) for mode in ("none", "full", "selective"))
    eager = forked(2, train_all, [job])
    ranks = forked(2, train_all, [compiled(job), *map(compiled, again)], timeout_s=TIMEOUT_S)
    wanted = reference(job, 2)
    for ((plain,), loaded, _), ((steps, *repeated), _, children) in zip(eager, ranks, strict=True):
        assert not loaded and not children
        assert steps[-1]["counted"] == plain[-1]["counted"] == plain[-1]["predicted"]
        assert all(run[-1]["counted"] == run[-1]["predicted"] for run in repeated)
        for number, want in enumerate(wanted):
            assert steps[number]["result"].loss == pytest.approx(want.loss, rel=1e-12)
            others = [run[number]["shards"] for run in repeated]
            for (name, start, stop, grad, _), *same in zip(steps[number]["shards"], *others, strict=True):
                error = worst_error(grad, start, stop, want.grads[name], floor_of(name, want.grads))
                assert error <= 1e-10, name
                assert all(torch.equal(grad, other) for _, _, _, other, _ in same), name


def test_fp32_is_equal_up_to_rounding() -> None:
    """Both round at other places: sums of 10 to 80 terms, a few dozen of them in a row, give some hundred eps."""
    job = tiny_job({"layers": 2}, recompute="selective", zero=0)
    wanted = reference(job, 2)
    ((((steps,), _, _),)) = forked(1, train_all, [compiled(job, params="fp32", reduce="fp32")], timeout_s=TIMEOUT_S)
    for found, want in zip(steps[:1], wanted[:1], strict=True):
        for name, start, stop, grad, _ in found["shards"]:
            assert grad.dtype == torch.float32
            assert worst_error(grad, start, stop, want.grads[name], floor_of(name, want.grads)) <= 1e-5, name


def drop_many_shapes(rank: int, dtype: torch.dtype) -> tuple[bool, int]:
    """Whether all shapes lose the same elements as without compilation, and how many graphs that took."""
    from torch._dynamo.utils import counters

    from heptad.models.compiled import compile_model
    from heptad.models.norms import RMSNorm

    holder = RMSNorm(3)
    holder.dropout = plain = Dropout(0.3, 1, "x")  # type: ignore[assignment]
    compile_model(holder, "silu")
    dropout: Any = holder.dropout
    equal = dropout != plain
    for rows in range(1, 50, 4):
        x, index = torch.randn(2, rows, 37, dtype=dtype), torch.arange(2 * rows).view(2, rows)
        equal &= torch.equal(dropout.features(x, index, 5), plain.features(x, index, 5))
    with pytest.raises(ConfigError, match="no effect"):
        compile_model(nn.Linear(2, 2), "silu")
    return equal, counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
def test_dropout_drops_the_same_elements_and_other_lengths_make_few_graphs(dtype: torch.dtype) -> None:
    ((equal, graphs),) = forked(1, drop_many_shapes, dtype, timeout_s=TIMEOUT_S)
    assert equal
    assert graphs <= 3, "one row, many rows, and as many rows as features"


def test_a_job_on_cpus_needs_a_compiler() -> None:
    job = tiny_job()
    check_compiler(job, {"PATH": ""})
    with pytest.raises(ConfigError) as caught:
        check_compiler(compiled(job), {"PATH": "", "CXX": "no-such-compiler"})
    (problem,) = caught.value.problems
    assert problem.field == "train.compile" and "no-such-compiler" in problem.rule and "CXX" in problem.fix
