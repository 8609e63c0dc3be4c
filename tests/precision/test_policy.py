"""Number formats: what "auto" means on each device, and that nothing is below what was asked."""

from __future__ import annotations

import pytest
import torch

from heptad.config.schema import DtypeName, PrecisionSection
from heptad.precision.dtypes import dtypes_of
from heptad.precision.policy import Policy

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64


@pytest.mark.parametrize(
    ("params", "reduce", "device", "expected"),
    [
        ("auto", "auto", "cpu", (FP32, FP32, FP32)),
        ("auto", "auto", "cuda", (BF16, FP32, FP32)),
        ("fp64", "auto", "cpu", (FP64, FP64, FP64)),
        ("fp64", "auto", "cuda", (FP64, FP64, FP64)),
        ("fp32", "auto", "cuda", (FP32, FP32, FP32)),
        ("bf16", "auto", "cpu", (BF16, FP32, FP32)),
        ("bf16", "bf16", "cpu", (BF16, BF16, FP32)),
        ("auto", "bf16", "cuda", (BF16, BF16, FP32)),
    ],
)
def test_formats(
    params: DtypeName, reduce: DtypeName, device: str, expected: tuple[torch.dtype, torch.dtype, torch.dtype]
) -> None:
    policy = Policy.of(PrecisionSection(params=params, reduce=reduce), device)
    assert (policy.params, policy.reduce, policy.master) == expected


def test_names_and_dtypes_agree() -> None:
    names = dtypes_of(PrecisionSection(), "cuda")
    assert (names.params, names.reduce, names.master) == ("bf16", "fp32", "fp32")
