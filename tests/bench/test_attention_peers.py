"""The attention functions of other libraries (peers) agree with fastbert's operations."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend

from fastbert import reference
from fastbert.bench import attention_peers
from fastbert.testing.cases import Case, Inputs
from fastbert.testing.compare import assert_close
from fastbert.testing.yardstick import Yardstick, run_sides

DENSE = Case("attention", "toy", (2, 2, 24, 24, 16))
SPREAD = Case("attention_varlen", "toy", ((24, 9, 1), 2, 16))
EQUAL = Case("attention_varlen", "toy equal", ((16, 16), 2, 16))


def padded(inputs: Inputs) -> Inputs:
    """Add to `inputs` a padding mask in which each sequence has at least one real token."""
    mask = torch.arange(24) < torch.tensor([24, 7])[:, None]
    return Inputs(inputs.positional, {"mask": mask}, inputs.gradients)


def outputs(case: Case, inputs: Inputs, prepared: attention_peers.Prepared):
    """Return the peer's result, the float64 reference, and the yardstick for the tolerance."""
    function = getattr(reference, case.op)

    def run(change):
        changed = inputs.map(
            lambda _, v: change(v) if isinstance(v, torch.Tensor) and v.is_floating_point() else v
        )
        return function(*changed.positional.values(), **changed.keyword)

    yardstick = Yardstick(lambda: run(lambda v: v))
    return prepared.restore(prepared.run()), run(torch.Tensor.double), yardstick


@pytest.mark.parametrize("with_mask", [False, True])
@pytest.mark.parametrize("name", ["sdpa FLASH", "FlexAttention", "torch.compile", "eager"])
def test_dense_peers(name, with_mask):
    inputs = Inputs(DENSE.inputs(torch.float32).positional)
    if with_mask:
        inputs = padded(inputs)
    prepared = attention_peers.dense_peers(None)[name](inputs)
    assert_close(name, *outputs(DENSE, inputs, prepared))


@pytest.mark.parametrize("case", [SPREAD, EQUAL], ids=lambda case: case.name)
@pytest.mark.parametrize("name", ["sdpa FLASH padded", "FlexAttention documents"])
def test_packed_peers(name, case):
    inputs = Inputs(case.inputs(torch.float32).positional)
    prepared = attention_peers.varlen_peers(None)[name](inputs)
    assert_close(name, *outputs(case, inputs, prepared))


def test_gradients_of_a_padded_peer():
    inputs = SPREAD.inputs(torch.float32)
    prepared = attention_peers.padded(SDPBackend.MATH, inputs)
    ready = attention_peers.of_function(reference.attention_varlen, inputs)
    exact = inputs.map(
        lambda _, v: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v
    )
    oracle = attention_peers.of_function(reference.attention_varlen, exact)

    def gradients(one):
        out = one.restore(one.run())
        grads = torch.autograd.grad(out.square().sum(), one.targets)
        return [one.restore(gradient) for gradient in grads]

    results = run_sides(gradients, prepared, oracle, ready)
    for name, *three in zip("qkv", *results, strict=True):
        assert_close(name, *three)


def test_torch_varlen_is_called_as_all_its_versions_want():
    """The call fits the signatures of torch 2.10 to 2.13; fake tensors avoid any CUDA kernel."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    inputs = SPREAD.inputs(torch.bfloat16)
    with FakeTensorMode() as mode:
        fake = inputs.map(lambda _, v: mode.from_tensor(v) if isinstance(v, torch.Tensor) else v)
        out = attention_peers.varlen(fake).run()
    assert out.shape == inputs.positional["q"].shape


@pytest.mark.parametrize("name", ["sdpa CUDNN", "sdpa EFFICIENT"])
def test_a_kernel_that_is_not_there_raises(name):
    if torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU")
    prepared = attention_peers.dense_peers(None)[name](DENSE.inputs(torch.float32))
    with pytest.raises(RuntimeError):
        prepared.run()


@pytest.mark.parametrize("name", ["FlexAttention", "torch.compile", "eager"])
def test_peers_without_dropout_refuse_it(name):
    inputs = Case("attention", "toy", (1, 1, 8, 8, 16), {"dropout_p": 0.1}).inputs(torch.float32)
    with pytest.raises(ValueError, match="dropout_p"):
        attention_peers.dense_peers(None)[name](inputs)
