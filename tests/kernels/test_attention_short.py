"""The short attention kernels agree with the reference and with the general kernels."""

from __future__ import annotations

import math

import pytest
import torch
from kernel_cases import BRAIN, HALF, SINGLE, judge, kept, normal, seed_tensor
from quick_cases import long_case

from fastbert import reference
from fastbert.kernels import assembler, attention_short, tiles
from fastbert.kernels.attention import attention_backward, attention_forward
from fastbert.kernels.attention_problem import describe
from fastbert.kernels.tiles import ShortTile, Tile, attention_path, short_attention_tile


def rows(batch, length, heads, dim, dtype, device):
    """Return random (B, H, L, D) with the memory order (B, L, H, D), as from a projection."""
    return normal(batch, length, heads, dim, dtype=dtype, device=device).transpose(1, 2)


def inputs(batch, heads, q_length, k_length, dim, dtype, device):
    """Return random q, k and v, and a random gradient dout of the output."""
    lengths = (q_length, k_length, k_length, q_length)
    return [rows(batch, n, heads, dim, dtype, device) for n in lengths]


def random_mask(kind, batch, heads, q_length, k_length, device):
    if kind is None:
        return None
    if kind == "keys":
        mask = torch.rand(batch, 1, 1, k_length) > 0.3
    else:
        mask = torch.rand(batch, heads, q_length, k_length) > 0.3
        mask[0, 0, q_length // 2] = False
    return mask.to(device).expand(batch, heads, q_length, k_length)


def run(q, k, v, dout, path="short", backward="short", **options):
    """Return [out, dq, dk, dv] of the launchers on the chosen paths, "short" or "general"."""
    options = {"scale": q.shape[-1] ** -0.5, **options}
    out, lse = attention_forward(q, k, v, path=path, **options)
    return [out, *attention_backward(dout, q, k, v, out, lse, path=backward, **options)]


def check_dense(q, k, v, dout, backward="short", **options):
    options = {"scale": q.shape[-1] ** -0.5, "seed": seed_tensor(str(q.device)), **options}
    actual = run(q, k, v, dout, backward=backward, **options)
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
        (2, 128, 128, 64, HALF, None, 0.0, {}),
        (2, 64, 64, 64, BRAIN, None, 0.1, {}),
        (1, 97, 97, 64, HALF, "keys", 0.1, {}),
        (1, 70, 128, 32, BRAIN, "pairs", 0.1, {}),
        (1, 128, 40, 32, HALF, "pairs", 0.0, {"causal": True}),
        (1, 65, 65, 59, HALF, None, 0.2, {"scale": -0.2}),
        (1, 40, 100, 40, BRAIN, "keys", 0.0, {"causal": True}),
        (1, 129, 128, 64, HALF, None, 0.1, {"window": (20, 10)}),
        (1, 100, 100, 16, HALF, None, 0.0, {"window": (0, 30)}),
        (2, 1, 1, 32, BRAIN, None, 0.0, {}),
        (1, 33, 33, 64, HALF, None, 0.0, {"scale": 0.0}),
    ],
)
def test_dense_against_oracle(heads, q_length, k_length, dim, dtype, mask, p, options, device):
    q, k, v, dout = inputs(2, heads, q_length, k_length, dim, dtype, device)
    mask = random_mask(mask, 2, heads, q_length, k_length, device)
    check_dense(q, k, v, dout, mask=mask, dropout_p=p, **options)


@pytest.mark.parametrize(
    ("k_length", "dim", "mask", "p", "options"),
    [
        (200, 64, "keys", 0.0, {}),
        long_case(256, 64, None, 0.1, {"causal": True}),
        (130, 80, "pairs", 0.0, {"causal": True}),
        (384, 32, None, 0.0, {"window": (30, 300)}),
        long_case(511, 64, "keys", 0.0, {}),
        (512, 16, None, 0.0, {}),
        (97, 111, None, 0.0, {}),
    ],
)
def test_longer_forward_against_oracle(k_length, dim, mask, p, options, device):
    q, k, v, dout = inputs(1, 2, 70, k_length, dim, HALF, device)
    mask = random_mask(mask, 1, 2, 70, k_length, device)
    check_dense(q, k, v, dout, backward="general", mask=mask, dropout_p=p, **options)


@pytest.mark.parametrize("dtype", [HALF, BRAIN])
def test_bias_against_oracle(dtype, device):
    q, k, v, dout = inputs(1, 2, 70, 97, 64, dtype, device)
    bias = normal(1, 2, 1, 97, dtype=dtype, device=device).expand(1, 2, 70, 97)
    check_dense(q, k, v, dout, bias=bias, mask=random_mask("pairs", 1, 2, 70, 97, device))


@pytest.mark.parametrize(
    ("block_m", "block_n", "chunks"), [(32, 64, 2), (64, 128, 1), (128, 32, 3)]
)
def test_each_forward_tile_alone(block_m, block_n, chunks, device, monkeypatch):
    tile = ShortTile(Tile(block_m, block_n, 4, 1), chunks, programs=2)
    monkeypatch.setattr(attention_short, "short_attention_tile", lambda *_: tile)
    q, k, v, dout = inputs(1, 1, 70, 90, 32, HALF, device)
    mask = random_mask("keys", 1, 1, 70, 90, device)
    check_dense(q, k, v, dout, backward="general", mask=mask, dropout_p=0.1)


@pytest.mark.parametrize(("block_m", "block_n"), [(16, 64), (64, 64), (32, 128)])
def test_each_backward_tile_alone(block_m, block_n, device, monkeypatch):
    tile = ShortTile(Tile(block_m, block_n, 4, 1), chunks=2, programs=2)
    monkeypatch.setattr(attention_short, "short_attention_tile", lambda *_: tile)
    q, k, v, dout = inputs(1, 1, 40, 60, 32, HALF, device)
    check_dense(q, k, v, dout, mask=random_mask("keys", 1, 1, 40, 60, device), dropout_p=0.1)


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
        ((0, 40, 0, 33, 1, 0), None, HALF, 0.1, {}),
        ((5, 0, 70), (40, 3, 0), BRAIN, 0.0, {}),
        ((100, 30), (64, 128), HALF, 0.1, {"causal": True}),
        ((30, 65), None, HALF, 0.0, {"window": (10, 5)}),
        # Only the longest sequence fills its chunks of keys.
        ((30, 9), (64, 40), HALF, 0.1, {}),
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
    used = (used_q, used_q, used_k, used_k)
    for tensor, n in zip(actual, used, strict=True):
        assert torch.count_nonzero(tensor[n:]) == 0
    _, lse = attention_forward(q, k, v, scale=1.0, path="short", **bounds)
    assert torch.all(lse[:, used_q:] == -math.inf)

    def function(q, k, v):
        lengths = (cu_seqlens_q.cpu(), cu_seqlens_k.cpu())
        return reference.attention_varlen(
            q, k, v, *lengths, dropout_p=p, dropout_seed=seed.cpu(), **options
        )

    if max(q_lengths):
        cut = [q[:used_q], k[:used_k], v[:used_k]]
        trimmed = [t[:n] for t, n in zip(actual, used, strict=True)]
        judge("out dq dk dv", trimmed, function, cut, dout[:used_q])


def test_short_and_general_agree(device):
    """Both paths agree, even if one path's backward uses results of the other path's forward."""
    q, k, v, dout = inputs(1, 1, 40, 70, 64, HALF, device)
    options = {"dropout_p": 0.1, "seed": seed_tensor(device), "scale": 0.125}
    short, lse = attention_forward(q, k, v, path="short", **options)
    general, general_lse = attention_forward(q, k, v, path="general", **options)
    assert (lse - general_lse).abs().max() <= 4e-6 * general_lse.abs().max()
    assert (short - general).abs().max() <= 2**-10 * general.abs().max()
    for out, statistics, path in ((general, general_lse, "short"), (short, lse, "general")):
        mixed = attention_backward(dout, q, k, v, out, statistics, path=path, **options)
        same = attention_backward(dout, q, k, v, short, lse, path="short", **options)
        for a, b in zip(mixed, same, strict=True):
            assert (a - b).abs().max() <= 2**-9 * b.abs().max()


@pytest.mark.parametrize("k_length", [64, 128])
def test_dropout_is_the_defined_philox(k_length, device):
    """With uniform weights and V = I, the output shows Philox's dropout mask in all chunks."""
    q = torch.zeros(2, 3, 33, 128, device=device, dtype=HALF)
    k = torch.zeros(2, 3, k_length, 128, device=device, dtype=HALF)
    v = torch.eye(128, device=device, dtype=HALF)[:k_length].expand(2, 3, k_length, 128)
    seed = -(2**62) - 12345
    options = {"dropout_p": 0.3, "seed": seed_tensor(device, seed), "scale": 1.0}
    out, _ = attention_forward(q, k, v, path="short", **options)
    assert torch.equal((out != 0).cpu()[..., :k_length], kept(seed, 0.3, (2, 3, 33, k_length)))


def test_fully_masked_rows_are_exactly_zero(device):
    q, k, v, dout = inputs(2, 2, 40, 70, 32, HALF, device)
    mask = (torch.rand(2, 2, 40, 70) > 0.3).to(device)
    mask[1] = False
    mask[0, 0, 3] = False
    out, lse = attention_forward(q, k, v, mask=mask, scale=1.0, path="short")
    gradients = attention_backward(dout, q, k, v, out, lse, mask=mask, scale=1.0, path="short")
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
    k, v = k.clone(), v.clone()
    k[:, :, hidden], v[:, :, hidden] = poison, poison
    dirty = run(q, k, v, dout, dropout_p=0.1, seed=seed_tensor(device), **options)
    assert all(torch.equal(a, b) for a, b in zip(clean, dirty, strict=True))
    assert all(torch.count_nonzero(t[:, :, hidden]) == 0 for t in dirty[2:])


def test_batch_and_longest_sequence_do_not_matter(device):
    """Reruns, single sequences, and an unnecessarily large max_seqlen give the same bits."""
    q, k, v, dout = inputs(3, 1, 40, 40, 32, HALF, device)
    first, second = (run(q, k, v, dout) for _ in range(2))
    single = run(q[1:2], k[1:2], v[1:2], dout[1:2])
    for a, b, c in zip(first, second, single, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a[1:2], c)
    x, cu_seqlens = packed((60,), 2, 32, HALF, device)
    options = {"scale": 0.2, "cu_seqlens_q": cu_seqlens, "max_seqlen_q": 60, "path": "short"}
    outs = [attention_forward(x, x, x, max_seqlen_k=longest, **options) for longest in (60, 200)]
    assert all(torch.equal(a, b) for a, b in zip(*outs, strict=True))


@pytest.mark.parametrize("multiprocessors", [1, 1000])
def test_any_number_of_programs_gives_the_same_bits(multiprocessors, device, monkeypatch):
    """The bits do not depend on whether there are more work items than programs."""
    x, cu_seqlens = packed((130, 0, 40), 2, 16, HALF, device, slack=70)
    bounds = {"cu_seqlens_q": cu_seqlens, "max_seqlen_q": 130, "max_seqlen_k": 64}
    k, cu_seqlens_k = packed((40, 0, 60), 2, 16, HALF, device)
    options = {**bounds, "cu_seqlens_k": cu_seqlens_k, "scale": 0.25}
    monkeypatch.setattr(attention_short, "multiprocessors", lambda x: 2)
    expected = attention_forward(x, k, k, path="short", **options)
    monkeypatch.setattr(attention_short, "multiprocessors", lambda x: multiprocessors)
    problem = describe(x, k, k, **options)
    launch = attention_short.short_forward_launch(problem, *expected)
    assert (launch.arguments["items"] > launch.grid[0]) == (multiprocessors == 1)
    assert (launch.arguments["groups"] > 1) == (multiprocessors == 1000)
    got = attention_forward(x, k, k, path="short", **options)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_the_backward_is_persistent_too(device, monkeypatch):
    monkeypatch.setattr(attention_short, "multiprocessors", lambda x: 1)
    q, k, v, dout = inputs(3, 1, 33, 40, 32, HALF, device)
    check_dense(q, k, v, dout, dropout_p=0.1)


def test_layouts_do_not_matter(device):
    """Slices, a transposed last dimension, and gradients with any strides change no bit."""
    fused = normal(2, 40, 3, 2, 24, dtype=HALF, device=device)
    q, k, v = (fused[:, :, i].transpose(1, 2) for i in range(3))
    dout = normal(1, 2, 1, 24, dtype=HALF, device=device).expand(2, 2, 40, 24)
    expected = run(q.contiguous(), k.contiguous(), v.contiguous(), dout.contiguous())
    got = run(q, k.mT.contiguous().mT, v.transpose(0, 3).contiguous().transpose(0, 3), dout)
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    buffer = torch.full_like(fused, math.nan)
    into = tuple(buffer[:, :, i].transpose(1, 2) for i in range(2))
    into = (*into, torch.full((2, 2, 24, 40), math.nan, dtype=HALF, device=device).mT)
    out, lse = attention_forward(q, k, v, scale=24**-0.5, path="short")
    attention_backward(dout, q, k, v, out, lse, scale=24**-0.5, path="short", into=into)
    assert all(torch.equal(a, b) for a, b in zip(expected[1:], into, strict=True))


@pytest.mark.parametrize(
    ("batch", "q_length", "k_length"), [(0, 5, 5), (2, 0, 5), (2, 5, 0), (2, 0, 0)]
)
def test_empty_dense_sizes(batch, q_length, k_length, device):
    q, k, v, dout = inputs(batch, 2, q_length, k_length, 16, HALF, device)
    for tensor, like in zip(run(q, k, v, dout), (q, q, k, v), strict=True):
        assert tensor.shape == like.shape
        assert torch.count_nonzero(tensor) == 0


@pytest.mark.parametrize(("lengths", "slack"), [((), 0), ((), 7), ((0,), 7), ((0, 0), 0)])
def test_empty_packed_sizes(lengths, slack, device):
    x, cu_seqlens = packed(lengths, 2, 16, HALF, device, slack=slack)
    for tensor in run(x, x, x, x, cu_seqlens_q=cu_seqlens):
        assert tensor.shape == x.shape
        assert torch.count_nonzero(tensor) == 0


def test_paths():
    assert attention_path("forward", 128, 64, BRAIN) == "short"
    assert attention_path("forward", 129, 64, BRAIN) == "general"
    assert attention_path("forward", 64, 80, BRAIN) == "general"
    assert attention_path("forward", 64, 59, BRAIN) == "general"
    assert attention_path("backward", 128, 64, HALF) == "short"
    assert attention_path("forward", 64, 64, BRAIN, has_pairs=True) == "general"
    assert attention_path("backward", 64, 64, HALF, has_key_mask=True) == "short"
    assert attention_path("backward", 65, 64, HALF, has_key_mask=True) == "general"
    assert attention_path("backward", 129, 32, HALF) == "general"
    assert attention_path("forward", 64, 64, SINGLE) == "general"
    assert short_attention_tile("forward", 130, 64).chunks == 3
    assert short_attention_tile("backward", 65, 64).tile.block_n == 128


def test_errors_name_the_argument(device):
    x = torch.zeros(1, 1, 513, 16, device=device, dtype=HALF)
    y = torch.zeros(1, 1, 2049, 16, device=device, dtype=HALF)
    with pytest.raises(ValueError, match=r"keys: got 2049, allowed: up to 2048"):
        attention_forward(y, y, y, scale=1.0, path="short")
    with pytest.raises(ValueError, match=r"dtype: got torch.float32, allowed: torch.float16"):
        attention_forward(x.float(), x.float(), x.float(), scale=1.0, path="short")
    with pytest.raises(ValueError, match=r"path: got 'long', allowed: None, 'short', 'general'"):
        attention_forward(x, x, x, scale=1.0, path="long")
    out, lse = torch.empty_like(x), torch.empty(1, 1, 513, device=device)
    with pytest.raises(ValueError, match=r"keys: got 513, allowed: up to 128"):
        attention_backward(x, x, x, x, out, lse, scale=1.0, path="short")


@pytest.mark.parametrize(("version", "keys"), [("12.8", 128), ("12.9", 64), ("13.4", 64)])
def test_an_assembler_that_loses_descriptors_gets_another_tile(monkeypatch, version, keys):
    tool = assembler.Assembler("ptxas", version, "TRITON_PTXAS_PATH")
    monkeypatch.setattr(assembler, "assembler", lambda arch: tool)
    monkeypatch.setattr(tiles, "IS_INTERPRETED", False)
    assembler.loses_descriptors.cache_clear()
    found = {arch: tiles.short_attention_tile("backward", 40, 64, arch) for arch in (80, 90, 100)}
    assembler.loses_descriptors.cache_clear()
    assert {arch: short.tile.block_n for arch, short in found.items()} == {
        80: 64,
        90: keys,
        100: 64,
    }
