"""The attention launchers agree with the reference by the tolerance rule."""

from __future__ import annotations

import math

import pytest
import torch
from kernel_cases import BRAIN, HALF, SINGLE, judge, kept, normal, seed_tensor
from quick_cases import long_case

from fastbert import reference
from fastbert.kernels import tiles
from fastbert.kernels.attention import attention_backward, attention_forward
from fastbert.kernels.attention_weights import attention_weights
from fastbert.testing.compare import assert_close
from fastbert.testing.yardstick import Yardstick

pytestmark = pytest.mark.usefixtures("general_path")


def rows(batch, length, heads, dim, dtype, device, scale=1.0):
    """Return random (B, H, L, D) with the memory order (B, L, H, D), as from a projection."""
    return normal(batch, length, heads, dim, dtype=dtype, device=device, scale=scale).transpose(
        1, 2
    )


def inputs(batch, heads, q_length, k_length, dim, dtype, device, scale=1.0):
    """Return random q, k and v, and a random gradient dout of the output."""
    lengths = (q_length, k_length, k_length, q_length)
    return [
        rows(batch, n, heads, dim, dtype, device, s)
        for n, s in zip(lengths, (scale, scale, 1, 1), strict=True)
    ]


def random_mask(kind, batch, heads, q_length, k_length, device):
    if kind is None:
        return None
    if kind == "keys":
        mask = torch.rand(batch, 1, 1, k_length) > 0.3
    else:
        mask = torch.rand(batch, heads, q_length, k_length) > 0.3
        mask[0, 0, q_length // 2] = False
    return mask.to(device).expand(batch, heads, q_length, k_length)


def run(q, k, v, dout, **options):
    """Return [out, dq, dk, dv] of the launchers."""
    options = {"scale": q.shape[-1] ** -0.5, **options}
    out, lse = attention_forward(q, k, v, **options)
    return [out, *attention_backward(dout, q, k, v, out, lse, **options)]


def check_dense(q, k, v, dout, **options):
    options = {"scale": q.shape[-1] ** -0.5, "seed": seed_tensor(str(q.device)), **options}
    actual = run(q, k, v, dout, **options)
    plain = {key: x.cpu() if torch.is_tensor(x) else x for key, x in options.items()}
    plain["dropout_seed"] = plain.pop("seed")
    bias = plain.pop("bias", None)

    def function(q, k, v):
        return reference.attention(
            q, k, v, bias=None if bias is None else bias.to(q.dtype), **plain
        )

    judge("out dq dk dv", actual, function, [q, k, v], dout)


@pytest.mark.parametrize(
    ("heads", "q_length", "k_length", "dim", "dtype", "mask", "p", "options"),
    [
        (2, 97, 97, 1, SINGLE, None, 0.0, {}),
        (1, 70, 70, 16, SINGLE, None, 0.0, {"window": (20, 10)}),
        (1, 40, 70, 32, SINGLE, "keys", 0.1, {}),
        long_case(1, 70, 40, 40, SINGLE, "pairs", 0.1, {"causal": True}),
        (1, 65, 65, 59, SINGLE, None, 0.2, {"scale": -0.2}),
        long_case(2, 33, 97, 64, SINGLE, "keys", 0.0, {}),
        (1, 33, 33, 111, SINGLE, None, 0.0, {"scale": 0.0}),
        (2, 129, 129, 64, HALF, "keys", 0.1, {}),
        (1, 130, 97, 32, HALF, "pairs", 0.0, {"window": (50, 30)}),
        long_case(1, 97, 200, 80, HALF, None, 0.1, {"causal": True}),
        (1, 257, 257, 16, HALF, None, 0.0, {"window": (60, 0)}),
        long_case(1, 512, 511, 16, HALF, "keys", 0.0, {}),
        long_case(2, 129, 129, 64, BRAIN, "keys", 0.1, {}),
        (1, 97, 97, 128, BRAIN, "pairs", 0.1, {}),
        (1, 65, 33, 256, BRAIN, None, 0.0, {}),
        (2, 1, 1, 32, BRAIN, None, 0.0, {}),
    ],
)
def test_dense_against_oracle(heads, q_length, k_length, dim, dtype, mask, p, options, device):
    q, k, v, dout = inputs(2, heads, q_length, k_length, dim, dtype, device)
    mask = random_mask(mask, 2, heads, q_length, k_length, device)
    check_dense(q, k, v, dout, mask=mask, dropout_p=p, **options)


@pytest.mark.parametrize("dtype", [SINGLE, HALF, BRAIN])
def test_bias_and_sharp_logits(dtype, device):
    q, k, v, dout = inputs(1, 2, 70, 97, 64, dtype, device, scale=2.0)
    bias = normal(1, 2, 1, 97, dtype=dtype, device=device).expand(1, 2, 70, 97)
    check_dense(q, k, v, dout, bias=bias)
    check_dense(q, k, v, dout)


@pytest.mark.every_case
def test_the_interpreters_own_tiles(device, monkeypatch):
    monkeypatch.setattr(tiles, "IS_INTERPRETED", True)
    q, k, v, dout = inputs(1, 2, 150, 200, 32, SINGLE, device)
    mask = random_mask("keys", 1, 2, 150, 200, device)
    check_dense(q, k, v, dout, mask=mask, dropout_p=0.1)


def packed(lengths, heads, dim, dtype, device, slack=0):
    """Return random packed rows, with NaN after the last sequence, and cu_seqlens."""
    total = sum(lengths)
    x = normal(total + slack, heads, dim, dtype=dtype, device=device)
    x[total:] = math.nan
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
    return x, bounds


@pytest.mark.parametrize(
    ("q_lengths", "k_lengths", "dtype", "p", "options"),
    [
        ((0, 40, 0, 33, 1, 0), None, SINGLE, 0.1, {}),
        ((5, 0, 70), (40, 3, 0), SINGLE, 0.0, {}),
        ((129, 0, 64, 97), None, HALF, 0.1, {}),
        ((100, 30), (64, 140), BRAIN, 0.1, {"causal": True}),
        ((0, 0), None, HALF, 0.0, {}),
    ],
)
def test_varlen_against_oracle(q_lengths, k_lengths, dtype, p, options, device):
    k_lengths = k_lengths or q_lengths
    q, cu_seqlens_q = packed(q_lengths, 2, 32, dtype, device, slack=150)
    dout, _ = packed(q_lengths, 2, 32, dtype, device, slack=150)
    k, cu_seqlens_k = packed(k_lengths, 2, 32, dtype, device, slack=9)
    v, _ = packed(k_lengths, 2, 32, dtype, device, slack=9)
    bounds = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    seed = seed_tensor(device)
    actual = run(q, k, v, dout, dropout_p=p, seed=seed, **bounds, **options)
    used_q, used_k = sum(q_lengths), sum(k_lengths)
    for tensor, used in zip(actual, (used_q, used_q, used_k, used_k), strict=True):
        assert torch.count_nonzero(tensor[used:]) == 0

    def function(q, k, v):
        lengths = (cu_seqlens_q.cpu(), cu_seqlens_k.cpu())
        return reference.attention_varlen(
            q, k, v, *lengths, dropout_p=p, dropout_seed=seed.cpu(), **options
        )

    _, lse = attention_forward(q, k, v, scale=1.0, **bounds)
    assert torch.all(lse[:, used_q:] == -math.inf)
    if max(q_lengths):
        cut = [q[:used_q], k[:used_k], v[:used_k]]
        trimmed = [t[:n] for t, n in zip(actual, (used_q, used_q, used_k, used_k), strict=True)]
        judge("out dq dk dv", trimmed, function, cut, dout[:used_q])


@pytest.mark.every_case
def test_varlen_masks_and_dropout_use_positions_in_the_sequence(device):
    """A packed sequence gives the same bits as the same sequence in a dense batch."""
    lengths = (33, 70)
    q, cu_seqlens = packed(lengths, 2, 16, HALF, device)
    dout, _ = packed(lengths, 2, 16, HALF, device)
    mask = (torch.rand(2, 2, 70, 70) > 0.3).to(device)
    options = {"dropout_p": 0.3, "seed": seed_tensor(device)}
    together = run(q, q, q, dout, cu_seqlens_q=cu_seqlens, mask=mask, **options)
    # Dropout depends on the number of a sequence, so the second sequence is also second in the
    # dense batch.
    x, dx = (t[33:].transpose(0, 1)[None].expand(2, 2, 70, 16) for t in (q, dout))
    alone = run(x, x, x, dx, mask=mask, **options)
    for a, b in zip(together, alone, strict=True):
        assert torch.equal(a[33:].transpose(0, 1), b[1])


def test_fully_masked_rows_are_exactly_zero(device):
    q, k, v, dout = inputs(2, 2, 40, 70, 32, SINGLE, device)
    mask = (torch.rand(2, 2, 40, 70) > 0.3).to(device)
    mask[1] = False
    mask[0, 0, 3] = False
    out, lse = attention_forward(q, k, v, mask=mask, scale=1.0)
    gradients = attention_backward(dout, q, k, v, out, lse, mask=mask, scale=1.0)
    empty = ~mask.any(-1)
    assert torch.count_nonzero(out[empty]) == 0
    assert torch.all((lse == -math.inf) == empty)
    assert torch.count_nonzero(gradients[0][empty]) == 0
    assert all(torch.isfinite(t).all() for t in gradients)
    assert all(torch.count_nonzero(t[1]) == 0 for t in gradients)


@pytest.mark.parametrize("kind", ["keys", "pairs", "window"])
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_poison_in_unattended_keys_stays_there(kind, poison, device):
    q, k, v, dout = inputs(1, 2, 40, 97, 32, HALF, device)
    options = {"window": (10, 20)} if kind == "window" else {}
    if kind == "window":
        hidden = torch.arange(97, device=device) < 97 - 40 - 10
    else:
        hidden = torch.rand(97, device=device) > 0.6
        mask = (~hidden)[None, None, None, :].expand(1, 2, 40, 97)
        options["mask"] = mask.contiguous() if kind == "pairs" else mask
    clean = run(q, k, v, dout, dropout_p=0.1, seed=seed_tensor(device), **options)
    weights = attention_weights(q, k, scale=1.0, **options)
    k, v = k.clone(), v.clone()
    k[:, :, hidden], v[:, :, hidden] = poison, poison
    dirty = run(q, k, v, dout, dropout_p=0.1, seed=seed_tensor(device), **options)
    assert all(torch.equal(a, b) for a, b in zip(clean, dirty, strict=True))
    assert torch.equal(weights, attention_weights(q, k, scale=1.0, **options))
    assert all(torch.count_nonzero(t[:, :, hidden]) == 0 for t in dirty[2:])


def test_every_way_to_write_a_mask_agrees(device):
    """A bool mask and a bias of -inf, -1e4 or finfo.min give equal results within tolerance.

    The bits may differ, because the kernels with a mask and with a bias are two binaries, whose
    layouts may sum in another order.
    """
    q, k, v, dout = inputs(1, 2, 40, 70, 32, SINGLE, device)
    mask = (torch.rand(1, 2, 40, 70) > 0.3).to(device)

    def function(q, k, v):
        return reference.attention(q, k, v, mask=mask.cpu(), scale=1.0)

    judge("out dq dk dv", run(q, k, v, dout, mask=mask, scale=1.0), function, [q, k, v], dout)
    for value in (-math.inf, -1e4, torch.finfo(SINGLE).min):
        bias = torch.zeros(mask.shape, device=device).masked_fill(~mask, value)
        got = run(q, k, v, dout, bias=bias, scale=1.0)
        judge("out dq dk dv", got, function, [q, k, v], dout)


@pytest.mark.parametrize("dtype", [SINGLE, HALF, BRAIN])
def test_logits_of_ten_thousand(dtype, device):
    """With logits near ±1e4, rounding of the log-sum-exp or of out does not dominate a gradient.

    The logits of a row are near +1e4 or -1e4 and differ by little, so no key dominates the softmax.
    """
    q, k, v, dout = inputs(1, 2, 40, 70, 64, dtype, device)
    q[..., 0], k[..., 0] = 100.0, 100.0
    q[:, :, ::2, 0] = -100.0
    check_dense(q, k, v, dout, scale=1.0)


@pytest.mark.parametrize(
    ("dtype", "has_bias"), [(SINGLE, False), (HALF, False), (HALF, True), (BRAIN, True)]
)
def test_log_sum_exp_is_the_natural_one(dtype, has_bias, device):
    q, k, v, _ = inputs(2, 2, 40, 97, 32, dtype, device)
    bias = normal(2, 2, 40, 97, dtype=dtype, device=device) if has_bias else None
    _, lse = attention_forward(q, k, v, bias=bias, scale=0.2)

    def function(dtype):
        logits = q.cpu().to(dtype) @ k.cpu().to(dtype).mT * 0.2
        return torch.logsumexp(logits if bias is None else logits + bias.cpu().to(dtype), dim=-1)

    assert_close("lse", lse, function(torch.float64), Yardstick(lambda: function(SINGLE)))


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_dropout_is_the_defined_philox(p, device):
    """With uniform weights and V = identity, the output shows exactly Philox's dropout mask."""
    batch, heads, q_length, k_length = 2, 3, 33, 64
    q = torch.zeros(batch, heads, q_length, 64, device=device)
    k = torch.zeros(batch, heads, k_length, 64, device=device)
    v = torch.eye(64, device=device).expand(batch, heads, 64, 64)
    seed = -(2**62) - 12345
    options = {"dropout_p": p, "seed": seed_tensor(device, seed), "scale": 1.0}
    out, _ = attention_forward(q, k, v, **options)
    expected = kept(seed, p, (batch, heads, q_length, k_length))
    assert torch.equal((out != 0).cpu(), expected)
    assert torch.allclose(out[out != 0], torch.tensor(1 / 64 / (1 - p), device=device))


def test_dropout_of_everything_and_of_nothing(device):
    q, k, v, dout = inputs(1, 2, 40, 40, 16, HALF, device)
    seed = seed_tensor(device)
    assert all(torch.count_nonzero(t) == 0 for t in run(q, k, v, dout, dropout_p=1.0, seed=seed))
    plain, none = run(q, k, v, dout), run(q, k, v, dout, dropout_p=0.0, seed=seed)
    assert all(torch.equal(a, b) for a, b in zip(plain, none, strict=True))
    drawn = [run(q, k, v, dout, dropout_p=0.5, seed=seed_tensor(device, n))[0] for n in (1, 1, 2)]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


def test_reruns_and_batches_agree_bitwise(device):
    q, k, v, dout = inputs(2, 2, 70, 70, 32, HALF, device)
    first, second = (run(q, k, v, dout) for _ in range(2))
    single = run(q[1:], k[1:], v[1:], dout[1:])
    for a, b, c in zip(first, second, single, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a[1:], c)


def test_layouts_do_not_matter(device):
    """Slices, a transposed last dimension, and expanded heads or gradients change no bit."""
    fused = normal(2, 40, 3, 2, 24, dtype=HALF, device=device)
    q, k, v = (fused[:, :, i].transpose(1, 2) for i in range(3))
    dout = normal(1, 2, 1, 24, dtype=HALF, device=device).expand(2, 2, 40, 24)
    expected = run(q.contiguous(), k.contiguous(), v.contiguous(), dout.contiguous())
    got = run(q, k.mT.contiguous().mT, v.transpose(0, 3).contiguous().transpose(0, 3), dout)
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    assert all(t.transpose(1, 2).is_contiguous() for t in got)
    shared = k[:, :1].expand(2, 2, 40, 24)
    expected = run(q, shared.contiguous(), shared.contiguous(), dout)
    assert torch.equal(expected[0], run(q, shared, shared, dout)[0])


@pytest.mark.parametrize("is_packed", [False, True])
def test_gradients_are_written_where_they_belong(is_packed, device):
    """Written into one tensor, dq, dk and dv have the same bits; rows after sequences are 0."""
    shape = (50, 3, 2, 24) if is_packed else (2, 25, 3, 2, 24)
    qkv, dout = normal(*shape, dtype=HALF, device=device), normal(*shape, dtype=HALF, device=device)
    parts, (dout, *_) = qkv.unbind(-3), dout.unbind(-3)
    options = {"scale": 0.2}
    if is_packed:
        options["cu_seqlens_q"] = torch.tensor([0, 33, 43], dtype=torch.int32, device=device)
    else:
        parts, dout = [x.transpose(1, 2) for x in parts], dout.transpose(1, 2)
    out, lse = attention_forward(*parts, **options)
    expected = attention_backward(dout, *parts, out, lse, **options)
    dqkv = torch.empty_like(qkv)
    places = dqkv.unbind(-3) if is_packed else [x.transpose(1, 2) for x in dqkv.unbind(-3)]
    attention_backward(dout, *parts, out, lse, into=tuple(places), **options)
    assert all(torch.equal(a, b) for a, b in zip(expected, places, strict=True))
    assert not is_packed or torch.count_nonzero(dqkv[43:]) == 0


@pytest.mark.parametrize("dtype", [SINGLE, HALF])
def test_dirty_statistics_of_the_slack_are_not_read(dtype, device):
    q, cu_seqlens = packed((33, 7), 2, 16, dtype, device, slack=60)
    dout, _ = packed((33, 7), 2, 16, dtype, device, slack=60)
    options = {"cu_seqlens_q": cu_seqlens, "scale": 0.25}
    out, lse = attention_forward(q, q, q, **options)
    clean = attention_backward(dout, q, q, q, out, lse, **options)
    out[40:], lse[:, 40:] = math.nan, math.nan
    dirty = attention_backward(dout, q, q, q, out, lse, **options)
    assert all(torch.equal(a, b) for a, b in zip(clean, dirty, strict=True))
    assert all(torch.count_nonzero(t[40:]) == 0 for t in dirty)


def test_data_pointers_off_by_one_element(device):
    """The results are right for data pointers that are aligned to only one element."""
    tensors = inputs(1, 2, 40, 40, 32, HALF, device)
    moved = []
    for x in tensors:
        memory = torch.empty(x.numel() + 1, dtype=HALF, device=device)
        moved.append(memory[1:].view(1, 40, 2, 32).transpose(1, 2).copy_(x))
    for a, b in zip(run(*tensors), run(*moved), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("batch", "q_length", "k_length"), [(0, 5, 5), (2, 0, 5), (2, 5, 0), (2, 0, 0)]
)
def test_empty_dense_sizes(batch, q_length, k_length, device):
    q, k, v, dout = inputs(batch, 2, q_length, k_length, 16, SINGLE, device)
    for tensor, like in zip(run(q, k, v, dout), (q, q, k, v), strict=True):
        assert tensor.shape == like.shape
        assert torch.count_nonzero(tensor) == 0
    weights = attention_weights(q, k, scale=1.0)
    assert weights.shape == (batch, 2, q_length, k_length)


@pytest.mark.parametrize(("lengths", "slack"), [((), 0), ((), 7), ((0,), 7), ((0, 0), 0)])
def test_empty_packed_sizes(lengths, slack, device):
    x, cu_seqlens = packed(lengths, 2, 16, SINGLE, device, slack=slack)
    for tensor in run(x, x, x, x, cu_seqlens_q=cu_seqlens):
        assert tensor.shape == x.shape
        assert torch.count_nonzero(tensor) == 0


def test_errors_name_the_argument(device):
    x = torch.zeros(1, 1, 4, 257, device=device)
    with pytest.raises(ValueError, match=r"head_dim: got 257, allowed: 1 to 256"):
        attention_forward(x, x, x, scale=1.0)
    x = torch.zeros(1, 1, 4, 16, device=device)
    with pytest.raises(ValueError, match=r"seed: got None with dropout_p=0\.1"):
        attention_forward(x, x, x, scale=1.0, dropout_p=0.1)
