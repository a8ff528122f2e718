"""Operators pass opcheck, and work with autocast and, without graph breaks, with torch.compile."""

from __future__ import annotations

import importlib

import pytest
import torch
from quick_cases import long_case
from torch.utils import cpp_extension

from fastbert import ops, reference
from fastbert.ops import backend as backends
from fastbert.testing import parity
from fastbert.testing.selection import find

# In these cases, some optional parameters are None.
ABSENT = {("layer_norm", "no_bias"), ("embedding", "words")}
RUNS = [
    run
    for run in parity.plan(dtype=torch.float32)
    if run[0] in (find(run[0].op, quick=True)[0], find(run[0].op)[1])
    or (run[0].op, run[0].name) in ABSENT
]
# A Triton case takes up to 30 s in the interpreter. All backends share the registered operators, so
# `make test` runs Triton only for these two operations.
ON_TRITON = ("layer_norm", "feed_forward")


def is_quick(case, backend, dtype, device):
    """Return whether `make test` runs a case: one on each backend, and those with a None."""
    if (case.op, case.name) in ABSENT:
        return backend != "triton"
    return case == find(case.op, quick=True)[0] and (backend != "triton" or case.op in ON_TRITON)


RUNS = [
    (long_case if not is_quick(*run) else pytest.param)(
        *run, id="-".join((run[0].op, run[0].name, run[1], str(run[3])))
    )
    for run in RUNS
]


def _record_calls(monkeypatch):
    """Record the operator calls that public functions make, as arguments for opcheck."""
    calls = []
    for noun, attribute in OPERATORS:
        # import_module is needed, because the name ``ops.attention`` is a function, not a module.
        module = importlib.import_module(f"fastbert.ops.{noun}")
        inner = getattr(module, attribute)

        def record(*arguments, inner=inner):
            calls.append((inner.overload, arguments))
            return inner(*arguments)

        monkeypatch.setattr(module, attribute, record)
    return calls


OPERATORS = [
    ("attention", "_attention"),
    ("attention", "_attention_backward"),
    ("attention", "_attention_qkvpacked"),
    ("attention", "_attention_qkvpacked_backward"),
    ("relative_attention", "_relative_attention"),
    ("relative_attention", "_relative_attention_backward"),
    ("layer_norm", "_layer_norm"),
    ("layer_norm", "_layer_norm_backward"),
    ("rms_norm", "_rms_norm"),
    ("rms_norm", "_rms_norm_backward"),
    ("rotary", "_rotary"),
    ("rotary", "_rotary_backward"),
    ("linear", "_linear"),
    ("linear", "_linear_backward"),
    ("feed_forward", "_linear_gelu"),
    ("feed_forward", "_linear_gelu_backward"),
    ("feed_forward", "_feed_forward"),
    ("feed_forward", "_feed_forward_backward"),
    ("embedding", "_embedding"),
    ("embedding", "_embedding_backward"),
    ("cross_entropy", "_linear_cross_entropy"),
    ("cross_entropy", "_linear_cross_entropy_backward"),
    ("splade", "_splade"),
    ("splade", "_splade_backward"),
]


@pytest.mark.each_value
@pytest.mark.parametrize(("case", "backend", "dtype", "device"), RUNS)
def test_opcheck(case, backend, dtype, device, monkeypatch):
    calls = _record_calls(monkeypatch)
    inputs = case.inputs(dtype, device)
    parity.run_with_gradients(getattr(ops, case.op), inputs, {"backend": backend})
    assert len(calls) >= 2, "the forward and the backward operator"
    forward, arguments = calls[0]
    torch.library.opcheck(forward, arguments)
    backward, arguments = calls[1]
    arguments = tuple(a.detach() if isinstance(a, torch.Tensor) else a for a in arguments)
    torch.library.opcheck(backward, arguments)


def test_opcheck_of_padding_operators(device):
    mask = torch.tensor([[1, 1, 0], [1, 0, 1]], device=device).bool()
    x = torch.randn(6, 4, device=device, requires_grad=True)
    indices = torch.tensor([0, 1, 3, 5], device=device)
    torch.library.opcheck(torch.ops.fastbert.unpad_indices.default, (mask,))
    torch.library.opcheck(torch.ops.fastbert.gather_rows.default, (x, indices))
    values = torch.randn(4, 4, device=device, requires_grad=True)
    torch.library.opcheck(torch.ops.fastbert.scatter_rows.default, (values, indices, 6))


def test_opcheck_of_attention_weights(device):
    q = torch.randn(2, 2, 5, 8, device=device, requires_grad=True)
    mask = torch.rand(2, 1, 1, 5, device=device) > 0.3
    for backend in ("reference", "triton"):
        if backends.refusal("attention", backend, backends.Request(device, q.dtype)) is None:
            chosen = ([1], None)
            arguments = (q, q, None, mask, None, None, None, 5, 5, *chosen, 0.5, -1, 1, backend)
            torch.library.opcheck(torch.ops.fastbert.attention_weights.default, arguments)


def test_opcheck_of_relative_attention_weights():
    call = find("relative_attention", "packed")[0].inputs(torch.float32)
    given, (q, k) = dict(call.items()), (call.positional[name] for name in "qk")
    lengths = (given["cu_seqlens_q"], given["cu_seqlens_k"])
    tables = (given[f"position_{name}"] for name in ("keys", "queries", "bias"))
    terms = (given["index"], *tables, *given["segments"], given["segment_scores"], None)
    longest = (int(cu_seqlens.diff().max()) for cu_seqlens in lengths)
    arguments = (q, k, *terms, *lengths, None, *longest, 0.0, 0.125)
    for backend in ("reference", "cpu"):
        request = backends.Request("cpu", q.dtype)
        if backends.refusal("relative_attention_weights", backend, request) is None:
            operator = torch.ops.fastbert.relative_attention_weights.default
            torch.library.opcheck(operator, (*arguments, backend))


@pytest.mark.each_value
@pytest.mark.parametrize(("case", "backend", "dtype", "device"), RUNS)
def test_compiles_in_one_graph(case, backend, dtype, device):
    torch._dynamo.reset()  # Earlier cases do not count as recompilations.
    function = getattr(ops, case.op)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    inputs = case.inputs(dtype, device)
    eager = parity.run_with_gradients(function, inputs, {"backend": backend})
    graph = parity.run_with_gradients(compiled, inputs, {"backend": backend})
    for name, tensor in eager.items():
        torch.testing.assert_close(graph[name], tensor, rtol=0, atol=0)


def test_unpad_and_pad_compile_in_one_graph(device):
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]], device=device).bool()
    x = torch.randn(2, 3, 4, device=device)
    compiled = torch.compile(lambda x, m: ops.pad(ops.unpad(x, m)), fullgraph=True)
    assert torch.equal(compiled(x, mask), x * mask[..., None])


@pytest.fixture
def inductor(tmp_path, monkeypatch):
    """Let torch.compile link even if the path of torch has a space, which torch does not quote."""
    link = tmp_path / "lib"
    link.symlink_to(cpp_extension.TORCH_LIB_PATH)
    monkeypatch.setattr(cpp_extension, "TORCH_LIB_PATH", str(link))


# g++ needs 12 s to compile inductor's C++ code.
@pytest.mark.parametrize("compiler", ["aot_eager", long_case("inductor")])
def test_compiled_dropout_draws_a_new_mask_each_call(inductor, compiler, device):
    q = torch.randn(1, 1, 16, 8, device=device)

    @torch.compile(fullgraph=True, backend=compiler)
    def compiled(q):
        return ops.attention(q, q, q, dropout_p=0.5)

    assert not torch.equal(compiled(q), compiled(q))


@pytest.mark.parametrize(
    "op",
    [
        *("attention", "relative_attention", "linear", "linear_gelu", "feed_forward"),
        *("linear_cross_entropy", "splade"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(op, dtype, device):
    case = find(op)[0]
    inputs = case.inputs(torch.float32, device)
    with torch.amp.autocast(device, dtype=dtype):
        result = parity.run_with_gradients(getattr(ops, op), inputs, {})
    assert result["out"].dtype == (torch.float32 if op == "linear_cross_entropy" else dtype)
    assert all(v.dtype == torch.float32 for name, v in result.items() if name != "out")


def test_layer_norm_under_autocast_keeps_an_fp32_residual_stream(device):
    x, weight = torch.randn(4, 8, device=device).bfloat16(), torch.ones(8, device=device)
    residual = torch.randn(4, 8, device=device)
    with torch.amp.autocast(device, dtype=torch.bfloat16):
        y = ops.layer_norm(x, weight, weight, residual=residual)
    assert y.dtype == torch.float32
    torch.testing.assert_close(
        y, reference.layer_norm(x.float(), weight, weight, residual=residual)
    )


def test_double_backward_raises_clearly_and_the_reference_has_it(device):
    q = torch.randn(1, 1, 4, 8, device=device, requires_grad=True)
    (gradient,) = torch.autograd.grad(ops.attention(q, q, q).square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match=r"fastbert\.reference"):
        gradient.sum().backward()
    (gradient,) = torch.autograd.grad(
        reference.attention(q, q, q).square().sum(), q, create_graph=True
    )
    gradient.sum().backward()


def test_double_backward_of_relative_attention_raises_clearly_and_the_reference_has_it():
    q, index = torch.randn(1, 1, 4, 8, requires_grad=True), torch.arange(7, dtype=torch.int32)
    table = torch.randn(7, 1, 8, requires_grad=True)

    def gradient(function):
        loss = function(q, q, q, index, position_keys=table).square().sum()
        return torch.autograd.grad(loss, table, create_graph=True)[0]

    with pytest.raises(RuntimeError, match=r"fastbert\.reference"):
        gradient(ops.relative_attention).sum().backward()
    gradient(reference.relative_attention).sum().backward()


def test_every_public_function_has_a_reference_of_the_same_name():
    for name in ops.__all__:
        assert hasattr(reference, name)
