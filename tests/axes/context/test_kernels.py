"""Block kernels and the merge of their results: equal to a plain softmax, and what of torch they work around."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from tests.axes.context.attention import error
from torch import Tensor

from heptad.axes.context import kernels
from heptad.axes.context.kernels import CpuFlash, CudaFlash, FormedScores, Kernels, Seen, block_kernels, edge_bias
from heptad.axes.context.merge import Partial
from heptad.config.schema import ModelSection
from heptad.models.dropout import Dropout

BOTH = [CpuFlash(), FormedScores()]
DOUBLE = torch.float64


def drawn(heads: int, kv_heads: int, queries: int, keys: int, dtype: torch.dtype = DOUBLE) -> list[Tensor]:
    """q, k, v, dout as projections leave them: [B, n, heads, d] seen as [B, heads, n, d]."""
    generator = torch.Generator().manual_seed(3)
    shapes = [(2, queries, heads, 5), (2, keys, kv_heads, 5), (2, keys, kv_heads, 5), (2, queries, heads, 5)]
    return [torch.randn(s, dtype=DOUBLE, generator=generator).to(dtype).transpose(1, 2) for s in shapes]


def plain(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, mask: Tensor | None) -> tuple[Tensor, ...]:
    """out, log-sum-exp, dq, dk, dv by autograd, float64."""
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    q, k, v = leaves
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    scores = scores if mask is None else scores.masked_fill(~mask, -math.inf)
    out = scores.softmax(-1) @ v
    return out.detach(), scores.logsumexp(-1).detach(), *torch.autograd.grad(out, leaves, dout.double())


def both_ways(way: Kernels, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, seen: Seen) -> tuple[Tensor, ...]:
    out, lse = way.forward(q, k, v, seen)
    return out, lse, *way.backward(dout, q, k, v, out, lse, seen)


@pytest.mark.parametrize("way", BOTH, ids=lambda way: type(way).__name__)
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 6), (6, 2), (6, 1)])
@pytest.mark.parametrize("kind", ["full", "causal", "window"])
def test_a_block_equals_a_plain_softmax(way: Kernels, heads: int, kv_heads: int, kind: str) -> None:
    q, k, v, dout = drawn(heads, kv_heads, 7, 7 if kind == "causal" else 11)
    mask, seen = None, Seen()
    if kind == "causal":
        mask, seen = torch.ones(7, 7, dtype=torch.bool).tril(), Seen(causal=True)
    elif kind == "window":
        mask = torch.arange(7).unsqueeze(1) - torch.arange(11) < -2
        seen = Seen(bias=edge_bias(7, 11, -2, q))
    assert error(both_ways(way, q, k, v, dout, seen), plain(q, k, v, dout, mask)) <= 1e-14


@pytest.mark.parametrize("way", BOTH, ids=lambda way: type(way).__name__)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.bfloat16, 1e-2)])
def test_narrow_types_keep_the_log_sum_exp_in_fp32(way: Kernels, dtype: torch.dtype, bound: float) -> None:
    q, k, v, dout = drawn(6, 2, 7, 11, dtype)
    found = both_ways(way, q, k, v, dout, Seen())
    assert found[1].dtype == torch.float32 and all(x.dtype == dtype for x in (found[0], *found[2:]))
    assert error(found, plain(q, k, v, dout, None)) <= bound


@pytest.mark.parametrize("way", BOTH, ids=lambda way: type(way).__name__)
def test_slices_and_rows_that_are_not_contiguous_are_read_as_they_are(way: Kernels) -> None:
    """torch's kernel takes the last dim's stride for 1, whatever it is, and says nothing."""
    q, k, v, dout = drawn(6, 2, 13, 17)
    q, dout, k, v = q[1:, :, 3:10], dout[1:, :, 3:10], k[1:, :, 2:13], v[1:, :, 2:13]
    right = plain(q, k, v, dout, None)
    assert error(both_ways(way, q, k, v, dout, Seen()), right) <= 1e-14
    turned = [x.transpose(2, 3).contiguous().transpose(2, 3) for x in (q, k, v, dout)]
    assert error(both_ways(way, *turned, Seen()), right) <= 1e-14
    raw, _ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*turned[:3], 0.0, False)
    assert not torch.allclose(raw, right[0])


def test_no_keys_at_all_are_refused() -> None:
    """torch's kernel divides by zero and takes the process with it."""
    q, k, v, _ = drawn(6, 2, 7, 0)
    with pytest.raises(AssertionError):
        CpuFlash().forward(q, k, v, Seen())


def merged(way: Kernels) -> tuple[Tensor, Tensor]:
    """Two halves of the keys, of which query 2 sees none in the first: merged, and as it should be."""
    q, k, v, dout = drawn(6, 2, 7, 12)
    mask = torch.ones(7, 12, dtype=torch.bool)
    mask[2, :6] = False
    bias = torch.zeros(7, 12, dtype=DOUBLE).masked_fill(~mask, -math.inf)
    total, rows = Partial(q), slice(0, 2)
    for keys in (slice(0, 6), slice(6, 12)):
        one = way.forward(q, k[:, :, keys], v[:, :, keys], Seen(bias=bias[:, keys]))
        total.add(rows, slice(0, 7), *one)
    return total.out, plain(q, k, v, dout, mask)[0]


@pytest.mark.parametrize("way", BOTH, ids=lambda way: type(way).__name__)
def test_a_query_that_sees_no_key_of_a_part_adds_nothing(way: Kernels) -> None:
    out, right = merged(way)
    assert (out - right).abs().max() <= 1e-14


def test_planted_torchs_log_sum_exp_of_an_unseeing_query_spoils_the_merge(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is 0, which claims keys of weight 1 in all; the merge is wrong for that query alone."""

    def untouched(lse: Tensor, bias: Tensor | None) -> Tensor:
        assert bias is None or not (bias == -math.inf).all(-1).any() or (lse[:, :, 2] == 0).all()
        return lse

    monkeypatch.setattr(kernels, "without_unseeing", untouched)
    out, right = merged(CpuFlash())
    wrong = (out - right).abs().amax((0, 1, 3)) > 1e-3
    assert wrong.tolist() == [False, False, True, False, False, False, False]


def test_parts_merge_to_the_whole_in_any_order_and_unseen_ones_change_no_bit() -> None:
    q, k, v, dout = drawn(6, 2, 7, 11)
    right = plain(q, k, v, dout, None)
    parts = [CpuFlash().forward(q, k[:, :, at], v[:, :, at], Seen()) for at in (slice(0, 2), slice(2, 9), slice(9, 11))]
    for order in ((0, 1, 2), (2, 0, 1)):
        total = Partial(q)
        for at in order:
            total.add(slice(0, 2), slice(0, 7), *parts[at])
        assert (total.out - right[0]).abs().max() <= 1e-14 and (total.lse - right[1]).abs().max() <= 1e-14
        before = total.out.clone(), total.lse.clone()
        total.add(slice(0, 2), slice(0, 7), torch.zeros_like(total.out), torch.full_like(total.lse, -math.inf))
        assert torch.equal(before[0], total.out) and torch.equal(before[1], total.lse)
    alone = Partial(q)
    alone.add(slice(0, 2), slice(0, 7), *parts[0])
    assert torch.equal(alone.out, parts[0][0]) and torch.equal(alone.lse, parts[0][1])


def test_many_narrow_parts_are_summed_in_fp32() -> None:
    """A thousand equal keys in bf16: each part adds a thousandth, less than bf16 keeps of the sum."""
    q, v = torch.zeros(1, 1, 1, 8, dtype=torch.bfloat16), torch.ones(1, 1, 1, 8, dtype=torch.bfloat16)
    total = Partial(q)
    for _ in range(1000):
        total.add(slice(0, 1), slice(0, 1), *CpuFlash().forward(q, q, v, Seen()))
    assert total.out.dtype == torch.float32 and (total.out - 1).abs().max() <= 1e-4
    assert (total.lse - math.log(1000)).abs().max() <= 1e-4


def test_dropped_probabilities_of_two_blocks_are_those_of_the_whole() -> None:
    """A block's own softmax drops the same elements, so merging scales them to the whole row's probabilities."""
    q, k, v, dout = drawn(6, 2, 7, 11)
    dropout, rows, columns = Dropout(0.4, 5, "scores"), torch.arange(14).view(2, 7), torch.arange(22).view(2, 11)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    wide = [x.repeat_interleave(3, 1) for x in leaves[1:]]
    probabilities = (leaves[0] @ wide[0].transpose(-2, -1) / math.sqrt(5)).softmax(-1)
    right = dropout.attention(probabilities, rows, columns, 1) @ wide[1]
    grads = torch.autograd.grad(right, leaves, dout)

    def drop_of(keys: slice) -> Callable[[Tensor], Tensor]:
        tensors, drop = dropout.attention_map(6, rows, columns[:, keys], 1)
        return lambda x: drop(x, *tensors)

    way, total, parts = FormedScores(), Partial(q), (slice(0, 4), slice(4, 11))
    seen = [Seen(drop=drop_of(keys)) for keys in parts]
    for keys, one in zip(parts, seen, strict=True):
        total.add(slice(0, 2), slice(0, 7), *way.forward(q, k[:, :, keys], v[:, :, keys], one))
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for keys, one in zip(parts, seen, strict=True):
        found = way.backward(dout, q, k[:, :, keys], v[:, :, keys], total.out, total.lse, one)
        dq += found[0]
        dk[:, :, keys], dv[:, :, keys] = found[1:]
    assert error((total.out, dq, dk, dv), (right.detach(), *grads)) <= 1e-14


def test_the_kernels_of_a_model_are_chosen_once() -> None:
    def way(device: str, dtype: torch.dtype, **model: object) -> type:
        return type(block_kernels(ModelSection.model_validate(model), torch.device(device), dtype))

    assert way("cpu", DOUBLE) is way("cpu", torch.bfloat16) is CpuFlash
    assert way("cuda", torch.bfloat16) is CudaFlash
    assert way("cuda", torch.float32) is FormedScores
    assert way("cpu", DOUBLE, attention="math") is way("cuda", torch.bfloat16, attention_dropout=0.1) is FormedScores


def test_cuda_calls_fit_the_operators_they_are_for() -> None:
    """On meta tensors: a head_dim that CUDA pads, fewer kv heads, unequal lengths; a mask goes to formed scores."""
    q, k, v, dout = (x.to("meta") for x in drawn(6, 2, 7, 11, torch.bfloat16))
    for seen in (Seen(), Seen(bias=edge_bias(7, 11, 3, q))):
        out, lse, dq, dk, dv = both_ways(CudaFlash(), q, k, v, dout, seen)
        assert (out.shape, lse.shape, lse.dtype) == (q.shape, q.shape[:3], torch.float32)
        assert (dq.shape, dk.shape, dv.shape) == (q.shape, k.shape, v.shape)
