"""``same_bytes`` compares every byte of contiguous tensors."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("fastbert._C")
same = torch.ops.fastbert_C.same_bytes

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [0, 1, 7, 65_536, 300_001])
def test_one_element_of_another_value_is_found(dtype, size):
    tensors = [torch.zeros(size, dtype=dtype), torch.zeros(3, dtype=dtype)]
    copies = [tensor.clone() for tensor in tensors]
    assert same(tensors, copies)
    for place in {0, size // 2, size - 1} if size else ():
        copies[0][place] = 1
        assert not same(tensors, copies)
        copies[0][place] = 0
        assert same(tensors, copies)
    copies[1][2] = 1
    assert not same(tensors, copies)


def test_values_that_compare_equal_may_have_other_bytes():
    zero, nan = torch.tensor([0.0]), torch.tensor([torch.nan])
    assert not same([zero], [-zero])
    assert same([nan], [nan.clone()])


def test_dtypes_shapes_and_strides():
    ones = torch.ones(4, 4)
    assert not same([ones], [ones.view(torch.int32)])
    assert not same([ones], [ones.view(2, 8)])
    numbers = torch.arange(12.0).view(3, 4)
    assert same([numbers.t()], [numbers.t().clone()])
    assert same([numbers.t()], [numbers.t().contiguous()])
    assert not same([numbers[:, 1:]], [numbers[:, :3]])
    with pytest.raises(ValueError, match=r"^b: got 0 tensors, allowed: 1"):
        same([ones], [])
