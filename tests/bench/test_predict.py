"""Predicted times agree with times computed by hand from invented counts."""

from __future__ import annotations

import dataclasses
import os
import shutil

import pytest
import torch

from fastbert.bench.limits import BACKWARD, FORWARD, work
from fastbert.bench.predict import bound, busy, cases, code_for, markdown, predict
from fastbert.gpus import A100, B200, H100, H200, L4
from fastbert.testing.cases import Case
from fastbert.testing.ptx.sample import Launched

BF16 = torch.bfloat16
NORM = Case("layer_norm", "x", (1000, 1000))
ATTENTION = Case("attention", "S512 D64", (32, 16, 512, 512, 64))


def launch(blocks=132, size=0.0, name="kernel", **counts):
    return Launched(name, blocks, blocks, {"tensor_flops": 0, **counts}, size)


def test_each_unit_has_its_rate():
    one = launch(
        tensor_flops=132 * 4096 * 1000,
        mufu=132 * 500,
        shared_wavefronts=132 * 600,
        tensor_shared_bytes=132 * 128 * 400,
        sass_fma=132 * 4000,
        sass_alu=132 * 2000,
        sass_lsu=132 * 1000,
        sass_issue=132 * 4000,
    )
    times = busy(one, H200)
    # Every unit is busy for 1000 clock cycles.
    assert set(times) == {"tensor", "mufu", "shared", "fma", "alu", "lsu", "issue"}
    assert all(time == pytest.approx(1000 / 1.83e9) for time in times.values())
    # An A100 has half as many FP32 units per multiprocessor.
    on_a100 = dataclasses.replace(one, blocks=108)
    assert busy(on_a100, A100)["fma"] == pytest.approx(132 / 108 * 2000 / 1.41e9)


def test_a_multiprocessor_has_whole_blocks():
    counts = {"mufu": 133 * 500}
    # With 133 blocks on 132 multiprocessors, one multiprocessor has two blocks.
    assert busy(launch(133, **counts), H200)["mufu"] == pytest.approx(2 * 1000 / 1.83e9)
    # For an L4, whose grid would differ, and for a library product, blocks are not rounded up.
    assert busy(launch(133, **counts), L4)["mufu"] == pytest.approx(133 / 58 * 1000 / L4.clock)
    assert busy(launch(0, **counts), H200)["mufu"] == pytest.approx(133 / 132 * 1000 / 1.83e9)


def test_launches_run_one_after_another_and_their_units_together():
    launches = [launch(mufu=132 * 500, sass_issue=132 * 400), launch(shared_wavefronts=132 * 3000)]
    limit = bound(NORM, BF16, BACKWARD, launches, H100)
    assert limit.bound == pytest.approx(4000 / 1.83e9)
    assert limit.binds == "shared"
    assert limit.seconds["mufu"] == pytest.approx(1000 / 1.83e9)
    assert limit.launches == ["kernel", "kernel"]


def test_memory_binds_by_the_least_traffic_of_the_operation():
    limit = bound(NORM, BF16, FORWARD, [launch(size=4 * 2e6, mufu=1)], H200)
    assert (limit.binds, limit.unit) == ("memory", "TB/s")
    # The rate is that of the fastest measured copy, not that of the data sheet.
    assert limit.bound == pytest.approx(3 * 2e6 / 4.3e12)
    assert limit.rate == pytest.approx(4.3)
    # The estimate counts the four tensors that this launch moves instead of the minimum of three.
    assert limit.estimate == pytest.approx(4 * 2e6 / 4.3e12)
    assert limit.estimate_rate == pytest.approx(3.225)
    # For a GPU whose copy was not measured, the prediction assumes the same share of the data-sheet
    # rate.
    on_a100 = bound(NORM, BF16, FORWARD, [launch(size=4 * 2e6, mufu=1)], A100)
    assert on_a100.bound == pytest.approx(3 * 2e6 / (2.039e12 * 4.3 / 4.8))
    assert limit.goal == pytest.approx(3.7)


def test_a_launch_with_products_may_read_a_part_of_its_tensors():
    limit = bound(ATTENTION, BF16, FORWARD, [launch(size=1e12, tensor_flops=1)], H200)
    assert limit.estimate == limit.bound
    library = [launch(0, size=1e12, tensor_flops=1)]
    assert bound(ATTENTION, BF16, FORWARD, library, H200).estimate == pytest.approx(1e12 / 4.3e12)


def test_the_issue_of_instructions_is_an_estimate():
    limit = bound(ATTENTION, BF16, FORWARD, [launch(sass_issue=132 * 4e6, tensor_flops=1)], H200)
    assert limit.binds == "memory"
    assert limit.estimate_binds == "issue"
    assert limit.estimate == pytest.approx(1e6 / 1.83e9)
    assert limit.goal == 450


def test_products_take_at_least_the_time_of_the_librarys():
    case = Case("feed_forward", "x", (1024, 768, 3072))
    products = [launch(blocks, tensor_flops=132 * 4096 * 79e4) for blocks in (0, 132)]
    limit = bound(case, BF16, FORWARD, products, H200)
    assert limit.bound == pytest.approx(2 * 79e4 / 1.83e9)
    assert limit.estimate == pytest.approx(2 * 98.9e4 / 1.83e9)
    # If another unit is busier than the matrix units, the other unit is the limit.
    busy_too = dataclasses.replace(products[1], counts=products[1].counts | {"mufu": 132 * 1e6})
    limit = bound(case, BF16, FORWARD, [busy_too], H200)
    assert limit.estimate == limit.bound == pytest.approx(2e6 / 1.83e9)


def test_tcgen05_is_not_invented():
    """On sm_100, a kernel with products gets its operation's bound, not that of sm_90 code."""
    limit = bound(ATTENTION, BF16, FORWARD, [launch(tensor_flops=1, mufu=1)], B200)
    assert "tcgen05" in limit.reason
    least = work(ATTENTION, BF16, FORWARD)
    assert limit.seconds == {
        "tensor": pytest.approx(least.flops / 2.25e15, rel=1e-3),
        "memory": pytest.approx(least.bytes / (8e12 * 4.3 / 4.8)),
    }  # fmt: skip
    assert limit.bound == max(limit.seconds.values())
    assert limit.estimate == 0
    # On sm_100, kernels without products, and products of libraries, are predicted as usual.
    assert not bound(NORM, BF16, FORWARD, [launch(mufu=1)], B200).reason
    assert not bound(NORM, BF16, FORWARD, [launch(0, tensor_flops=1)], B200).reason


def test_the_code_of_each_gpu():
    assert [code_for(gpu) for gpu in (A100, L4, H200, B200)] == [80, 89, 90, 90]


def test_the_shapes_are_those_of_the_goals():
    names = [case.name for case in cases() if case.op == "attention"]
    lengths = (128, 256, 512, 1024, 2048)
    assert names == [f"S{length} D{dim}" for dim in (64, 32, 128) for length in lengths]
    for case in cases():
        if case.op == "attention":
            batch, heads, length, _, dim = case.shape
            assert (batch * length, heads * dim) == (16384, 1024)
    assert len({(case.op, case.name) for case in cases()}) == len(cases())


def test_the_table():
    rows = [
        bound(ATTENTION, BF16, FORWARD, [launch(tensor_flops=1e12)], gpu) for gpu in (H200, B200)
    ]
    text = list(markdown(rows))
    assert "NOT measurements" in text[0]
    assert any(line.startswith("B200: sm_100 code multiplies with tcgen05") for line in text)
    lines = [line for line in text if line.startswith("|")]
    assert lines[0].count("|") == lines[1].count("|") == lines[2].count("|")
    assert lines[2].startswith("| S512 D64 | H200 | 1010.7 |")
    assert lines[2].endswith("| 450 |")
    assert lines[3].startswith("| S512 D64 | B200 | 15.3 | – | – | ")
    assert lines[3].endswith("| – | – | – | – |")


def test_the_interpreter_is_refused(monkeypatch):
    monkeypatch.setattr("fastbert.bench.predict.backends.interpreted", lambda: True)
    with pytest.raises(ValueError, match="TRITON_INTERPRET: got 1, allowed: unset"):
        predict([NORM])


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.skipif("libasan" in os.environ.get("LD_PRELOAD", ""), reason="nvcc crashes with it")
@pytest.mark.every_case
def test_the_cuda_kernels_are_counted():
    pytest.importorskip("triton", reason="its wheel has the disassembler")
    case = Case("attention", "two tiles", (2, 3, 128, 64, 64))
    prediction = predict([case], gpus=(A100,), backend="cuda")
    [forward], [backward] = prediction.launches.values()
    assert (forward.name, forward.blocks) == ("attention_forward.forward_kernel", 6)
    assert (backward.name, backward.blocks) == ("attention_backward.backward_kernel", 6)
    # Each of six heads has two products of 128 queries, 64 keys and 64 dims, with 2 FLOP per term.
    assert forward.counts["tensor_flops"] == 6 * 2 * 2 * 128 * 64 * 64
    # Each of six heads has five products with a block of 128 keys, of which 64 exist.
    assert backward.counts["tensor_flops"] == 6 * 5 * 2 * 128 * 128 * 64
    for launched in (forward, backward):
        assert launched.counts["sass_issue"] > launched.counts["sass_lsu"] > 0
    assert [row.gpu for row in prediction.bounds] == ["A100", "A100"]
    assert not any(row.reason for row in prediction.bounds)


def test_what_the_cuda_kernels_do_not_serve_has_no_bound():
    case = Case("attention", "wide", (1, 1, 8, 8, 80))
    with pytest.raises(ValueError, match="backend: got 'cuda', which cannot be predicted here"):
        predict([case], backend="cuda")
