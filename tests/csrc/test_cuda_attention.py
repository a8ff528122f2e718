"""The CUDA C++ attention kernels are right when the PTX machine runs the PTX that nvcc compiles."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from _nvcc import require_nvcc

from fastbert import ops, reference
from fastbert.ops import backend as backends
from fastbert.testing.compare import assert_close
from fastbert.testing.ptx import cuda_operators
from fastbert.testing.yardstick import Yardstick

# nvcc needs a minute to compile these kernels for sm_80; `make test` runs the kernels for sm_90.
pytestmark = pytest.mark.every_case

NAMES = ("out", "dq", "dk", "dv")
SEED = torch.tensor([0x0123456789ABCDEF])


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    require_nvcc()
    return cuda_operators.CompiledOperators(tmp_path_factory.mktemp("cuda"), 80)


@pytest.fixture
def operators(compiled):
    compiled.options = {}
    compiled.compiled.reports.clear()
    with cuda_operators.serving_cuda(compiled):
        yield compiled


def drawn(batch, heads, queries, keys, dim, dtype=torch.bfloat16, seed=0):
    """Return random q, k and v, and a random gradient dout of the output."""
    generator = torch.Generator().manual_seed(seed)
    lengths = (queries, keys, keys, queries)
    return [
        torch.randn(batch, n, heads, dim, generator=generator).to(dtype).transpose(1, 2)
        for n in lengths
    ]


def solve(function, tensors, dtype=None, **options):
    """Return the output and the gradients dq, dk and dv of `function`."""
    *inputs, dout = tensors
    leaves = [x.detach().to(dtype or x.dtype).requires_grad_() for x in inputs]
    out = function(*leaves, **options)
    out.backward(dout.to(out.dtype))
    return [out.detach(), *(x.grad for x in leaves)]


def check(tensors, **options):
    actual = solve(ops.attention, tensors, backend="cuda", **options)
    oracle = solve(reference.attention, tensors, torch.float64, **options)
    yardstick = Yardstick(lambda: solve(reference.attention, tensors, **options))
    for i, name in enumerate(NAMES):
        assert_close(f"attention {name}", actual[i], oracle[i], yardstick[i])


def masks(form, batch, heads, queries, keys):
    shape = {"keys": (batch, keys), "rows": (batch, 1, queries, keys), "heads": (heads, 1, keys)}
    mask = torch.rand(shape[form], generator=torch.Generator().manual_seed(1)) > 0.4
    mask.view(-1, keys)[0] = False
    return mask


@pytest.mark.parametrize("dropout_p", [0.0, 0.2])
@pytest.mark.parametrize("form", [None, "keys", "rows", "heads"])
@pytest.mark.parametrize("dim", [32, 64, 128])
def test_against_float64(operators, dim, form, dropout_p):
    dtype = torch.float16 if dim == 64 else torch.bfloat16
    options = {"dropout_p": dropout_p, "dropout_seed": SEED} if dropout_p else {}
    if form:
        options["mask"] = masks(form, 2, 2, 70, 150)
    check(drawn(2, 2, 70, 150, dim, dtype), **options)


@pytest.mark.parametrize("sizes", [(1, 97), (129, 1), (128, 128), (31, 33), (140, 300)])
def test_lengths(operators, sizes):
    check(drawn(1, 2, *sizes, 64), scale=0.3)


@pytest.mark.parametrize("sizes", [(0, 5), (5, 0), (0, 0)])
def test_no_queries_or_no_keys(operators, sizes):
    for result in solve(ops.attention, drawn(2, 2, *sizes, 64), backend="cuda"):
        assert (result == 0).all()


@pytest.mark.parametrize("sign", [-1.0, 1.0])
@pytest.mark.parametrize("dim", [32, 64, 128])
def test_the_softmax_of_a_single_key_is_1(operators, dim, sign):
    """The weight of a single key is 1, even if the score of this key is far below or above 0."""
    q, k, v, _ = drawn(1, 2, 129, 1, dim)
    out = ops.attention(10 * q.abs(), 10 * sign * k.abs(), v, backend="cuda")
    assert torch.equal(out, v.expand_as(out))


def test_the_gradient_of_a_single_key_is_0(operators):
    _, dq, dk, _ = solve(ops.attention, drawn(1, 2, 40, 1, 64), backend="cuda")
    assert (dq == 0).all()
    assert (dk == 0).all()


@pytest.mark.parametrize("form", ["keys", "rows"])
def test_rows_without_a_key_and_poisoned_keys(operators, form):
    tensors = drawn(2, 2, 40, 70, 64)
    mask = torch.ones(2, 1, 40, 70, dtype=torch.bool)
    mask[0] = False
    mask[1, ..., 50:] = False
    if form == "keys":
        mask = mask[:, 0, 0]
    clean = solve(ops.attention, tensors, backend="cuda", mask=mask)
    assert (clean[0][0] == 0).all()
    assert (clean[1][0] == 0).all()
    for x in tensors[1:3]:
        x[0] = torch.nan
        x[1, :, 50:] = torch.nan
    for name, a, b in zip(
        NAMES, clean, solve(ops.attention, tensors, backend="cuda", mask=mask), strict=True
    ):
        assert torch.equal(a, b), name


def packed(lengths, slack=0, heads=2, dim=64):
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(sum(lengths) + slack, 4, heads, dim, generator=generator).bfloat16()
    ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    return list(rows.unbind(1)), ends


@pytest.mark.parametrize("lengths", [(33, 0, 129, 1, 70), (0, 64), (200,)])
def test_packed_sequences_are_dense_ones_bit_for_bit(operators, lengths):
    tensors, ends = packed(lengths, slack=9)
    for x in tensors:
        x[ends[-1] :] = torch.nan
    together = solve(
        lambda q, k, v: ops.attention_varlen(
            q, k, v, ends, max_seqlen_q=max(lengths), max_seqlen_k=max(lengths), backend="cuda"
        ),
        tensors,
    )
    for first, length in zip(ends.tolist(), lengths, strict=False):
        rows = slice(first, first + length)
        alone = [x[None, rows].transpose(1, 2) for x in tensors]
        for name, a, b in zip(
            NAMES, together, solve(ops.attention, alone, backend="cuda"), strict=True
        ):
            assert torch.equal(a[rows], b[0].transpose(0, 1)), name
    for name, a in zip(NAMES, together, strict=True):
        assert (a[ends[-1] :] == 0).all(), name


def test_rows_of_no_sequence_are_0_also_without_any_query(operators):
    q, k, v = torch.full((3, 5, 2, 64), torch.nan, dtype=torch.bfloat16).unbind(0)
    none = torch.zeros(3, dtype=torch.int32)
    out = ops.attention_varlen(q, k, v, none, none, 0, 0, backend="cuda")
    assert (out == 0).all()


@pytest.mark.parametrize("order", [1, 2, 3, 11])
def test_any_order_of_warps_gives_the_same_bits(operators, order):
    options = {"mask": masks("rows", 1, 2, 90, 200), "dropout_p": 0.1, "dropout_seed": SEED}
    tensors = drawn(1, 2, 90, 200, 64)
    expected = solve(ops.attention, tensors, backend="cuda", **options)
    operators.options = {"seed": order}
    for name, a, b in zip(
        NAMES, expected, solve(ops.attention, tensors, backend="cuda", **options), strict=True
    ):
        assert torch.equal(a, b), name


def test_one_tensor_and_odd_addresses(operators):
    tensors, _ = packed((60,))
    dense = [x[None].transpose(1, 2) for x in tensors]
    expected = solve(ops.attention, dense, backend="cuda")
    moved = [torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape) for x in dense]
    for name, a, b in zip(
        NAMES, expected, solve(ops.attention, moved, backend="cuda"), strict=True
    ):
        assert torch.equal(a, b), name
    qkv = torch.stack(tensors[:3], 1)[None].requires_grad_()
    out = ops.attention_qkvpacked(qkv, backend="cuda")
    out.backward(tensors[3][None])
    assert torch.equal(out.transpose(1, 2), expected[0])
    for i in range(3):
        assert torch.equal(qkv.grad[:, :, i].transpose(1, 2), expected[1 + i])


@pytest.mark.parametrize("dim", [32, 64, 128])
def test_shared_memory_has_no_bank_conflicts_and_whole_sectors_move(operators, dim):
    solve(ops.attention, drawn(1, 1, 128, 256, dim), backend="cuda")
    forward, backward = [report.counts for _, report in operators.compiled.reports]
    assert forward["shared_wavefronts"] == forward["shared_least_wavefronts"]
    assert forward["global_sectors"] == forward["global_least_sectors"]
    # The backward reads and writes slightly more sectors than the minimum, because it computes
    # delta from rows of out and dout, and stores dq in halves of sectors.
    assert backward["shared_wavefronts"] <= 1.03 * backward["shared_least_wavefronts"]
    assert backward["global_sectors"] <= 1.1 * backward["global_least_sectors"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"causal": True}, "do not serve window"),
        ({"bias": torch.zeros(8, 8)}, "do not serve bias"),
        ({"scale": 0.0}, "do not serve scale"),
        ({"return_weights": True}, "do not serve weights"),
    ],
)
def test_what_the_kernels_do_not_serve_is_refused(operators, options, message):
    q, k, v, _ = drawn(1, 1, 8, 8, 64)
    with pytest.raises(ValueError, match=f"'cuda' cannot serve attention: .*{message}"):
        ops.attention(q, k, v, backend="cuda", **options)


def test_a_model_that_prefers_cuda_lets_attention_choose():
    assert backends.prefer("attention", "cuda") is None
    assert backends.prefer("layer_norm", "cuda") == "cuda"
    request = backends.Request("cuda", torch.float16, head_dim=80)
    assert backends.TABLES["attention"]["cuda"].refuses(request) == (
        "the head dim is 80, allowed: 32, 64, 128"
    )
