"""The machine code of attention for Hopper GPUs has the expected units, order and loop lengths."""

from __future__ import annotations

import re
from collections import Counter

import _machine_code
import pytest
from _nvcc import require_nvcc

from fastbert.testing.ptx import hopper_attention
from fastbert.testing.wgmma_hazards import overwritten_operands

# ptxas needs half a minute to compile these kernels.
pytestmark = pytest.mark.every_case


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return the temporary folder that contains the compiled kernels."""
    require_nvcc()
    pytest.importorskip("triton", reason="its wheel has cuobjdump")
    return tmp_path_factory.mktemp("code")


@pytest.fixture(scope="module")
def kernels(folder):
    """Return the disassembled forward kernels by dtype, head dim, mask of pairs and dropout."""
    return hopper_attention.machine_code(folder)


@pytest.mark.parametrize("dim", [32, 64, 128])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("dropout", [False, True])
def test_kernels_use_the_units_of_hopper(kernels, dtype, dim, pairs, dropout):
    text = kernels[dtype, dim, pairs, dropout]
    for name in ("HGMMA", "UTMALDG.5D", "UTMASTG.5D", "USETMAXREG", "STSM"):
        assert name in text, name
    for name in (" HMMA", "LDSM", "LDL", "STL"):
        assert name not in text, name
    assert overwritten_operands(text) == []


@pytest.mark.parametrize("dim", [32, 64, 128])
@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("dropout", [False, True])
def test_the_softmax_runs_while_a_product_is_in_flight(kernels, dim, pairs, dropout):
    """The wait for a product comes after the exponentials, so product and softmax overlap."""
    code = hopper_attention.loop_over_tiles(kernels["bfloat16", dim, pairs, dropout])
    body = [instruction.text for instruction in code]
    waits = [i for i, op in enumerate(body) if op.startswith("WARPGROUP.DEPBAR")]
    exponentials = [i for i, op in enumerate(body) if op.startswith("MUFU.EX2")]
    assert "0x1" in body[waits[0]]
    assert all("0x0" in body[i] for i in waits[1:])
    assert waits[0] < exponentials[0]
    assert exponentials[-1] < waits[1]


@pytest.mark.parametrize(("dim", "limit"), [(32, 470), (64, 475), (128, 500)])
def test_a_tile_has_few_instructions(kernels, dim, limit):
    """A tile has so few instructions that two warps fit into the 928 cycles of its exponentials."""
    code = hopper_attention.path_of_a_tile(kernels["bfloat16", dim, False, False])
    path = Counter(instruction.name for instruction in code)
    print(path.total(), dict(path))
    assert path["HGMMA"] == dim // 16 + 8
    # A polynomial computes an eighth of the 64 exponentials, and two exponentials rescale the sums.
    assert path["MUFU"] == 58
    assert path.total() <= limit


@pytest.fixture(scope="module")
def backward(folder):
    """Return the disassembled kernels of the backward for every head dim."""
    wide = hopper_attention.machine_code(folder, "backward_wide")
    return hopper_attention.machine_code(folder, "backward") | wide


@pytest.mark.parametrize("direction", ["kernels", "backward"])
def test_a_block_takes_no_more_registers_than_it_owns(direction, request):
    """The groups of warps of a block take no more registers than the first group releases.

    Otherwise, a group would wait forever for registers. ptxas assigns 168 registers to each of the
    384 threads, which form three groups.
    """
    for name, text in request.getfixturevalue(direction).items():
        [given] = re.findall(r"USETMAXREG\.DEALLOC\.CTAPOOL (0x[0-9a-f]+)", text)
        [taken] = re.findall(r"USETMAXREG\.TRY_ALLOC\.CTAPOOL \w+, (0x[0-9a-f]+)", text)
        assert int(given, 16) + 2 * int(taken, 16) <= 3 * 168, name


def test_registers_and_shared_memory_are_those_of_the_record(kernels, backward, folder):
    for direction, texts in (("forward", kernels), ("backward", backward)):
        results = {}
        for binary in sorted(folder.glob(f"attention_{direction}*.cubin")):
            results |= _machine_code.resources(binary)
        # The kernels for fp16 and for bf16 have a common entry in machine_code.json.
        assert (len(results), len(texts)) == (12, 24)
        assert results == _machine_code.recorded("90a", f"attention {direction}")


@pytest.mark.parametrize("dim", [32, 64, 128])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("dropout", [False, True])
def test_the_backward_uses_the_units_of_hopper(backward, dtype, dim, pairs, dropout):
    text = backward[dtype, dim, pairs, dropout]
    for name in ("HGMMA", "UTMALDG.5D", "USETMAXREG", "STSM"):
        assert name in text, name
    for name in (" HMMA", "LDL", "STL"):
        assert name not in text, name
    assert overwritten_operands(text) == []


@pytest.mark.parametrize("dim", [32, 64])
@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("dropout", [False, True])
def test_the_weights_are_computed_while_gradients_are_in_flight(backward, dim, pairs, dropout):
    code = hopper_attention.loop_over_tiles(backward["bfloat16", dim, pairs, dropout])
    body = [instruction.text for instruction in code]
    waits = [i for i, op in enumerate(body) if op.startswith("WARPGROUP.DEPBAR")]
    # The waits are, in order, for the scores, for the gradients of the weights, and for the
    # gradients of the previous tile.
    assert [body[i][-1] for i in waits] == ["3", "2", "0"]
    last_product = max(i for i, op in enumerate(body) if op.startswith("HGMMA"))
    exponentials = [i for i, op in enumerate(body) if op.startswith("MUFU.EX2")]
    differences = [i for i, op in enumerate(body) if op.startswith("FADD")]
    assert last_product < waits[0] < exponentials[0]
    assert max(*exponentials, *differences) < waits[2]


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("dropout", [False, True])
def test_arithmetic_of_head_dim_128_has_a_product_in_flight(backward, pairs, dropout):
    code = hopper_attention.loop_over_tiles(backward["bfloat16", 128, pairs, dropout])
    body = [instruction.text for instruction in code]

    def places(start):
        return [i for i, op in enumerate(body) if op.startswith(start)]

    scores, weights, queries, last = places("WARPGROUP.DEPBAR")
    assert [body[i][-1] for i in (scores, weights, queries, last)] == ["1", "1", "1", "0"]
    # The weights are computed during the product of their gradients, and the gradients of the
    # scores during the product of dv. dq is stored during the product of dk.
    products = places("HGMMA")
    assert sum(i < scores for i in products) == 16
    assert sum(i < weights for i in products) == 20
    assert scores < places("MUFU.EX2")[0]
    assert places("MUFU.EX2")[-1] < weights < min(places("FADD"))
    # The other additions belong to the sums of dq.
    assert max(places("FADD")[31], *places("STSM")) < products[20]
    assert products[-1] < queries < min(places("STG")) < max(places("STG")) < last


def test_a_tile_of_head_dim_128_has_few_instructions(backward):
    """A scheduler can issue a tile for two warps within the 2,560 cycles of its products."""
    code = hopper_attention.path_of_a_tile(backward["bfloat16", 128, False, False])
    path = Counter(instruction.name for instruction in code)
    print(path.total(), dict(path))
    # Three products have eight steps of 16 each, and dv and dk have four steps each.
    assert path["HGMMA"] == 3 * 8 + 2 * 4
    assert path["MUFU"] == 32
    assert path.total() <= 475


def test_a_tile_of_the_backward_has_few_instructions(backward):
    """A scheduler can issue a tile for two warps within the 1,280 cycles of its products."""
    code = hopper_attention.path_of_a_tile(backward["bfloat16", 64, False, False])
    path = Counter(instruction.name for instruction in code)
    print(path.total(), dict(path))
    # Four products have four steps of 16 each, and dq has eight steps.
    assert path["HGMMA"] == 4 * 4 + 8
    assert path["MUFU"] == 32
    assert path.total() <= 450


def test_two_tiles_of_the_backward_of_head_dim_32_have_few_instructions(backward):
    """A scheduler can issue two tiles for two warps while shared memory is busy, for 1,700 cycles.

    A group of warps computes dq for only one of the two tiles.
    """
    code = hopper_attention.path_of_a_tile(backward["bfloat16", 32, False, False])
    path = Counter(instruction.name for instruction in code)
    print(path.total(), dict(path))
    # Four products have two or four steps of 16, dq has eight steps, and one product is empty.
    assert path["HGMMA"] == 2 * (2 * 2 + 2 * 4 + 1) + 8
    assert path["MUFU"] == 2 * 32
    assert path.total() <= 860
