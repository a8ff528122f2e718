"""The shortest times and the goals of operations agree with figures that were computed by hand."""

from __future__ import annotations

import pytest
import torch

from fastbert.bench.limits import (
    BACKWARD,
    FORWARD,
    GOALS,
    H100,
    H200,
    Goal,
    Work,
    attention_goal,
    limits_of,
    work,
)
from fastbert.gpus import GPUS
from fastbert.testing.cases import Case

BF16 = torch.bfloat16


@pytest.mark.parametrize(("length", "tflops"), [(128, 307), (256, 614)])
def test_attention_is_bound_by_memory_at_short_lengths(length, tflops):
    case = Case("attention", "x", (16384 // length, 16, length, length, 64))
    done = work(case, BF16, FORWARD)
    assert done.memory_bound_tflops(H200) == pytest.approx(tflops, rel=1e-2)
    assert done.bound_by(H200) == "memory"
    assert attention_goal(FORWARD, length, 64).value == pytest.approx(0.8 * tflops, rel=1e-2)


def test_attention_is_bound_by_products_from_412_keys():
    for length, bound in ((384, "memory"), (512, "products")):
        done = work(Case("attention", "x", (1, 16, length, length, 64)), BF16, FORWARD)
        # By the rates of data sheets, products are the limit from 412 keys on; by measured rates,
        # from slightly fewer keys on.
        paper = {"memory": done.bytes / H200.bytes, "products": done.flops / H200.flops}
        assert max(paper, key=paper.get) == bound


def test_exponentials_and_products_one_after_another():
    done = work(Case("attention", "x", (8, 16, 512, 512, 64)), BF16, FORWARD)
    seconds = done.flops / H200.flops + done.exponentials / H200.exponentials
    assert done.flops / seconds / 1e12 == pytest.approx(495, rel=0.02)


def test_packed_work_is_the_dense_work_of_equal_lengths():
    dense = work(Case("attention", "x", (4, 16, 128, 128, 64)), BF16, BACKWARD)
    packed = work(Case("attention_varlen", "x", ((128,) * 4, 16, 64)), BF16, BACKWARD)
    assert packed == dense


def test_bytes_of_a_layer_norm():
    size = 100 * 64 * 2
    plain = Case("layer_norm", "x", (100, 64))
    dropped = Case("layer_norm", "x", (100, 64), {"dropout_p": 0.1})
    assert work(plain, BF16, FORWARD).bytes == 3 * size
    assert work(plain, BF16, BACKWARD).bytes == 3 * size
    assert work(dropped, BF16, BACKWARD).bytes == 4 * size


def test_the_loss_is_counted_on_labelled_rows():
    done = work(Case("linear_cross_entropy", "x", (1000, 64, 300)), BF16, FORWARD)
    assert done.flops == pytest.approx(2 * 150 * 64 * 300)


def test_bytes_of_an_embedding():
    case = Case("embedding", "x", (100, 50, 64))
    assert work(case, BF16, FORWARD).bytes == 2 * 100 * 64 * 2
    assert work(case, BF16, BACKWARD).bytes == (2 * 100 + 50) * 64 * 2


def test_the_backward_of_a_product_is_two_products():
    case = Case("feed_forward", "x", (128, 64, 256))
    assert work(case, BF16, BACKWARD).flops == 2 * work(case, BF16, FORWARD).flops


def test_the_floor_is_the_slowest_unit():
    assert Work(flops=790e12, bytes=2 * 4.3e12).floor(H200) == pytest.approx(2.0)


def test_goals():
    assert Goal(450, "TFLOP/s").reached(225) == 0.5
    assert Goal(0.4, "ms", lower_is_better=True).reached(0.8) == 0.5
    assert attention_goal(FORWARD, 512, 64) == GOALS["attention forward S512 D64"]
    assert attention_goal(FORWARD, 512, 32) is None
    assert attention_goal(BACKWARD, 128, 64) is None


def test_the_limits_of_a_gpu_go_by_its_name():
    assert limits_of("NVIDIA H200") is H200
    assert limits_of("NVIDIA H100 80GB HBM3") is H100
    assert limits_of("NVIDIA A100-SXM4-80GB") is None
    # The PCIe H100 and the H100 of a Grace Hopper have other rates.
    assert limits_of("NVIDIA H100 PCIe") is None
    assert limits_of("NVIDIA GH200 480GB") is None
    assert limits_of(None) is None


def test_the_rates_of_the_table_of_gpus_are_those_of_the_data_sheets():
    """Multiprocessors × clock × FLOP per clock gives the dense TFLOP/s of the data sheets."""
    sheets = {"A100": 312, "L4": 121, "RTX 4090": 165.2, "H100": 989.4, "H200": 989.4, "B200": 2250}
    assert {gpu.name for gpu in GPUS} == set(sheets)
    for gpu in GPUS:
        assert gpu.flops / 1e12 == pytest.approx(sheets[gpu.name], rel=3e-3), gpu.name
    assert H100.flops == H200.flops
    assert H100.measured_bytes < H100.bytes
