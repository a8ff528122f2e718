"""The backend "cuda" fuses activations only into products that it supports, else uses a library."""

from __future__ import annotations

import pytest
import torch

from fastbert.ops.fused_products import library_reason


def operands(rows=5, depth=16, columns=24, dtype=torch.bfloat16):
    return (
        torch.zeros(rows, depth, dtype=dtype),
        torch.zeros(columns, depth, dtype=dtype),
        torch.zeros(columns, dtype=dtype),
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_plain_operands_are_served(dtype):
    x, weight, bias = operands(dtype=dtype)
    assert library_reason(x, weight, bias) is None
    assert library_reason(x, weight, None) is None
    assert library_reason(x[:0], weight, bias) is None
    # The fused product also supports a transposed weight.
    assert library_reason(x, weight.t().contiguous(), None) is None
    # Rows may also be slices of a larger tensor if each row begins at a multiple of 16 bytes.
    assert library_reason(torch.zeros(5, 40, dtype=dtype)[:, 8:24], weight, bias) is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda x, w, b: (x.float(), w.float(), b.float()), "fp32 products"),
        (lambda x, w, b: (x[:, :0], w[:, :0], b), "the weight is empty"),
        (lambda x, w, b: (x, w[:0], b[:0]), "the weight is empty"),
        (lambda x, w, b: (x, w[:20], b[:20]), "shape (20, 16), not of multiples of 8"),
        (lambda x, w, b: (x[:, :12], w[:, :12], b), "shape (24, 12), not of multiples of 8"),
        (lambda x, w, b: (x[:1].expand(5, 16), w, b), "left operand has the strides 0 and 1"),
        (lambda x, w, b: (x, w.t().contiguous().t(), b), "weight has the strides 1 and 24"),
        (lambda x, w, b: (torch.zeros(5, 20).bfloat16()[:, :16], w, b), "strides 20 and 1"),
        (lambda x, w, b: (torch.zeros(5, 32).bfloat16()[:, 4:20], w, b), "an address"),
        (lambda x, w, b: (x, w, torch.zeros(28).bfloat16()[4:]), "an address"),
        (lambda x, w, b: (x, w, b[:1].expand(24)), "the bias is not contiguous"),
    ],
)
def test_the_reason_of_the_library(change, reason):
    assert reason in library_reason(*change(*operands()))
