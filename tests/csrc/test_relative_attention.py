"""C++ attention with relative terms is within tolerance and has exact properties at every level."""

from __future__ import annotations

import math

import _fresh_python
import pytest
import torch
from _largest_tensor import largest_tensor

from fastbert import ops, reference
from fastbert.testing import parity
from fastbert.testing.cases import CASES
from fastbert.testing.compare import compare_all
from fastbert.testing.random_cases import random_cases
from fastbert.testing.yardstick import Yardstick

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
OP = "relative_attention"
TERMS = ("position_keys", "position_queries", "position_bias", "segment_scores")
FLOATING = ("q", "k", "v", *TERMS)
# The last size of a strip, a panel and a block of queries or keys, and the sizes beside it.
LENGTHS = (1, 31, 32, 33, 95, 96, 97, 127, 128, 129, 300)


def cumulative(lengths) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def draw(
    queries: int | tuple[int, ...],
    keys: int | tuple[int, ...] | None = None,
    *,
    batch: int = 1,
    heads: int = 2,
    dim: int = 16,
    positions: int = 40,
    terms: tuple[str, ...] = TERMS,
    slack: int = 0,
    dtype: torch.dtype = torch.float32,
    **options,
) -> dict:
    """Draw the arguments of a call.

    Args:
        queries: Length of dense sequences, or the lengths of packed sequences.
        keys: Length or lengths of the keys, as `queries`; None is `queries`.
        batch: Number of dense sequences.
        heads: Number of heads.
        dim: Head dimension.
        positions: Number of rows of the tables.
        terms: The terms that are not None.
        slack: Number of rows after the last packed sequence.
        dtype: Dtype of all floating tensors.
        options: Further arguments of the operation.
    """
    keys = queries if keys is None else keys
    if isinstance(queries, int):
        of_queries, of_keys = (batch, queries), (batch, keys)
        longest = max(queries, keys, 1)
        given = {"cu_seqlens_q": None, "cu_seqlens_k": None}
        shapes = [(batch, heads, rows, dim) for rows in (queries, keys, keys)]
    else:
        of_queries, of_keys = (sum(queries) + slack,), (sum(keys) + slack,)
        longest = max((1, *queries, *keys))
        given = {"cu_seqlens_q": cumulative(queries), "cu_seqlens_k": cumulative(keys)}
        shapes = [(*rows, heads, dim) for rows in (of_queries, of_keys, of_keys)]
    given |= {name: torch.randn(shape) for name, shape in zip("qkv", shapes, strict=True)}
    given["index"] = torch.randint(positions, (2 * longest - 1,)).int()
    for name in TERMS[:2]:
        given[name] = torch.randn(positions, heads, dim) / 2
    given["position_bias"] = torch.randn(positions, heads) * dim**0.5
    given["segment_scores"] = torch.randn(given["q"].shape[:-1]) * dim**0.5
    given["segments"] = (torch.randint(3, of_queries), torch.randint(3, of_keys).int())
    for name in set(TERMS) - set(terms):
        given[name] = None
    if "segment_scores" not in terms:
        given["segments"] = None
    return to(dtype, given) | options


def to(dtype, given):
    return {
        name: value.to(dtype) if name in FLOATING and value is not None else value
        for name, value in given.items()
    }


def run(function, given, dout=None, **options) -> dict[str, torch.Tensor]:
    """Return the output and the gradient of every floating argument, for the gradient `dout`."""
    leaves = {n: given[n].detach().requires_grad_() for n in FLOATING if given[n] is not None}
    out = function(**given | leaves, **options)
    if dout is None:
        generator = torch.Generator().manual_seed(1)
        dout = torch.randn(given["q"].shape, generator=generator).to(given["q"].dtype)
    gradients = torch.autograd.grad(out, list(leaves.values()), dout.to(out.dtype))
    names = [f"d{name}" for name in leaves]
    return {"out": out.detach(), **dict(zip(names, gradients, strict=True))}


def actual(given, dout=None) -> dict[str, torch.Tensor]:
    return run(ops.relative_attention, given, dout, backend="cpu")


def check(given, isa="", results=None) -> None:
    """Judge the output and all gradients by the tolerance rule."""
    # Without FMA, each product rounds before it is added.
    loose = {"factor": 3.0, "reason": "each product rounds"} if isa == "baseline" else {}
    oracle = run(reference.relative_attention, to(torch.float64, given))
    yardstick = Yardstick(lambda: run(reference.relative_attention, given))
    judged = compare_all(actual(given) if results is None else results, oracle, yardstick, **loose)
    failed = [str(each) for each in judged if not each.passed]
    assert not failed, "\n".join(failed)


def check_cases(cases, dtype) -> None:
    for case in cases:
        failed = [str(r) for r in parity.check_case(case, "cpu", dtype) if not r.passed]
        assert not failed, "\n".join([case.command("cpu", dtype), *failed])


@pytest.mark.parametrize("dtype", DTYPES)
def test_registered_cases(isa, dtype):
    check_cases([case for case in CASES if case.op == OP], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_random_cases(isa, dtype):
    check_cases(random_cases(10, 5, OP), dtype)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_lengths_beside_the_sizes_of_strips_panels_and_blocks(isa, dtype, length):
    check(draw(length, dtype=dtype, batch=2 if length < 100 else 1), isa)


@pytest.mark.each_value
@pytest.mark.parametrize("queries", LENGTHS)
@pytest.mark.parametrize("keys", [1, 33, 129, 260])
@pytest.mark.parametrize("dtype", DTYPES)
def test_other_numbers_of_keys_than_of_queries(isa, dtype, queries, keys):
    check(draw(queries, keys, batch=2, dtype=dtype), isa)


@pytest.mark.parametrize("dim", [4, 20, 64, 96, 256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_head_dims(isa, dtype, dim):
    check(draw(70, 45, dim=dim, dtype=dtype), isa)


@pytest.mark.parametrize(
    "terms", [TERMS[:1], TERMS[1:2], TERMS[2:3], TERMS[2:], TERMS[:2]], ids=str
)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_each_term_alone(isa, dtype, packed, terms):
    lengths = ((70, 3), (41, 70)) if packed else (70, 41)
    check(draw(*lengths, terms=terms, batch=2, dtype=dtype), isa)


@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_sequences(isa, dtype):
    """Rows after the last sequence have an output and gradients of exactly 0."""
    lengths, key_lengths = (0, 33, 0, 100, 1, 0), (5, 130, 0, 40, 1, 0)
    given = draw(lengths, key_lengths, slack=7, dtype=dtype)
    results = actual(given)
    check(given, isa, results)
    for name in ("out", "dq", "dk", "dv", "dsegment_scores"):
        assert not results[name][-7:].any(), name
    # The queries of the third sequence have no key, and the keys of the first have no query.
    assert not results["dk"][:5].any()


def test_rows_without_a_sequence_change_nothing(isa):
    """NaN in rows after the last sequence changes no result."""
    given = draw((20, 9), slack=4)
    clean = actual(given)
    for name in ("q", "k", "v", "segment_scores"):
        given[name][-4:] = math.nan
    dout = torch.randn(given["q"].shape, generator=torch.Generator().manual_seed(1))
    dout[-4:] = math.nan
    for name, result in actual(given, dout).items():
        assert torch.equal(result, clean[name]), name


@pytest.mark.parametrize("lengths", [((), ()), ((0, 0), (0, 3)), ((0, 3), (0, 0))], ids=str)
def test_no_pair_of_a_query_and_a_key(isa, lengths):
    for result in actual(draw(*lengths, slack=2)).values():
        assert not result.any()


@pytest.mark.parametrize("sizes", [(0, 5), (5, 0), (0, 0)], ids=str)
@pytest.mark.parametrize("batch", [0, 2])
def test_dense_sequences_without_a_query_or_a_key(isa, batch, sizes):
    for result in actual(draw(*sizes, batch=batch)).values():
        assert not result.any()


def mask_of(kind: str, queries: int, keys: int, batch: int = 2) -> torch.Tensor:
    shape = {"keys": (batch, keys), "pairs": (batch, 1, queries, keys), "heads": (1, 2, 1, keys)}
    mask = torch.rand(shape[kind]) < 0.6
    if kind == "pairs":
        mask[0, :, 11] = False
    return mask


@pytest.mark.parametrize("kind", ["keys", "pairs", "heads"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_masks(isa, dtype, packed, kind):
    lengths = ((70, 64), (110, 9)) if packed else (70, 110)
    check(draw(*lengths, batch=2, dtype=dtype, mask=mask_of(kind, 70, 110)), isa)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_query_without_a_key_has_exactly_zero(isa, dtype):
    mask = torch.ones(2, 1, 100, 100, dtype=torch.bool)
    mask[0], mask[1, 0, 77] = False, False
    given = draw(100, batch=2, dtype=dtype, mask=mask)
    results = actual(given)
    for name in ("out", "dq", "dsegment_scores"):
        assert not results[name][0].any(), name
        assert not results[name][1, :, 77].any(), name
        assert results["out"][1, :, 78:].any()
    assert not results["dk"][0].any()
    assert not results["dv"][0].any()


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_that_nobody_attends_to_are_never_read(isa, dtype, poison, pairs):
    mask = torch.rand(2, 1, 140 if pairs else 1, 140) < 0.7
    mask[..., 60:90] = False
    mask[..., 130:] = False
    given = draw(140, batch=2, dtype=dtype, mask=mask)
    clean = actual(given)
    for name in "kv":
        given[name][:, :, 60:90] = poison
        given[name][:, :, 130:] = poison
    for name, result in actual(given).items():
        assert torch.equal(result, clean[name]), name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("packed", [False, True])
def test_dropout(isa, packed, dtype):
    lengths = ((70, 31),) if packed else (100,)
    dropout = {"dropout_p": 0.3, "dropout_seed": torch.tensor([0x0123456789ABCDEF])}
    check(draw(*lengths, batch=2, dtype=dtype, **dropout), isa)


def test_dropout_drops_the_weights_that_attention_drops(isa):
    """With one-hot values, the output is 0 exactly where a weight was dropped."""
    given = draw(130, batch=2, heads=3, dim=130)
    given["v"] = torch.eye(130).expand_as(given["v"])
    seed, p = torch.tensor([99]), 0.3
    out = ops.relative_attention(**given, dropout_p=p, dropout_seed=seed, backend="cpu")
    assert torch.equal(out != 0, reference.dropout_keep(seed, p, (2, 3, 130, 130)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_strides_change_no_bit(isa, dtype):
    given = draw((20, 31), dim=40, dtype=dtype)
    contiguous = actual(given)
    strided = dict(given)
    for name in FLOATING:
        x = given[name]
        # The last dimension has a stride of 1, and gaps of NaN are between the rows.
        wide = torch.full((*x.shape[:-1], x.shape[-1] + 9), math.nan, dtype=dtype)
        strided[name] = wide[..., 4:-5].copy_(x)
    for name, result in actual(strided).items():
        assert torch.equal(result, contiguous[name]), name
    for name in FLOATING:
        strided[name] = given[name].transpose(0, -1).contiguous().transpose(0, -1)
    strided["index"] = given["index"].repeat_interleave(2)[::2]
    strided["segments"] = tuple(x.repeat_interleave(2)[::2] for x in given["segments"])
    for name, result in actual(strided).items():
        assert torch.equal(result, contiguous[name]), name


@pytest.mark.parametrize("dtype", DTYPES)
def test_tables_that_heads_share(isa, dtype):
    """T5 and DeBERTa may have one table for all heads, which has a stride of 0."""
    given = draw(50, dtype=dtype)
    shared = {name: given[name][:, :1].expand(given[name].shape) for name in TERMS[:3]}
    copies = {name: x.contiguous() for name, x in shared.items()}
    expected = actual(given | copies)
    for name, result in actual(given | shared).items():
        assert torch.equal(result, expected[name]), name


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_a_bias_and_scores_in_fp32_with_16_bits(isa, dtype):
    """The bias and the segment scores may be fp32, and then their gradients are fp32."""
    given = draw(70, dtype=dtype)
    wide = {name: given[name].float() for name in TERMS[2:]}
    results, narrow = actual(given | wide), actual(given)
    for name in ("out", "dq", "dk", "dv"):
        assert torch.equal(results[name], narrow[name]), name
    for name in (f"d{name}" for name in wide):
        assert results[name].dtype == torch.float32
        assert torch.equal(results[name].to(dtype), narrow[name])


def log_buckets(length: int, buckets: int, most: int) -> torch.Tensor:
    """Return the index of DeBERTa v2, computed by transformers."""
    deberta = pytest.importorskip("transformers.models.deberta_v2.modeling_deberta_v2")
    distance = torch.arange(1 - length, length)
    return (deberta.make_log_bucket_position(distance, buckets, most).long() + buckets).int()


@pytest.mark.parametrize("dtype", DTYPES)
def test_log_buckets_of_deberta(isa, dtype):
    """Many distances have the same row, and the table has rows that no distance has."""
    index = log_buckets(200, 32, 512)
    assert int(index.diff().min()) == 0
    assert int(index.max()) < 63
    given = draw(200, dtype=dtype, positions=64)
    results = actual(given | {"index": index})
    check(given | {"index": index}, isa, results)
    unused = sorted(set(range(64)) - set(index.tolist()))
    for name in TERMS[:3]:
        assert not results[f"d{name}"][unused].any()


def test_rows_of_distances_that_do_not_occur_change_nothing(isa):
    given = draw(40, 55)
    expected = actual(given)
    given["index"] = torch.cat([given["index"].flip(0)[:9], given["index"], given["index"][:9]])
    for name, result in actual(given).items():
        assert torch.equal(result, expected[name]), name


@pytest.mark.parametrize("dtype", DTYPES)
def test_more_keys_than_scores_are_kept_of(isa, dtype):
    """Gradients are right for more than 1,024 keys, where the backward recomputes the logits."""
    dropout = {"dropout_p": 0.2, "dropout_seed": torch.tensor([3])}
    check(draw(130, 1100, heads=1, dtype=dtype, **dropout), isa)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [1, 13, 97, 130, 300])
def test_a_sequence_alone_and_in_any_batch_has_the_same_bits(isa, length, dtype):
    lengths, own = (40, length, 0, 250), slice(40, 40 + length)
    packed = draw(lengths, dim=32, dtype=dtype)
    packed["segments"] = tuple(x.int() for x in packed["segments"])
    rows = ("q", "k", "v", "segment_scores")
    alone = packed | {name: packed[name][own] for name in rows}
    alone["segments"] = tuple(x[own] for x in packed["segments"])
    alone |= {"cu_seqlens_q": cumulative((length,)), "cu_seqlens_k": cumulative((length,))}
    dense = alone | {"cu_seqlens_q": None, "cu_seqlens_k": None}
    for name in rows:
        dense[name] = alone[name].transpose(0, 1)[None].expand(3, *(-1,) * alone[name].dim())
    dense["segments"] = tuple(x.expand(3, -1) for x in alone["segments"])
    dout = torch.randn(packed["q"].shape).to(dtype)
    together, single = actual(packed, dout), actual(alone, dout[own])
    batch = actual(dense, dout[own].transpose(0, 1).expand_as(dense["q"]))
    for name in ("out", *(f"d{name}" for name in rows)):
        assert torch.equal(together[name][own], single[name]), name
        assert torch.equal(batch[name][1].transpose(0, 1), single[name]), name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("packed", [False, True])
def test_threads_change_no_bit(isa, packed, dtype):
    given = draw(tuple(range(5, 45, 4)) if packed else 150, batch=3, dtype=dtype)
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 2, 4):
            torch.set_num_threads(count)
            results.append(actual(given))
    finally:
        torch.set_num_threads(threads)
    for name, one in results[0].items():
        assert torch.equal(one, results[1][name]), name
        assert torch.equal(one, results[2][name]), name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(33, 150), (70, 70), ((40, 0, 9), (3, 8, 130))], ids=str)
def test_weights(isa, sizes, dtype):
    mask = torch.rand(3, 130 if isinstance(sizes[0], tuple) else sizes[1]) < 0.8
    given = draw(*sizes, batch=3, dtype=dtype, mask=mask)
    options = {"return_weights": True}
    out, weights = ops.relative_attention(**given, **options, backend="cpu")
    exact = reference.relative_attention(**to(torch.float64, given), **options)
    yardstick = Yardstick(lambda: reference.relative_attention(**given, **options))
    assert torch.equal(out, ops.relative_attention(**given, backend="cpu"))
    names = ("out", "weights")
    sides = [dict(zip(names, (out, weights), strict=True)), dict(zip(names, exact, strict=True))]
    judged = compare_all(*sides, yardstick.map(lambda r: dict(zip(names, r, strict=True))))
    assert all(each.passed for each in judged), "\n".join(map(str, judged))
    assert not weights[exact[1] == 0].any()


def test_without_terms_it_is_attention(isa):
    """Tables of zeros give the results of attention, up to the sign of a zero."""
    given = draw(50, 90, terms=TERMS[:1])
    given["position_keys"].zero_()
    plain = ops.attention(given["q"], given["k"], given["v"], backend="cpu")
    assert torch.equal(ops.relative_attention(**given, backend="cpu"), plain)


def test_distances_begin_at_the_last_key(isa):
    """The last query and the last key have the distance 0, for any lengths."""
    for queries, keys in ((5, 9), (9, 5), (1, 40), (40, 40)):
        index = torch.arange(2 * max(queries, keys) - 1).int()
        bias = torch.zeros(len(index), 1)
        bias[len(index) // 2] = 100.0
        q, k, v = (
            torch.zeros(1, 1, queries, 16),
            torch.zeros(1, 1, keys, 16),
            torch.zeros(1, 1, keys, 16),
        )
        v[0, 0, -1] = 1.0
        out = ops.relative_attention(q, k, v, index, position_bias=bias, scale=1.0, backend="cpu")
        assert torch.allclose(out[0, 0, -1], torch.ones(16))


MEMORY = """
import torch
from fastbert import ops

def status(name):
    with open("/proc/self/status", encoding="utf-8") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith(name))

def step(length):
    q, k, v = (torch.randn(2, 12, length, 64, requires_grad=True) for _ in range(3))
    keys, queries = (torch.randn(512, 12, 64, requires_grad=True) for _ in range(2))
    index = torch.randint(512, (2 * length - 1,)).int()
    before = status("VmRSS:")
    terms = {"position_keys": keys, "position_queries": queries, "position_bias": keys[..., 0]}
    ops.relative_attention(q, k, v, index, **terms, backend="cpu").sum().backward()
    return status("VmHWM:") - before

torch.set_num_threads(2)
step(16)
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # The peak is counted from here on.
print(step(1024))
"""


def test_nothing_of_the_size_of_all_pairs_is_allocated(extension):
    """Tensors and scratch memory of both passes need less memory than one tensor of all pairs."""
    pairs = 2 * 12 * 1024 * 1024
    shape = (2, 12, 1024, 64)
    given = draw(shape[2], batch=shape[0], heads=shape[1], dim=shape[3], positions=512)
    for name in FLOATING:
        given[name].requires_grad_()
    with largest_tensor() as largest:
        ops.relative_attention(**given, backend="cpu").sum().backward()
    assert largest.elements == math.prod(shape) < pairs
    run = _fresh_python.run("-c", MEMORY, timeout=120)
    if "clear_refs" in run.stderr:
        pytest.skip("this system does not reset the peak of a process's memory")
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) * 1024 < pairs * 4
