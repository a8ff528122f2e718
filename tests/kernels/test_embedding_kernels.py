"""The embedding launchers agree with the reference by the tolerance rule."""

from __future__ import annotations

import itertools

import pytest
import torch
from kernel_cases import BRAIN, HALF, SINGLE, judge, kept, normal, seed_tensor

from fastbert import ops, reference
from fastbert.kernels.embedding import embedding_backward, embedding_forward, table_gradients

EPS = 1e-12
NAMES = "y dword_table dtype_table dposition_table dweight dbias"


def make(tokens, vocabulary, columns, dtype, device, *, positions=48, index=torch.int64):
    """Return random indices with repetitions, random tables and random parameters."""
    ids = torch.randint(0, vocabulary, (tokens,))
    ids[::3] = vocabulary - 1
    types = torch.randint(0, 2, (tokens,))
    indices = [i.to(device, index) for i in (ids, types, torch.arange(tokens) % positions)]
    shapes = ((vocabulary, columns), (2, columns), (positions, columns))
    tables = [normal(*shape, dtype=dtype, device=device) for shape in shapes]
    weight, bias = (normal(columns, dtype=dtype, device=device) for _ in range(2))
    return indices, tables, weight, bias


def run(indices, tables, weight, bias, dy, *, p=0.0, seed=None, padding_idx=-1):
    """Return the launchers' results in the order of NAMES, without those of absent parameters."""
    options = {"dropout_p": p, "seed": seed}
    y, mean, rstd = embedding_forward(indices, tables, weight, bias, eps=EPS, **options)
    gradients = embedding_backward(
        dy, indices, tables, weight, mean, rstd,
        has_bias=bias is not None, padding_idx=padding_idx, **options,
    )  # fmt: skip
    given = (*tables, weight, bias)
    assert [g is None for g in gradients] == [t is None for t in given]
    return [y, *(g for g in gradients if g is not None)]


def check(indices, tables, weight, bias, dy, *, p=0.0, padding_idx=-1):
    seed = seed_tensor(str(dy.device))
    options = {"p": p, "seed": seed, "padding_idx": padding_idx}
    actual = run(indices, tables, weight, bias, dy, **options)

    def function(words, types, positions, weight, bias):
        return reference.embedding(
            *(None if i is None else i.cpu() for i in indices), words, types, positions, weight,
            bias, eps=EPS, dropout_p=p, dropout_seed=seed.cpu(),
            padding_idx=None if padding_idx < 0 else padding_idx,
        )  # fmt: skip

    given = [*tables, weight, bias]
    present = [t is not None for t in (dy, *given)]
    names = " ".join(itertools.compress(NAMES.split(), present))
    judge(names, actual, function, given, dy)
    return actual


@pytest.mark.parametrize(
    ("tokens", "vocabulary", "columns", "dtype", "p", "padding_idx", "index"),
    [
        (40, 23, 96, SINGLE, 0.0, 0, torch.int64),
        (37, 300, 111, SINGLE, 0.3, -1, torch.int32),
        (9, 12, 768, SINGLE, 0.1, 3, torch.int64),
        (6, 12, 1023, HALF, 0.1, -1, torch.int64),
        (70, 23, 40, HALF, 0.0, 0, torch.int32),
        (17, 5, 384, BRAIN, 0.1, 0, torch.int64),
        (150, 30, 16, BRAIN, 0.0, -1, torch.int64),
        (1, 1, 130, SINGLE, 0.0, -1, torch.int64),
    ],
)
def test_against_oracle(tokens, vocabulary, columns, dtype, p, padding_idx, index, device):
    inputs = make(tokens, vocabulary, columns, dtype, device, index=index)
    dy = normal(tokens, columns, dtype=dtype, device=device)
    check(*inputs, dy, p=p, padding_idx=padding_idx)


@pytest.mark.parametrize("dtype", [SINGLE, HALF])
@pytest.mark.parametrize(
    ("types", "positions", "biased"),
    [(False, False, False), (True, False, True), (False, True, False)],
)
def test_absent_tables_and_bias(types, positions, biased, dtype, device):
    indices, tables, weight, bias = make(70, 23, 48, dtype, device)
    present = (True, types, positions)
    indices, tables = (
        [t if there else None for t, there in zip(three, present, strict=True)]
        for three in (indices, tables)
    )
    dy = normal(70, 48, dtype=dtype, device=device)
    check(indices, tables, weight, bias if biased else None, dy, p=0.2, padding_idx=0)


@pytest.mark.every_case
@pytest.mark.parametrize("dtype", [SINGLE, BRAIN])
def test_one_run_of_all_tokens(dtype, device):
    """Gradients are right if all ids are equal, so that one run of ids spans many sorted chunks."""
    tokens = 200
    indices, tables, weight, bias = make(tokens, 7, 24, dtype, device, positions=200)
    indices[0].fill_(4)
    indices[1].zero_()
    dy = normal(tokens, 24, dtype=dtype, device=device)
    _, dword, dtypes, *_ = check(indices, tables, weight, bias, dy)
    assert torch.count_nonzero(dword[:4]) == 0
    assert torch.count_nonzero(dtypes[1]) == 0


def test_a_run_from_one_chunk_boundary_to_the_next(device):
    """Gradients are right if runs of equal ids end exactly at chunks, which have 16 ids in fp32."""
    ids = torch.tensor([0] * 16 + [1] * 32 + [2] * 15 + [3] * 2 + [4] * 15 + [5], device=device)
    _, tables, weight, bias = make(ids.numel(), 6, 16, SINGLE, device)
    zeros = torch.zeros_like(ids)
    dy = normal(ids.numel(), 16, dtype=SINGLE, device=device)
    check([ids, zeros, zeros], tables, weight, bias, dy)


def test_rows_without_a_token_and_the_padding_row_are_exactly_zero(device):
    indices, tables, weight, bias = make(30, 50, 48, SINGLE, device)
    ids = indices[0]
    ids.copy_(torch.randint(0, 25, (30,)) * 2)
    ids[3] = 6
    dy = normal(30, 48, dtype=SINGLE, device=device)
    _, dword, _, dpositions, *_ = run(indices, tables, weight, bias, dy, padding_idx=6)
    named = torch.zeros(50, dtype=torch.bool).index_fill(0, ids.cpu(), True)
    named[6] = False
    assert torch.equal((dword != 0).any(dim=1).cpu(), named)
    assert torch.count_nonzero(dpositions[30:]) == 0
    everything = run(indices, tables, weight, bias, dy)
    torch.testing.assert_close(everything[1][named.to(device)], dword[named.to(device)])
    assert torch.count_nonzero(everything[1][6]) > 0


@pytest.mark.parametrize("dtype", [SINGLE, BRAIN])
def test_small_integers_are_summed_exactly(dtype, device):
    """Sums of small integers are exact, which shows that no row is lost or added twice."""
    tokens, columns = 150, 24
    indices, tables, _, _ = make(tokens, 40, columns, dtype, device, positions=20)
    dsum = torch.randint(-1, 2, (tokens, columns), device=device).to(dtype)
    got = table_gradients(dsum, indices, tables)
    for gradient, table, index in zip(got, tables, indices, strict=True):
        expected = torch.zeros_like(table, dtype=SINGLE).index_add(0, index, dsum.float())
        assert torch.equal(gradient.float(), expected)


@pytest.mark.parametrize("dtype", [SINGLE, HALF])
def test_an_id_out_of_range_is_a_row_of_nan_and_reads_nothing(dtype, device):
    indices, tables, weight, bias = make(12, 10, 48, dtype, device)
    clean = embedding_forward(indices, tables, weight, bias, eps=EPS)[0]
    indices[0][2], indices[1][5], indices[2][7] = 10**12, -1, 48
    dy = normal(12, 48, dtype=dtype, device=device)
    y, dword, *_ = run(indices, tables, weight, bias, dy)
    wrong = torch.zeros(12, dtype=torch.bool, device=device)
    wrong[[2, 5, 7]] = True
    assert y[wrong].isnan().all()
    assert torch.equal(y[~wrong], clean[~wrong])
    assert dword.shape == (10, 48)


def test_strided_indices_tables_and_gradient(device):
    """Strided indices, sliced or unaligned tables, and dy with any strides give right results."""
    indices, tables, weight, bias = make(20, 11, 111, SINGLE, device)
    dy = normal(20, 111, dtype=SINGLE, device=device)
    stacked = torch.stack(indices, dim=1)
    wide = torch.zeros(11, 250, device=device)
    wide[:, 1:112] = tables[0]
    shifted = torch.zeros(2 * 111 + 1, device=device)
    shifted[1:] = tables[1].flatten()
    views = [wide[:, 1:112], shifted[1:].view(2, 111), tables[2]]
    for gradient in (dy.t().contiguous().t(), dy[:1, :1].expand(20, 111)):
        check(stacked.unbind(1), views, weight, bias, gradient)


def test_dropout_is_the_defined_philox_after_the_norm(device):
    tokens, columns, p, seed = 21, 70, 0.3, -12345678901234567
    indices, tables, weight, bias = make(tokens, 9, columns, SINGLE, device)
    arguments = (indices, tables, weight, bias)
    plain = embedding_forward(*arguments, eps=EPS)[0]
    options = {"eps": EPS, "dropout_p": p, "seed": seed_tensor(device, seed)}
    keep = kept(seed, p, (1, 1, tokens, columns))[0, 0].to(device)
    y = embedding_forward(*arguments, **options)[0]
    assert torch.equal(y != 0, keep)
    torch.testing.assert_close(y, torch.where(keep, plain / (1 - p), 0.0))


def test_dropout_of_everything(device):
    inputs = make(9, 5, 32, SINGLE, device)
    dy = normal(9, 32, dtype=SINGLE, device=device)
    for tensor in run(*inputs, dy, p=1.0, seed=seed_tensor(device)):
        assert torch.count_nonzero(tensor) == 0


@pytest.mark.parametrize("dtype", [SINGLE, HALF])
def test_reruns_agree_bitwise(dtype, device):
    inputs = make(50, 20, 24, dtype, device)
    dy = normal(50, 24, dtype=dtype, device=device)
    options = {"p": 0.2, "seed": seed_tensor(device)}
    first, second = (run(*inputs, dy, **options) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_large_means_and_constant_rows(device):
    indices, tables, weight, bias = make(12, 6, 768, SINGLE, device)
    tables[0] += 1e4
    tables[0][0], tables[1][0], tables[2][0] = 3.3, -1e4, 0.0
    indices[0][0] = indices[1][0] = indices[2][0] = 0
    dy = normal(12, 768, dtype=SINGLE, device=device)
    outputs = run(indices, tables, weight, bias, dy)
    assert all(torch.isfinite(t).all() for t in outputs)


def test_no_token(device):
    inputs = make(0, 5, 16, SINGLE, device)
    y, *gradients = run(*inputs, torch.empty(0, 16, device=device))
    assert y.shape == (0, 16)
    assert all(torch.count_nonzero(g) == 0 for g in gradients)
    assert [tuple(g.shape) for g in gradients] == [(5, 16), (2, 16), (48, 16), (16,), (16,)]


def test_parameters_of_another_dtype(device):
    indices, tables, _, _ = make(10, 5, 48, BRAIN, device)
    weight, bias = (normal(48, dtype=SINGLE, device=device) for _ in range(2))
    outputs = run(indices, tables, weight, bias, normal(10, 48, dtype=BRAIN, device=device))
    assert [t.dtype for t in outputs] == [BRAIN] * 4 + [SINGLE] * 2


def test_errors_name_the_argument(device):
    indices, tables, weight, bias = make(4, 5, 32, SINGLE, device)
    turned = [tables[0], tables[1].t().contiguous().t(), tables[2]]
    with pytest.raises(ValueError, match="type_table: got last stride"):
        embedding_forward(indices, turned, weight, bias, eps=EPS)
    with pytest.raises(ValueError, match="seed: got None"):
        embedding_forward(indices, tables, weight, bias, dropout_p=0.5, eps=EPS)
    with pytest.raises(ValueError, match=r"position_table: got torch\.float16"):
        ops.embedding(*indices, *tables[:2], tables[2].half(), weight, bias)
