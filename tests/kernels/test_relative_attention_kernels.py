"""Attention with relative terms is within tolerance in Triton, and has exact properties."""

from __future__ import annotations

import math

import pytest
import torch
from kernel_cases import BRAIN, HALF, SINGLE, kept, normal
from quick_cases import long_case

from fastbert import ops, reference
from fastbert.kernels import relative_tables, relative_terms
from fastbert.kernels.tiles import Tile
from fastbert.testing.compare import compare_all
from fastbert.testing.yardstick import Yardstick

TABLES = ("position_keys", "position_queries", "position_bias")
TERMS = (*TABLES, "segment_scores")
FLOATING = ("q", "k", "v", *TERMS)
SEED = 0x0123_4567_89AB_CDEF
DROPOUT = {"dropout_p": 0.3, "dropout_seed": torch.tensor([SEED])}


def cumulative(lengths) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def draw(
    queries,
    keys=None,
    dtype=SINGLE,
    *,
    batch=2,
    heads=2,
    dim=16,
    positions=24,
    terms=TERMS,
    slack=0,
    **options,
) -> dict:
    """Draw the arguments of a call on the CPU.

    Args:
        queries: Length of dense sequences, or the lengths of packed sequences.
        keys: Length or lengths of the keys, as `queries`; None means the same as `queries`.
        dtype: Dtype of all floating tensors.
        batch: Number of dense sequences.
        heads: Number of heads.
        dim: Head dimension.
        positions: Number of rows of the tables.
        terms: The terms that are not None.
        slack: Number of rows after the last packed sequence.
        options: Further arguments of the operation.
    """
    keys = queries if keys is None else keys
    if isinstance(queries, int):
        given = {"cu_seqlens_q": None, "cu_seqlens_k": None}
        longest = max(queries, keys, 1)
        of_queries, of_keys = (batch, queries), (batch, keys)
        shapes = [(batch, heads, rows, dim) for rows in (queries, keys, keys)]
    else:
        given = {"cu_seqlens_q": cumulative(queries), "cu_seqlens_k": cumulative(keys)}
        longest = max((1, *queries, *keys, *(options.get(f"max_seqlen_{x}", 0) for x in "qk")))
        of_queries, of_keys = (sum(queries) + slack,), (sum(keys) + slack,)
        shapes = [(*rows, heads, dim) for rows in (of_queries, of_keys, of_keys)]
    for name, shape in zip("qkv", shapes, strict=True):
        given[name] = normal(*shape, dtype=dtype, device="cpu")
    given["index"] = torch.randint(positions, (2 * longest - 1,)).int()
    for name in TABLES[:2]:
        given[name] = normal(positions, heads, dim, dtype=dtype, device="cpu", scale=0.5)
    for name, shape in ((TABLES[2], (positions, heads)), (TERMS[3], given["q"].shape[:-1])):
        given[name] = normal(*shape, dtype=dtype, device="cpu", scale=dim**0.5)
    given["segments"] = (torch.randint(3, of_queries), torch.randint(3, of_keys).int())
    for name in set(TERMS) - set(terms):
        given[name] = None
    if "segment_scores" not in terms:
        given["segments"] = None
    return given | options


def mapped(function, given: dict) -> dict:
    """Return the arguments with `function` of every tensor."""

    def convert(x):
        if isinstance(x, tuple):
            return tuple(convert(each) for each in x)
        return function(x) if torch.is_tensor(x) else x

    return {name: convert(x) for name, x in given.items()}


def cast(dtype, given):
    return {
        name: x.to(dtype) if name in FLOATING and x is not None else x for name, x in given.items()
    }


def gradient_of(given) -> torch.Tensor:
    """Return the gradient of the output with which `run` computes all other gradients."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(given["q"].shape, generator=generator).to(given["q"].dtype)


def run(function, given, dout=None, **options) -> dict[str, torch.Tensor]:
    """Return the output and the gradient of every floating argument, on the CPU."""
    leaves = {n: given[n].detach().requires_grad_() for n in FLOATING if given[n] is not None}
    out = function(**given | leaves, **options)
    dout = gradient_of(given) if dout is None else dout
    gradients = torch.autograd.grad(out, list(leaves.values()), dout.to(out.device, out.dtype))
    names = [f"d{name}" for name in leaves]
    return {
        "out": out.detach().cpu(),
        **dict(zip(names, (x.cpu() for x in gradients), strict=True)),
    }


def actual(given, device, dout=None) -> dict[str, torch.Tensor]:
    on_device = mapped(lambda x: x.to(device), given)
    return run(ops.relative_attention, on_device, dout, backend="triton")


def check(given, device, results=None) -> None:
    """Check the output and all gradients against float64 by the tolerance rule."""
    oracle = run(reference.relative_attention, cast(torch.float64, given))
    yardstick = Yardstick(lambda: run(reference.relative_attention, given))
    judged = compare_all(actual(given, device) if results is None else results, oracle, yardstick)
    failed = [str(each) for each in judged if not each.passed]
    assert not failed, "\n".join(failed)


def weights_of(given, device) -> torch.Tensor:
    on_device = mapped(lambda x: x.to(device), given)
    return ops.relative_attention(**on_device, return_weights=True, backend="triton")[1].cpu()


def check_weights(given, device) -> None:
    """Check the softmax weights by the tolerance rule, and that weights of 0 are exactly 0."""

    def function(dtype):
        results = reference.relative_attention(**cast(dtype, given), return_weights=True)
        return {"weights": results[1]}

    weights, exact = weights_of(given, device), function(torch.float64)
    yardstick = Yardstick(lambda: function(weights.dtype))
    judged = compare_all({"weights": weights}, exact, yardstick)
    assert all(each.passed for each in judged), "\n".join(map(str, judged))
    assert not weights[exact["weights"] == 0].any()


def assert_same_bits(results, expected) -> None:
    for name, result in results.items():
        assert torch.equal(result, expected[name]), name


ONE = {"batch": 1, "heads": 1}


@pytest.mark.parametrize(
    ("dtype", "queries", "keys", "dim", "options"),
    [
        (SINGLE, 15, 16, 16, {}),
        (SINGLE, 17, 47, 20, ONE),
        (SINGLE, 47, 15, 3, ONE),
        # The gradients of both tables are separate launches, and have two chunks of columns.
        (SINGLE, 20, 17, 72, ONE),
        (HALF, 33, 70, 40, ONE),
        (HALF, 65, 32, 64, ONE),
        (HALF, 16, 33, 130, ONE),
        (BRAIN, 47, 47, 48, ONE),
        long_case(BRAIN, 20, 33, 100, {}),
        long_case(SINGLE, 1, 17, 16, {}),
        long_case(BRAIN, 97, 130, 64, ONE),
        long_case(HALF, 47, 33, 256, ONE),
        long_case(SINGLE, 20, 33, 256, ONE),
    ],
)
def test_lengths_beside_the_sizes_of_tiles(dtype, queries, keys, dim, options, device):
    check(draw(queries, keys, dtype, dim=dim, **options), device)


@pytest.mark.parametrize(
    ("dtype", "sizes", "options"),
    [
        (SINGLE, (17, 40), {"mask": (2, 40)}),
        (HALF, (33, 20), {"mask": (2, 2, 33, 20), "dim": 40}),
        (HALF, (20, 35), {"scale": -0.3}),
        (BRAIN, ((33, 0, 9), (3, 8, 36)), {"slack": 5}),
        (SINGLE, ((7, 17), (20, 0)), {"max_seqlen_q": 40, "max_seqlen_k": 50}),
        long_case(BRAIN, (70, 130), {"dim": 256}),
    ],
    ids=str,
)
def test_weights(dtype, sizes, options, device):
    """Weights are 0 where a query may not attend, and are those before dropout."""
    if "mask" in options:
        options = {**options, "mask": torch.rand(options["mask"]) < 0.7}
        options["mask"][0, ..., :16] = False
        if options["mask"].dim() == 4:
            options["mask"][0, 0, 5] = False
    check_weights(draw(*sizes, dtype, **options) | DROPOUT, device)


@pytest.mark.each_value
@pytest.mark.parametrize(
    "terms", [TERMS[:1], TERMS[1:2], TERMS[2:3], (TERMS[0], TERMS[3]), TERMS[2:]], ids=str
)
@pytest.mark.parametrize("dtype", [SINGLE, HALF])
def test_each_term_alone(dtype, terms, device):
    check(draw(17, 20, dtype, terms=terms, batch=1, dim=24), device)


def test_a_single_key_has_gradients_of_exactly_zero(device):
    """The softmax of one key is constant, so that only its value has a gradient."""
    results = actual(draw(17, 1), device)
    assert results.pop("out").any()
    assert results.pop("dv").any()
    for name, result in results.items():
        assert not result.any(), name


@pytest.mark.parametrize(
    ("dtype", "lengths", "key_lengths"),
    [
        (SINGLE, (0, 17, 0, 5, 1, 0), (5, 33, 0, 9, 1, 0)),
        (HALF, (3, 47), (35, 9)),
        long_case(BRAIN, (130, 0, 33, 1), (97, 2, 64, 0)),
    ],
)
def test_packed_sequences(dtype, lengths, key_lengths, device):
    """Rows after the last sequence are never read, and their results are exactly 0."""
    slack = 50
    given = draw(lengths, key_lengths, dtype, slack=slack)
    dout = gradient_of(given)
    results = actual(given, device)
    for name in ("out", "dq", "dk", "dv", "dsegment_scores"):
        assert not results[name][-slack:].any(), name
    check(given, device, results)
    for x in (*(given[name] for name in ("q", "k", "v", "segment_scores")), dout):
        x[-slack:] = math.nan
    assert_same_bits(actual(given, device, dout), results)


@pytest.mark.parametrize("sizes", [(0, 5), (5, 0), ((), ()), ((0, 3), (4, 0))], ids=str)
def test_no_pair_of_a_query_and_a_key(sizes, device):
    slack = 0 if isinstance(sizes[0], int) else 3
    for result in actual(draw(*sizes, slack=slack), device).values():
        assert not result.any()


def test_no_dense_sequence(device):
    for result in actual(draw(5, 9, batch=0), device).values():
        assert not result.any()


def mask_of(kind, queries, keys, batch=2) -> torch.Tensor:
    shape = {"keys": (batch, keys), "pairs": (batch, 2, queries, keys), "heads": (1, 2, 1, keys)}
    return torch.rand(shape[kind]) < 0.6


@pytest.mark.each_value
@pytest.mark.parametrize("kind", ["keys", "pairs", "heads"])
@pytest.mark.parametrize("is_packed", [False, True])
def test_masks(is_packed, kind, device):
    lengths = ((33, 20), (35, 9)) if is_packed else (33, 35)
    dtype = BRAIN if is_packed else HALF
    check(draw(*lengths, dtype, mask=mask_of(kind, 33, 35)), device)


@pytest.mark.parametrize("dtype", [HALF, long_case(SINGLE)])
def test_a_query_without_a_key_has_exactly_zero(dtype, device):
    mask = torch.rand(2, 1, 33, 20) < 0.7
    mask[0], mask[1, 0, 17] = False, False
    given = draw(33, 20, dtype, mask=mask)
    results = actual(given, device)
    for name in ("out", "dq", "dsegment_scores"):
        assert not results[name][0].any(), name
        assert not results[name][1, :, 17].any(), name
    for name in ("dk", "dv"):
        assert not results[name][0].any(), name
    check(given, device, results)


@pytest.mark.parametrize("kind", ["keys", "pairs"])
@pytest.mark.parametrize("poison", [math.nan, long_case(math.inf)])
def test_keys_that_nobody_attends_to_are_never_read(poison, kind, device):
    mask = mask_of(kind, 16, 47, batch=1)
    mask[..., 10:36] = False
    given = draw(16, 47, HALF, batch=1, mask=mask, **DROPOUT)
    clean = actual(given, device)
    weights = weights_of(given, device)
    given["k"][:, :, 10:36], given["v"][:, :, 10:36] = poison, poison
    results = actual(given, device)
    assert_same_bits(results, clean)
    assert torch.equal(weights_of(given, device), weights)
    for name in ("dk", "dv"):
        assert not results[name][:, :, 10:36].any()


@pytest.mark.parametrize(
    ("dtype", "lengths"), [(SINGLE, (20, 9)), (HALF, (16, 35)), (BRAIN, ((7, 16), (20, 5)))]
)
def test_dropout(dtype, lengths, device):
    check(draw(*lengths, dtype, **DROPOUT), device)


def test_dropout_is_the_defined_philox(device):
    """With one-hot values, the output is 0 exactly where a weight was dropped."""
    given = draw(20, 33, dim=33, terms=TERMS[2:3], **DROPOUT)
    given["v"] = torch.eye(33).expand_as(given["v"])
    given = mapped(lambda x: x.to(device), given)
    out = ops.relative_attention(**given, backend="triton").cpu()
    assert torch.equal(out != 0, kept(SEED, 0.3, (2, 2, 20, 33)))


@pytest.mark.parametrize(
    ("dtype", "scale"),
    [
        (HALF, 0.0),
        (HALF, -0.3),
        (SINGLE, -0.3),
        long_case(SINGLE, 0.0),
        long_case(SINGLE, 1.0),
        long_case(BRAIN, 1.0),
    ],
)
def test_scales(dtype, scale, device):
    """A negative scale and large logits need the maximum of the scaled logits of each row."""
    given = draw(17, 33, dtype, scale=scale, batch=1)
    given["q"][:, :, ::2] *= 4
    check(given, device)


@pytest.mark.parametrize("dtype", [SINGLE, HALF])
def test_logits_of_ten_thousand(dtype, device):
    """Logits near 1e4 or -1e4 in all keys of a query make no result less exact."""
    given = draw(20, 33, dtype, scale=1.0, batch=1)
    given["q"][..., 0], given["k"][..., 0] = 100.0, 100.0
    given["q"][:, :, ::2, 0] = -100.0
    check(given, device)
    check_weights(given, device)


def test_rows_of_the_tables_that_many_distances_or_none_have(device):
    """The gradient of a table's row sums all distances of the row, and is 0 without a distance."""
    given = draw(47, 33, positions=40, batch=1, heads=1)
    distances = torch.arange(-60, 61)
    given["index"] = (distances.abs() // 4).int()
    results = actual(given, device)
    check(given, device, results)
    # The first query and the last key have the least distance that occurs, 0 + 33 - 47 - 32.
    used = given["index"][(distances >= -46) & (distances <= 32)]
    unused = sorted(set(range(40)) - set(used.tolist()))
    for name in TABLES:
        assert not results[f"d{name}"][unused].any(), name


def test_an_index_longer_than_needed_changes_nothing(device):
    given = draw(17, 33, HALF, batch=1, heads=1)
    expected = actual(given, device)
    given["index"] = torch.cat([given["index"][:40], given["index"], given["index"][:40]])
    assert_same_bits(actual(given, device), expected)


@pytest.mark.parametrize("dtype", [SINGLE, HALF])
def test_nothing_beside_the_index_and_the_tables_is_read(dtype, device):
    """Beside the index are numbers of rows of NaN, which are beside the rows of the tables."""
    given = draw(20, 17, dtype, dim=20, batch=1, heads=1)
    # The distance 0 has the last row.
    given["index"][len(given["index"]) // 2] = 23
    expected = actual(given, device)
    index = torch.full((len(given["index"]) + 200,), 24, dtype=torch.int32, device=device)
    index[100:-100] = given["index"].to(device)
    given["index"] = index[100:-100]
    for name in TABLES:
        wide = torch.full((26, *given[name].shape[1:]), math.nan, dtype=dtype, device=device)
        wide[1:-1] = given[name].to(device)
        given[name] = wide[1:-1]
    assert_same_bits(actual(given, device), expected)


@pytest.mark.parametrize(
    ("is_packed", "multiprocessors"),
    [(False, 5), (True, 1000), long_case(False, 1), long_case(True, 10), long_case(False, 1000)],
)
def test_splits_of_the_sequences(is_packed, multiprocessors, device, monkeypatch):
    """The gradients of the tables are right for any number of programs; reruns agree bitwise."""
    monkeypatch.setattr(relative_tables, "multiprocessors", lambda x: multiprocessors)
    lengths = ((3, 0, 17), (9, 4, 5)) if is_packed else (16, 17)
    given = draw(*lengths, batch=3, heads=2 if is_packed else 1)
    results = actual(given, device)
    check(given, device, results)
    assert_same_bits(actual(given, device), results)


@pytest.mark.parametrize(
    "tile", [Tile(16, 32, 4, 1), Tile(32, 16, 4, 1), long_case(Tile(64, 16, 4, 1))], ids=str
)
def test_tiles_that_are_not_square(tile, device, monkeypatch):
    for module in (relative_tables, relative_terms):
        monkeypatch.setattr(module, "relative_tile", lambda *_: tile)
    for lengths in ((17, 40), (40, 17)):
        check(draw(*lengths, batch=2, heads=2), device)


@pytest.mark.parametrize("is_packed", [False, True])
def test_layouts_change_no_bit(is_packed, device):
    """q, k and v are views of one projection, and gaps of NaN are in all other tensors."""
    given = draw((5, 16) if is_packed else 16, dtype=HALF, dim=24)
    given["mask"] = mask_of("pairs", 16, 16)
    expected = actual(given, device)
    strided = dict(given)
    fused = torch.stack([given[name] for name in "qkv"], dim=-3)
    fused = fused if is_packed else fused.transpose(1, 3).contiguous().transpose(1, 3)
    strided |= dict(zip("qkv", fused.unbind(-3), strict=True))
    for name in TERMS:
        x = given[name]
        wide = torch.full((*x.shape[:-1], x.shape[-1] + 9), math.nan, dtype=HALF)
        strided[name] = wide[..., 4:-5].copy_(x)
    strided["index"] = given["index"].repeat_interleave(2)[::2]
    strided["segments"] = tuple(x.repeat_interleave(2, -1)[..., ::2] for x in given["segments"])
    strided["mask"] = given["mask"].repeat_interleave(2, -1)[..., ::2]
    dout = gradient_of(given)
    dout = dout.transpose(0, -1).contiguous().transpose(0, -1)
    assert_same_bits(actual(strided, device, dout), expected)
    for name in "qkv":
        strided[name] = given[name].transpose(0, -1).contiguous().transpose(0, -1)
    assert_same_bits(actual(strided, device, dout), expected)


def test_tables_that_heads_share(device):
    """T5 and DeBERTa may have one table for all heads, which has a stride of 0."""
    given = draw(16, dtype=HALF, batch=1)
    shared = {name: given[name][:, :1].expand(given[name].shape) for name in TABLES}
    copies = {name: x.contiguous() for name, x in shared.items()}
    assert_same_bits(actual(given | shared, device), actual(given | copies, device))


def test_a_bias_and_scores_in_fp32_with_16_bits(device):
    """The bias and the segment scores may be fp32, and then their gradients are fp32."""
    given = draw((16, 5), (9, 16), HALF)
    wide = {name: given[name].float() for name in TERMS[2:]}
    results, narrow = actual(given | wide, device), actual(given, device)
    for name in ("out", "dq", "dk", "dv", "dposition_keys", "dposition_queries"):
        assert torch.equal(results[name], narrow[name]), name
    for name in (f"d{name}" for name in wide):
        assert results[name].dtype == torch.float32
        assert torch.equal(results[name].half(), narrow[name])


def test_distances_begin_at_the_last_key(device):
    """The last query and the last key have the distance 0, for any lengths."""
    for queries, keys in ((5, 40), (40, 5), (1, 33), (17, 17)):
        most = max(queries, keys)
        bias = torch.zeros(2 * most - 1, 1, device=device)
        bias[most - 1] = 100.0
        index = torch.arange(2 * most - 1, dtype=torch.int32, device=device)
        q, k, v = (torch.zeros(1, 1, n, 16, device=device) for n in (queries, keys, keys))
        v[0, 0, -1] = 1.0
        options = {"position_bias": bias, "scale": 1.0, "backend": "triton"}
        out = ops.relative_attention(q, k, v, index, **options)
        assert torch.equal(out[0, 0, -1], torch.ones(16, device=device))
