"""The numbered bugs of other libraries do not occur on any backend of this machine.

Exact properties are compared bit for bit, so that no tolerance hides an influence of padding.
"""

from __future__ import annotations

import functools
import math

import pytest
import torch

from fastbert import ops, reference
from fastbert.ops import backend as backends
from fastbert.testing.compare import assert_close
from fastbert.testing.yardstick import Yardstick


def serving(op: str, device: str = "cpu") -> list[str]:
    request = backends.Request(device, torch.float32)
    return [b for b in backends.BACKENDS if backends.refusal(op, b, request) is None]


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ATTENTION = serving("attention", DEVICE)
LAYER_NORM = serving("layer_norm", DEVICE)
RMS_NORM = serving("rms_norm", DEVICE)
ROTARY = serving("rotary", DEVICE)
EMBEDDING = serving("embedding", DEVICE)
GELU = serving("linear_gelu", DEVICE)
CROSS_ENTROPY = serving("linear_cross_entropy", DEVICE)


def qkv(*shape: int) -> list[torch.Tensor]:
    return [torch.randn(*shape, device=DEVICE, requires_grad=True) for _ in range(3)]


def gradients(out, tensors):
    return torch.autograd.grad(out, tensors, torch.randn_like(out))


@pytest.mark.parametrize("backend", ATTENTION)
def test_01_fully_masked_row_is_exactly_zero(backend):
    q, k, v = qkv(2, 2, 9, 16)
    mask = torch.ones(2, 9, dtype=torch.bool, device=DEVICE)
    mask[1] = False
    out = ops.attention(q, k, v, mask=mask, backend=backend)
    dq, dk, dv = gradients(out, (q, k, v))
    assert (out[1] == 0).all()
    assert (dq[1] == 0).all()
    assert torch.isfinite(dk).all()
    assert torch.isfinite(dv).all()


@pytest.mark.parametrize("backend", ATTENTION)
@pytest.mark.parametrize("value", [-math.inf, -1e4, torch.finfo(torch.float32).min])
def test_02_additive_masks_are_the_same_as_bool(backend, value):
    q, k, v = qkv(2, 2, 9, 16)
    mask = torch.ones(2, 9, dtype=torch.bool, device=DEVICE)
    mask[0, 5:] = False
    bias = torch.zeros(2, 1, 1, 9, device=DEVICE).masked_fill(~mask[:, None, None], value)
    expected = ops.attention(q, k, v, mask=mask, backend=backend)
    assert torch.equal(ops.attention(q, k, v, bias=bias, backend=backend), expected)


@pytest.mark.parametrize("backend", ATTENTION)
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_03_poison_in_masked_keys_and_values_changes_no_bit(backend, poison):
    q, k, v = qkv(2, 2, 40, 16)
    mask = torch.ones(2, 40, dtype=torch.bool, device=DEVICE)
    mask[0, 21:] = False
    clean = ops.attention(q, k, v, mask=mask, backend=backend)
    dout = torch.randn_like(clean)
    clean_gradients = torch.autograd.grad(clean, (q, k, v), dout)
    with torch.no_grad():
        k[0, :, 21:], v[0, :, 21:] = poison, poison
    out = ops.attention(q, k, v, mask=mask, backend=backend)
    assert torch.equal(out, clean)
    for got, expected in zip(
        torch.autograd.grad(out, (q, k, v), dout), clean_gradients, strict=True
    ):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("backend", ATTENTION)
def test_04_slack_behind_the_last_sequence_is_never_seen(backend):
    q, k, v = qkv(30, 2, 16)
    cu_seqlens = torch.tensor([0, 9, 20], dtype=torch.int32, device=DEVICE)
    with torch.no_grad():
        for tensor in (q, k, v):
            tensor[20:] = math.nan
    out = ops.attention_varlen(q, k, v, cu_seqlens, max_seqlen_q=11, backend=backend)
    dout = torch.randn_like(out)
    dout[20:] = math.nan
    assert torch.isfinite(out[:20]).all()
    assert (out[20:] == 0).all()
    for gradient in torch.autograd.grad(out, (q, k, v), dout):
        assert torch.isfinite(gradient[:20]).all()
        assert (gradient[20:] == 0).all()


@pytest.mark.skipif("triton" not in ATTENTION, reason="needs the kernels that save lse")
def test_05_what_is_saved_for_rows_without_a_token_is_not_read():
    """The backward does not read saved values after the last sequence, which may be old memory."""
    from fastbert.kernels.attention import attention_backward, attention_forward

    q, k, v, dout = (torch.randn(41, 2, 16, device=DEVICE) for _ in range(4))
    options = {"cu_seqlens_q": torch.tensor([0, 9, 30], dtype=torch.int32, device=DEVICE)}
    out, lse = attention_forward(q, k, v, scale=0.25, **options)
    assert (lse[:, 30:] == -math.inf).all()
    clean = attention_backward(dout, q, k, v, out, lse, scale=0.25, **options)
    for poison in (math.nan, math.inf, -math.inf):
        dirty_out, dirty_lse, dirty_dout = out.clone(), lse.clone(), dout.clone()
        dirty_out[30:], dirty_lse[:, 30:], dirty_dout[30:] = poison, poison, poison
        got = attention_backward(dirty_dout, q, k, v, dirty_out, dirty_lse, scale=0.25, **options)
        assert all(torch.equal(a, b) for a, b in zip(got, clean, strict=True))


@pytest.mark.parametrize("backend", ATTENTION)
@pytest.mark.parametrize("lengths", [(0, 5, 7), (5, 0, 7), (5, 7, 0), (0, 0, 0), ()])
def test_06_07_zero_length_sequences_and_empty_batches(backend, lengths):
    cu_seqlens = torch.tensor([0, *lengths], device=DEVICE).cumsum(0).int()
    q, k, v = qkv(sum(lengths), 2, 16)
    out = ops.attention_varlen(q, k, v, cu_seqlens, backend=backend)
    gradients(out, (q, k, v))
    start = 0
    for length in lengths:
        alone = slice(start, start + length)
        if length:
            dense = [x[alone].transpose(0, 1)[None] for x in (q, k, v)]
            exact = reference.attention(*(x.double() for x in dense))
            yardstick = Yardstick(lambda dense=dense: reference.attention(*dense))
            got = out[alone].transpose(0, 1)[None]
            assert_close("sequence", got, exact, yardstick)
        start += length


@pytest.mark.parametrize("backend", ATTENTION)
@pytest.mark.parametrize("shape", [(0, 2, 5, 8), (2, 2, 0, 8)])
def test_07_empty_dense_batches(backend, shape):
    q, k, v = qkv(*shape)
    out = ops.attention(q, k, v, backend=backend)
    assert out.shape == shape
    gradients(out, (q, k, v))


@pytest.mark.parametrize("backend", LAYER_NORM)
def test_07_empty_layer_norm(backend):
    x = torch.randn(0, 16, device=DEVICE, requires_grad=True)
    weight = torch.ones(16, device=DEVICE, requires_grad=True)
    out = ops.layer_norm(x, weight, weight, backend=backend)
    dx, dweight = gradients(out, (x, weight))
    assert dx.shape == (0, 16)
    assert (dweight == 0).all()


@pytest.mark.parametrize("backend", RMS_NORM)
def test_07_empty_rms_norm(backend):
    x = torch.randn(0, 16, device=DEVICE, requires_grad=True)
    weight = torch.ones(16, device=DEVICE, requires_grad=True)
    dx, dweight = gradients(ops.rms_norm(x, weight, backend=backend), (x, weight))
    assert dx.shape == (0, 16)
    assert (dweight == 0).all()


@pytest.mark.parametrize("backend", EMBEDDING)
@pytest.mark.parametrize("shape", [(0,), (2, 0), (2, 3)])
def test_07_embedding_of_no_token_and_of_a_batch(backend, shape):
    indices = [torch.zeros(shape, dtype=torch.int64, device=DEVICE) for _ in range(3)]
    leaves = [torch.randn(n, 16, device=DEVICE, requires_grad=True) for n in (5, 2, 4)]
    leaves += [torch.randn(16, device=DEVICE, requires_grad=True) for _ in range(2)]
    out = ops.embedding(*indices, *leaves, padding_idx=0, backend=backend)
    assert out.shape == (*shape, 16)
    dwords, dtypes, *_ = gradients(out, leaves)
    assert (dwords == 0).all()
    assert (dtypes[1] == 0).all()


@pytest.mark.parametrize("backend", GELU)
def test_07_empty_linear_gelu(backend):
    x = torch.randn(0, 16, device=DEVICE, requires_grad=True)
    weight = torch.randn(8, 16, device=DEVICE, requires_grad=True)
    bias = torch.randn(8, device=DEVICE, requires_grad=True)
    out = ops.linear_gelu(x, weight, bias, backend=backend)
    dx, dweight, dbias = gradients(out, (x, weight, bias))
    assert dx.shape == (0, 16)
    assert (dweight == 0).all()
    assert (dbias == 0).all()


# These lengths and head dims failed in earlier versions, or are next to a tile size.
@pytest.mark.each_value
@pytest.mark.parametrize("backend", ATTENTION)
@pytest.mark.parametrize(
    ("length", "dim"),
    [(1, 1), (97, 16), (129, 32), (511, 40), (512, 59), (1, 64), (97, 80), (129, 111), (97, 128)],
)
def test_08_lengths_and_head_dims(backend, length, dim):
    tensors = qkv(1, 1, length, dim)
    dout = torch.randn(1, 1, length, dim, device=DEVICE)

    def run(function, dtype, **options):
        leaves = [x.detach().to(dtype).requires_grad_() for x in tensors]
        out = function(*leaves, **options)
        return [out, *torch.autograd.grad(out, leaves, dout.to(dtype))]

    results = (
        run(ops.attention, tensors[0].dtype, backend=backend),
        run(reference.attention, torch.float64),
        Yardstick(lambda: run(reference.attention, tensors[0].dtype)),
    )
    # With a single key, dq and dk are differences of equal sums, which are only rounding errors.
    names = ("out", "dq", "dk", "dv") if length > 1 else ("out", "dv")
    for name in names:
        i = ("out", "dq", "dk", "dv").index(name)
        assert_close(name, *(result[i] for result in results))


@pytest.mark.parametrize("backend", ATTENTION)
def test_10_strided_inputs_and_gradients(backend):
    # With this many elements, the root mean square of rounding errors hardly depends on chance.
    storage = torch.randn(2, 40, 3, 4, 16, device=DEVICE)
    strided = [storage[:, :, i].transpose(1, 2).requires_grad_() for i in range(3)]
    out = ops.attention(*strided, backend=backend)
    # The first gradient has stride 0, as from .sum().backward(). The second gradient is transposed.
    for dout in (torch.ones((), device=DEVICE).expand_as(out), out.detach().mT.contiguous().mT):

        def run(dtype, dout=dout):
            leaves = [x.detach().contiguous().to(dtype).requires_grad_() for x in strided]
            y = reference.attention(*leaves)
            return [y, *torch.autograd.grad(y, leaves, dout.to(dtype))]

        got = out, *torch.autograd.grad(out, strided, dout, retain_graph=True)
        sides = run(torch.float64), Yardstick(lambda run=run: run(out.dtype))
        for name, *three in zip(("out", "dq", "dk", "dv"), got, *sides, strict=True):
            assert_close(name, *three)


@pytest.mark.parametrize("backend", LAYER_NORM)
def test_10_layer_norm_of_strided_rows_and_transposed_elements(backend):
    wide = torch.randn(5, 40, device=DEVICE)
    weight = torch.randn(16, device=DEVICE)
    for x in (wide[:, 7:23], torch.randn(16, 5, device=DEVICE).t(), wide[:, :1].expand(5, 16)):
        expected = ops.layer_norm(x.contiguous(), weight, weight, residual=x, backend=backend)
        got = ops.layer_norm(x, weight, weight, residual=x.contiguous(), backend=backend)
        assert torch.equal(got, expected)


@pytest.mark.parametrize("backend", ROTARY)
def test_10_rotary_of_a_fused_projection_and_gradients_at_any_strides(backend):
    angles = torch.rand(9, 8, device=DEVICE) * 6
    turn = functools.partial(
        ops.rotary, cos=angles.cos(), sin=angles.sin(), heads=4, backend=backend
    )
    wide = torch.randn(9, 6, 40, device=DEVICE)
    for x in (
        wide[..., 7:23],
        wide[:, :, :16].mT.contiguous().mT,
        wide[:1, :1, :16].expand(9, 6, 16),
    ):
        leaf = x.detach().requires_grad_()
        out = turn(leaf)
        assert out.is_contiguous()
        assert torch.equal(out, turn(x.contiguous()))
        for dout in (torch.ones((), device=DEVICE).expand_as(out), x):
            (got,) = torch.autograd.grad(out, leaf, dout, retain_graph=True)
            (expected,) = torch.autograd.grad(out, leaf, dout.contiguous(), retain_graph=True)
            assert torch.equal(got, expected)


@pytest.mark.parametrize("backend", ROTARY)
def test_28_rotary_copies_what_arithmetic_would_change_and_has_no_gradient_of_the_angles(backend):
    x = torch.tensor([math.inf, -0.0, math.nan, 3.0], device=DEVICE).repeat(2, 3, 1)
    cos, sin = (f(torch.rand(2, 2, device=DEVICE)).requires_grad_() for f in (torch.cos, torch.sin))
    out = ops.rotary(x, cos, sin, heads=1, backend=backend)
    assert torch.equal(out[:, 1:].view(torch.int32), x[:, 1:].view(torch.int32))
    turned = torch.randn(2, 3, 4, device=DEVICE, requires_grad=True)
    ops.rotary(turned, cos, sin, heads=3, backend=backend).sum().backward()
    assert turned.grad is not None
    assert cos.grad is sin.grad is None


@pytest.mark.parametrize("backend", LAYER_NORM)
@pytest.mark.parametrize("shape", [(16,), (3, 16), (2, 3, 16), (2, 1, 3, 16), (2, 1, 2, 3, 16)])
def test_11_layer_norm_of_every_rank(backend, shape):
    x, weight = torch.randn(shape, device=DEVICE), torch.randn(16, device=DEVICE)
    flat = ops.layer_norm(x.reshape(-1, 16), weight, weight, backend=backend)
    assert torch.equal(ops.layer_norm(x, weight, weight, backend=backend), flat.view(shape))


@pytest.mark.parametrize("backend", RMS_NORM)
@pytest.mark.parametrize("shape", [(16,), (3, 16), (2, 1, 2, 3, 16)])
def test_11_rms_norm_of_every_rank_and_stride(backend, shape):
    x, weight = torch.randn(shape, device=DEVICE), torch.randn(16, device=DEVICE)
    flat = ops.rms_norm(x.reshape(-1, 16), weight, residual=x.reshape(-1, 16), backend=backend)
    strided = torch.randn(*shape[:-1], 40, device=DEVICE)[..., 3:19].copy_(x)
    got = ops.rms_norm(strided, weight, residual=x, backend=backend)
    assert torch.equal(got, flat.view(shape))


@pytest.mark.parametrize("backend", LAYER_NORM)
@pytest.mark.parametrize("columns", [1, 59, 111, 768, 1023, 3584])
def test_12_unaligned_rows_and_odd_widths(backend, columns):
    x = torch.randn(5 * columns + 1, device=DEVICE)[1:].view(5, columns)
    weight = torch.randn(columns + 1, device=DEVICE)[1:]
    out = ops.layer_norm(x, weight, weight, eps=1e-5, backend=backend)
    exact = reference.layer_norm(x.double(), weight.double(), weight.double(), eps=1e-5)
    yardstick = Yardstick(lambda: reference.layer_norm(x, weight, weight, eps=1e-5))
    assert_close("out", out, exact, yardstick)


@pytest.mark.parametrize("backend", RMS_NORM)
@pytest.mark.parametrize("columns", [1, 111, 768, 1023, 3584])
def test_12_unaligned_rows_and_odd_widths_of_rms_norm(backend, columns):
    x = torch.randn(5 * columns + 1, device=DEVICE)[1:].view(5, columns)
    weight = torch.randn(columns + 1, device=DEVICE)[1:]
    out = ops.rms_norm(x, weight, backend=backend)
    exact = reference.rms_norm(x.double(), weight.double())
    assert_close("out", out, exact, Yardstick(lambda: reference.rms_norm(x, weight)))


@pytest.mark.parametrize("backend", ATTENTION)
def test_13_dropout_differs_per_call_repeats_on_reseed_and_keeps_its_share(backend):
    q, k, v = qkv(2, 2, 24, 16)

    def run(seed):
        torch.manual_seed(seed)
        return ops.attention(q, k, v, dropout_p=0.25, backend=backend)

    first, again, other = run(1), run(1), run(2)
    following = ops.attention(q, k, v, dropout_p=0.25, backend=backend)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not torch.equal(other, following)


def test_13_the_kept_fraction_is_binomial():
    kept, draws, p = 0, 0, 0.1
    for seed in range(1000):
        keep = reference.dropout_keep(torch.tensor([seed * 7919]), p, (16, 64))
        kept, draws = kept + int(keep.sum()), draws + keep.numel()
    deviation = abs(kept - draws * (1 - p)) / math.sqrt(draws * p * (1 - p))
    assert deviation < 4.9, "two-sided probability 1e-6"


def test_13_philox_known_answer():
    zero = torch.zeros(1, dtype=torch.int64)
    words = [int(w) for w in reference.philox(zero, zero, zero, zero, zero)]
    assert words == [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]


@pytest.mark.parametrize("backend", ATTENTION)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_14_the_backward_replays_the_forwards_mask(backend, compiled, checkpointed):
    """With identity matrices as v and dout, dv is the transpose of out if both masks are equal."""
    q, k, _ = qkv(1, 2, 16, 16)
    v = torch.eye(16, device=DEVICE).expand(1, 2, 16, 16).clone().requires_grad_()

    def attend(q, k, v):
        return ops.attention(q, k, v, dropout_p=0.5, backend=backend)

    def block(q, k, v):
        if not checkpointed:
            return attend(q, k, v)
        return torch.utils.checkpoint.checkpoint(attend, q, k, v, use_reentrant=False)

    run = torch.compile(block, fullgraph=True, backend="aot_eager") if compiled else block
    out = run(q, k, v)
    assert 0.2 < (out == 0).float().mean() < 0.8
    (dv,) = torch.autograd.grad(out, v, torch.eye(16, device=DEVICE).expand_as(out))
    assert torch.equal(dv == 0, out.mT == 0)
    # Each element of dv is a sum with only one nonzero term, so dv has no rounding error.
    torch.testing.assert_close(dv, out.mT)


@pytest.mark.parametrize("backend", LAYER_NORM)
def test_14_checkpointing_replays_the_same_dropout(backend):
    x = torch.randn(8, 32, device=DEVICE, requires_grad=True)
    weight = torch.ones(32, device=DEVICE)

    def block(x):
        return ops.layer_norm(x, weight, weight, dropout_p=0.5, residual=x, backend=backend)

    torch.manual_seed(3)
    (plain,) = torch.autograd.grad(block(x).square().sum(), x)
    torch.manual_seed(3)
    out = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
    (recomputed,) = torch.autograd.grad(out.square().sum(), x)
    assert torch.equal(plain, recomputed)


@pytest.mark.parametrize("backend", ATTENTION)
def test_16_dropout_of_nothing_and_of_everything(backend):
    q, k, v = qkv(1, 2, 9, 16)
    plain = ops.attention(q, k, v, backend=backend)
    assert torch.equal(ops.attention(q, k, v, dropout_p=0.0, backend=backend), plain)
    out = ops.attention(q, k, v, dropout_p=1.0, backend=backend)
    assert (out == 0).all()
    for gradient in gradients(out, (q, k, v)):
        assert (gradient == 0).all()


@pytest.mark.parametrize("backend", LAYER_NORM)
def test_16_layer_norm_dropout_of_everything_leaves_the_residual(backend):
    x, residual = torch.randn(2, 5, 32, device=DEVICE)
    weight = torch.ones(32, device=DEVICE)
    out = ops.layer_norm(x, weight, weight, residual=residual, dropout_p=1.0, backend=backend)
    assert torch.equal(out, ops.layer_norm(residual, weight, weight, backend=backend))


@pytest.mark.parametrize("backend", ATTENTION)
def test_17_reruns_are_bitwise_equal(backend):
    q, k, v = qkv(2, 2, 70, 32)
    dout = torch.randn(2, 2, 70, 32, device=DEVICE)

    def run():
        return torch.autograd.grad(ops.attention(q, k, v, backend=backend), (q, k, v), dout)

    first = run()
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(first, run(), strict=True))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_18_tensors_on_another_device_than_the_current_one():
    tensors = [torch.randn(2, 2, 33, 32, device="cuda:1") for _ in range(3)]
    expected = ops.attention(*(x.to("cuda:0") for x in tensors), backend="triton")
    with torch.cuda.device(0):
        assert torch.equal(ops.attention(*tensors, backend="triton").to("cuda:0"), expected)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_19_a_stream_of_its_own():
    q, k, v = qkv(2, 4, 257, 64)
    expected = ops.attention(q * 2, k, v, backend="triton")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        # During this sleep, a kernel that was launched on a wrong stream would read q * 2 too
        # early.
        torch.cuda._sleep(20_000_000)
        out = ops.attention(q * 2, k, v, backend="triton")
    stream.synchronize()
    assert torch.equal(out, expected)


@pytest.mark.parametrize("backend", ATTENTION)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_21_autocast(backend, dtype):
    q, k, v = qkv(2, 2, 9, 16)
    weight = torch.randn(24, 16, device=DEVICE, requires_grad=True)
    gelu_backend = backend if backend in GELU else None
    with torch.amp.autocast(DEVICE, dtype=dtype):
        attended = ops.attention(q, k, v, backend=backend)
        activated = ops.linear_gelu(attended, weight, None, backend=gelu_backend)
    assert attended.dtype == activated.dtype == dtype
    for gradient in torch.autograd.grad(activated.float().sum(), (q, k, v, weight)):
        assert gradient.dtype == torch.float32
        assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("backend", ATTENTION)
def test_22_double_backward_raises_and_names_the_reference(backend):
    q, k, v = qkv(1, 1, 4, 8)
    out = ops.attention(q, k, v, backend=backend).square().sum()
    (gradient,) = torch.autograd.grad(out, q, create_graph=True)
    with pytest.raises(RuntimeError, match=r"fastbert\.reference"):
        gradient.sum().backward()


@pytest.mark.parametrize("backend", LAYER_NORM)
def test_28_layer_norm_of_large_means_constant_rows_and_huge_values(backend):
    weight, bias = torch.ones(768, device=DEVICE), torch.zeros(768, device=DEVICE)
    x = torch.randn(4, 768, device=DEVICE) + 1e4
    out = ops.layer_norm(x, weight, bias, eps=1e-5, backend=backend)
    exact = reference.layer_norm(x.double(), weight.double(), bias.double(), eps=1e-5)
    yardstick = Yardstick(lambda: reference.layer_norm(x, weight, bias, eps=1e-5))
    assert_close("mean 1e4", out, exact, yardstick)
    constant = torch.full((2, 768), 3.0, device=DEVICE)
    assert (ops.layer_norm(constant, weight, bias, eps=1e-5, backend=backend) == 0).all()
    huge = torch.full((2, 768), 1e30, device=DEVICE)
    assert not ops.layer_norm(huge, weight, bias, eps=1e-5, backend=backend).isnan().any()


@pytest.mark.parametrize("backend", GELU)
@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_28_gelu_at_the_ends_of_fp16(backend, approximate):
    x = torch.tensor([[65504.0], [-65504.0], [0.0], [10.0], [-10.0]], device=DEVICE)
    one = torch.ones(1, 1, device=DEVICE)
    out = ops.linear_gelu(x, one, None, approximate=approximate, backend=backend).flatten()
    assert out[0] == 65504.0
    assert out[1] == 0.0
    assert out[2] == 0.0
    assert out[3] == 10.0
    assert abs(float(out[4])) < 1e-20


@pytest.mark.parametrize("backend", ATTENTION)
def test_28_logits_of_ten_thousand(backend):
    q, k, v = qkv(1, 1, 9, 16)
    with torch.no_grad():
        q *= 1e4
    out = ops.attention(q, k, v, backend=backend)
    assert torch.isfinite(out).all()
    assert all(torch.isfinite(g).all() for g in gradients(out, (q, k, v)))


@pytest.mark.parametrize("backend", CROSS_ENTROPY)
def test_28_cross_entropy_of_logits_of_ten_thousand(backend):
    hidden = (torch.randn(70, 8, device=DEVICE) * 1e4).requires_grad_()
    weight = torch.randn(200, 8, device=DEVICE, requires_grad=True)
    labels = torch.randint(0, 200, (70,), device=DEVICE)
    options = {"reduction": "none", "backend": backend}
    losses = ops.linear_cross_entropy(hidden, weight, None, labels, **options)
    exact = reference.linear_cross_entropy(
        hidden.double(), weight.double(), None, labels, reduction="none"
    )
    yardstick = Yardstick(
        lambda: reference.linear_cross_entropy(hidden, weight, None, labels, reduction="none")
    )
    assert_close("losses", losses, exact, yardstick)
    assert all(torch.isfinite(g).all() for g in gradients(losses, (hidden, weight)))


@pytest.mark.parametrize("backend", CROSS_ENTROPY)
def test_29_a_batch_without_a_label_has_loss_zero_and_finite_gradients(backend):
    hidden = torch.randn(6, 8, device=DEVICE, requires_grad=True)
    weight = torch.randn(11, 8, device=DEVICE, requires_grad=True)
    bias = torch.zeros(11, device=DEVICE, requires_grad=True)
    labels = torch.full((6,), -100, device=DEVICE)
    loss = ops.linear_cross_entropy(hidden, weight, bias, labels, backend=backend)
    assert loss == 0.0
    for gradient in torch.autograd.grad(loss, (hidden, weight, bias)):
        assert (gradient == 0).all()


@pytest.mark.parametrize("backend", ATTENTION)
def test_weights_on_request_match_and_have_gradients(backend):
    q, k, v = qkv(2, 2, 9, 16)
    mask = torch.rand(2, 1, 9, 9, device=DEVICE) > 0.3
    mask[0, :, 4] = False
    out, weights = ops.attention(q, k, v, mask=mask, return_weights=True, backend=backend)
    dweights = torch.randn_like(weights)

    def run(dtype):
        leaves = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
        both = reference.attention(*leaves, mask=mask, return_weights=True)
        return [*both, *torch.autograd.grad(both[1], leaves[:2], dweights.to(dtype))]

    got = out, weights, *torch.autograd.grad(weights, (q, k), dweights)
    sides = run(torch.float64), Yardstick(lambda: run(out.dtype))
    names = ("out", "weights", "dq of the weights", "dk of the weights")
    for name, *three in zip(names, got, *sides, strict=True):
        assert_close(name, *three)
    assert (weights[0, :, 4] == 0).all()


@pytest.mark.parametrize("backend", ATTENTION)
def test_varlen_weights_are_zero_at_padding(backend):
    q, k, v = qkv(12, 2, 16)
    cu_seqlens = torch.tensor([0, 4, 12], dtype=torch.int32, device=DEVICE)
    _, weights = ops.attention_varlen(q, k, v, cu_seqlens, return_weights=True, backend=backend)
    assert weights.shape == (2, 2, 8, 8)
    assert (weights[0, :, 4:] == 0).all()
    assert (weights[0, :, :, 4:] == 0).all()
    torch.testing.assert_close(weights[1].sum(-1), torch.ones(2, 8, device=DEVICE))


def test_varlen_equals_padding_bit_for_bit_in_its_dropout():
    """Packed and padded sequences have the same dropout, which depends on a token's position."""
    q, k, v = qkv(2, 2, 8, 16)
    seed = torch.tensor([42])
    dense = reference.attention(q, k, v, dropout_p=0.3, dropout_seed=seed)
    packed = [x.transpose(1, 2).reshape(16, 2, 16) for x in (q, k, v)]
    cu_seqlens = torch.tensor([0, 8, 16], dtype=torch.int32)
    varlen = reference.attention_varlen(*packed, cu_seqlens, dropout_p=0.3, dropout_seed=seed)
    torch.testing.assert_close(varlen, dense.transpose(1, 2).reshape(16, 2, 16))
