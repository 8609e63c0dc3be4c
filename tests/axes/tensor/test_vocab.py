"""The head's loss with its vocabulary cut over 1, 2 and 4 ranks equals one device's, padding or not, and its bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal

import pytest
import torch
import torch.nn.functional as F
from benchmarks.loss import peak_bytes
from tests.models.helpers import LLAMA, DictSink
from torch import Tensor, nn

from heptad.config.schema import LayoutSection
from heptad.launch.forked import forked
from heptad.mesh.collectives import Group
from heptad.mesh.device import Mesh
from heptad.mesh.layout import Layout
from heptad.mesh.regions import Stream
from heptad.models.batch import IGNORED, Batch
from heptad.models.decoder import Head, loss_sum
from heptad.models.layers import Linear
from heptad.models.loss import TokenLoss
from heptad.models.taps import Tape, write_weight_grads
from heptad.trace import Transfer

ROWS, LENGTH, WIDTH, DY = 3, 7, 5, 0.25
NUM_TOKENS = ROWS * LENGTH
Chunk = int | Literal["auto"]
CHUNKS: tuple[Chunk, ...] = (4, "auto")
WAYS = ("B", "I and W", "autograd")


@dataclass(frozen=True)
class Case:
    """One run of the loss on `tp` ranks. counts_padding: the fault of taking padded rows for real ones."""

    tp: int
    vocab: int
    way: str = "B"
    chunk: Chunk = "auto"
    sequence: bool = False
    keep: bool = False
    ignored: str = "some"
    counts_padding: bool = False


@dataclass
class Result:
    loss: float
    dx: Tensor
    weight_grad: Tensor
    transfers: list[Transfer]


def example(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """x [B, L, D], weight [V, D], labels [B, L]."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(ROWS, LENGTH, WIDTH, dtype=torch.float64, generator=generator)
    weight = 2 * torch.randn(case.vocab, WIDTH, dtype=torch.float64, generator=generator)
    labels = torch.randint(case.vocab, (ROWS, LENGTH), generator=generator)
    labels[torch.rand(labels.shape, generator=generator) < 0.3] = IGNORED
    labels[0] = IGNORED
    return x, weight, labels if case.ignored == "some" else torch.full_like(labels, IGNORED)


def group_of(rank: int, tp: int) -> Group:
    return Mesh(Layout.of(LayoutSection(tp=tp)), rank, [("tp",)], torch.device("cpu")).group("tp")


def cut_head(weight: Tensor, rank: int, tp: int) -> tuple[Linear, range]:
    """This rank's rows of the weight, zeros behind the last real one, and which they are."""
    vocab, width = weight.shape
    size = -(-vocab // tp)
    rows = range(min(rank * size, vocab), min((rank + 1) * size, vocab))
    out = Linear(width, size, bias=False)
    out.weight = nn.Parameter(torch.zeros(size, width, dtype=weight.dtype))
    out.weight.data[: len(rows)] = weight[rows.start : rows.stop]
    return out, rows


def cut_losses(rank: int, cases: Sequence[Case]) -> list[Result]:
    group = group_of(rank, cases[0].tp)
    return [cut_loss(rank, case, group) for case in cases]


def cut_loss(rank: int, case: Case, group: Group) -> Result:
    stream, (x, weight, labels) = Stream(group, case.sequence, case.keep), example(case)
    group.ledger.reset()
    group.ledger.phase = "forward"
    out, rows = cut_head(weight, rank, case.tp)
    if case.counts_padding:
        rows = range(rows.start, rows.start + out.weight.shape[0])
    mine, sink = stream.local(x).clone().requires_grad_(), DictSink()
    tape = None if case.way == "autograd" else Tape(sink if case.way == "B" else None)
    loss = TokenLoss(out, stream, rows, case.chunk, labels.flatten(), tape)(mine)
    group.ledger.phase = "backward"
    leaves = [out.weight] if tape is None else tape.leaves()
    dx, *grads = torch.autograd.grad(loss, [mine, *leaves], torch.full_like(loss, DY), allow_unused=True)
    if tape is None:
        assert grads[0] is not None
        sink.add(out.weight, grads[0])
    else:
        write_weight_grads(tape, [] if case.way == "B" else list(grads), sink)
    return Result(float(loss.detach()), dx, sink.grads[out.weight], group.ledger.transfers())


def plain(case: Case) -> Result:
    x, weight, labels = example(case)
    x, weight = x.requires_grad_(), weight.requires_grad_()
    loss = loss_sum(F.linear(x, weight), labels)
    return Result(loss.item(), *torch.autograd.grad(loss, [x, weight], torch.full_like(loss, DY)), [])


def assert_equal_to_one_device(*cases: Case) -> list[list[Result]]:
    """Results of each rank of each case; all have one number of ranks."""
    results = [list(ranks) for ranks in zip(*forked(cases[0].tp, cut_losses, cases), strict=True)]
    for case, ranks in zip(cases, results, strict=True):
        assert_right(case, ranks)
    return results


def assert_right(case: Case, found: list[Result]) -> None:
    want = plain(case)
    size = -(-case.vocab // case.tp)
    assert len({result.loss for result in found}) == 1  # the same bits on every rank
    assert found[0].loss == pytest.approx(want.loss, rel=1e-13)
    dx = torch.cat([result.dx for result in found]) if case.sequence else found[0].dx
    dx, dx_want = dx.reshape(-1, WIDTH), want.dx.flatten(0, 1)
    assert (dx[:NUM_TOKENS] - dx_want).abs().max() <= 1e-13 * dx_want.abs().max()
    assert not dx[NUM_TOKENS:].any()
    whole = torch.cat([result.weight_grad for result in found])
    assert whole.shape == (case.tp * size, WIDTH)
    assert (whole[: case.vocab] - want.weight_grad).abs().max() <= 1e-13 * want.weight_grad.abs().max()
    assert not whole[case.vocab :].any()  # C-037: a padded row's gradient is exactly 0


@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
@pytest.mark.parametrize("vocab", [37, 11])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_cut_vocabulary_equals_one_device(tp: int, vocab: int, sequence: bool) -> None:
    chunks: list[Chunk] = [1, 3, 16, NUM_TOKENS, "auto"]
    cases = [Case(tp, vocab, way, chunk, sequence and tp > 1) for way in WAYS for chunk in chunks]
    assert_equal_to_one_device(*cases)


@pytest.mark.parametrize("way", WAYS)
def test_keeping_the_gathered_input_saves_a_gather(way: str) -> None:
    for keep, gathers in ((False, 1), (True, 0)):
        cases = [Case(2, 11, way, chunk, sequence=True, keep=keep) for chunk in CHUNKS]
        for result in chain(*assert_equal_to_one_device(*cases)):
            counts = {(item.op, item.phase): item.count for item in result.transfers}
            assert counts["all_gather", "forward"] == counts["reduce_scatter", "backward"] == 1
            assert counts.get(("all_gather", "backward"), 0) == gathers


def test_the_statistics_are_two_small_reductions() -> None:
    """Max, then Σ exp and target together: 3 numbers a token, whatever the chunk; x is reduced or gathered beside."""
    cases = [Case(4, 37, chunk=chunk, sequence=sequence) for chunk in CHUNKS for sequence in (False, True)]
    for result in chain(*assert_equal_to_one_device(*cases)):
        (found,) = [item for item in result.transfers if item.op == "all_reduce" and item.phase == "forward"]
        assert (found.axis, found.count, found.num_bytes) == ("tp", 2, 2 * 3 * 3 * NUM_TOKENS * 8 // 4)


@pytest.mark.parametrize("vocab", [5, 3, 1])
def test_ranks_without_a_single_real_row(vocab: int) -> None:
    assert_equal_to_one_device(*(Case(4, vocab, way, chunk) for way in WAYS for chunk in CHUNKS))


def test_only_ignored_targets_give_exactly_zero() -> None:
    cases = [Case(2, 11, "B", chunk, cut, ignored="all") for chunk in CHUNKS for cut in (False, True)]
    for result in chain(*forked(2, cut_losses, cases)):
        assert result.loss == 0.0
        assert not result.dx.any() and not result.weight_grad.any()


def test_c_037_a_padded_row_that_is_counted_changes_the_loss() -> None:
    """V = 11 on 4 ranks is 12 rows: the one behind has logit 0 for every token."""
    cases = [Case(4, 11, chunk=chunk, counts_padding=wrong) for chunk in CHUNKS for wrong in (False, True)]
    want = plain(cases[0]).loss
    for result, case in zip(forked(4, cut_losses, cases)[0], cases, strict=True):
        if case.counts_padding:
            assert result.loss > want * (1 + 1e-4)
        else:
            assert result.loss == pytest.approx(want, rel=1e-13)


def cut_head_unit(rank: int, case: Case) -> tuple[Tensor, float]:
    """The head as a unit: logits of all tokens, and the loss without a graph."""
    x, weight, labels = example(case)
    section = LLAMA.model_copy(update={"vocab": case.vocab, "width": WIDTH})
    head = Head(section)
    head.norm.weight = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH, dtype=torch.float64))
    head.stream = Stream(group_of(rank, case.tp), case.sequence)
    head.out, head.vocabulary = cut_head(weight, rank, case.tp)
    zeros = torch.zeros_like(labels)
    batch = Batch(zeros, labels, zeros, zeros, zeros, 1)
    with torch.no_grad():
        mine = head.stream.local(x)
        return head.logits(mine, batch), head(mine, batch).item()


@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
def test_logits_are_whole_on_every_rank(sequence: bool) -> None:
    (want, loss), *_ = forked(1, cut_head_unit, Case(1, 11))
    assert want.shape == (ROWS, LENGTH, 11)
    for logits, found in forked(4, cut_head_unit, Case(4, 11, sequence=sequence)):
        assert (logits - want).abs().max() <= 1e-14 * want.abs().max()
        assert found == pytest.approx(loss, rel=1e-13)


def test_peak_bytes_at_a_real_vocabulary() -> None:
    """Acceptance: at most 0.15 of the plain way's at 128,256 words."""
    ours, naive = peak_bytes()
    assert ours / naive <= 0.15, (ours, naive)
