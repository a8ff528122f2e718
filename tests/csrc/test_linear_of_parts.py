"""``linear_of_parts``, the product with several separate weights, gives the bits of ``linear``.

test_gemm.py compares ``linear`` with float64, and with the bits of ``matmul`` of a packed operand.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# The numbers of rows are near the sizes of registers, panels and tasks of every level. Most numbers
# of outputs and inputs are not multiples of a register, a panel or a block.
SHAPES = [
    (0, (5,), 7),
    (1, (1,), 1),
    (1, (768, 768), 768),
    (3, (15, 40), 3072),
    (16, (64, 33, 1), 59),
    (33, (40, 40, 40), 300),
    (97, (111, 200), 768),
    (129, (7, 130), 257),
    (300, (96, 65), 800),
    (513, (70,), 130),
]


def draw(m, parts, k, dtype) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    weights = [torch.randn(n, k).to(dtype) for n in parts]
    return torch.randn(m, k).to(dtype), weights, [torch.randn(n).to(dtype) for n in parts]


def by_linear(operators, x, weights, biases, activation="none") -> Tensor:
    """Return the results of ``linear``, one call per weight, in the dtype of ``x``."""
    given = zip(weights, biases or [None] * len(weights), strict=True)
    return torch.cat(
        [
            operators.linear(x, weight.to(x.dtype, copy=True), bias, None, activation, False)[0]
            for weight, bias in given
        ],
        1,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("m", "parts", "k"), SHAPES)
def test_has_the_bits_of_linear(isa, operators, m, parts, k, dtype):
    x, weights, biases = draw(m, parts, k, dtype)
    for given, activation in ((biases, "none"), ([], "none"), (biases, "gelu")):
        y = operators.linear_of_parts(x, weights, given, activation)
        assert torch.equal(y, by_linear(operators, x, weights, given, activation))


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_wider_weights_are_rounded_as_torch_rounds_them(isa, operators, dtype):
    for m, parts, k in ((5, (40, 33), 300), (33, (64,), 96), (300, (96,), 70)):
        x, weights, biases = draw(m, parts, k, dtype)
        weights = [torch.randn(w.shape) for w in weights]
        weights[0][3, 5] = 1 + torch.finfo(dtype).eps / 2  # halfway between two numbers in dtype
        y = operators.linear_of_parts(x, weights, biases, "none")
        assert torch.equal(y, by_linear(operators, x, weights, biases))


@pytest.mark.parametrize("dtype", DTYPES)
def test_operands_in_any_layout(isa, operators, dtype):
    for m in (33, 300):
        x, (weight,), _ = draw(m, (70,), 96, dtype)
        expected = by_linear(operators, x, [weight], [])
        unaligned = torch.empty(weight.numel() + 1, dtype=dtype)[1:].view_as(weight)
        layouts = {
            "transposed": weight.t().contiguous().t(),
            "rows apart": torch.cat([weight, weight], 1)[:, :96],
            "every second": weight.repeat_interleave(2, 1)[:, ::2],
            "unaligned": unaligned.copy_(weight),
        }
        for name, given in layouts.items():
            y = operators.linear_of_parts(x, [given], [], "none")
            assert torch.equal(y, expected), name
        for given in (x.t().contiguous().t(), x.repeat_interleave(2, 1)[:, ::2]):
            assert torch.equal(operators.linear_of_parts(given, [weight], [], "none"), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_in_any_company_and_with_any_number_of_threads(
    isa, operators, dtype
):
    x, weights, biases = draw(300, (130, 64), 800, dtype)
    expected = operators.linear_of_parts(x, weights, biases, "gelu")
    threads = torch.get_num_threads()
    try:
        for count, (begin, end) in ((1, (0, 300)), (2, (7, 8)), (3, (31, 100)), (2, (3, 290))):
            torch.set_num_threads(count)
            y = operators.linear_of_parts(x[begin:end], weights, biases, "gelu")
            assert torch.equal(y, expected[begin:end]), (count, begin, end)
    finally:
        torch.set_num_threads(threads)


def step(kind, **options):
    def write(weights):
        optimizer = kind(weights, lr=0.1, **options)
        for weight in weights:
            weight.grad = torch.randn_like(weight)
        optimizer.step()

    return write


def swap(weights):
    """Write new values to all weights, as training code does to swap in averaged weights."""
    for weight in weights:
        weight.data.copy_(0.9 * weight.data + 0.1 * torch.randn_like(weight))


def some(weights):
    """Change 3 % of the elements of each weight."""
    for weight in weights:
        weight.data.view(-1)[torch.randperm(weight.numel())[: weight.numel() * 3 // 100]] += 1.0


WRITES = {
    "AdamW fused": step(torch.optim.AdamW, fused=True),
    "AdamW foreach": step(torch.optim.AdamW, foreach=True),
    "AdamW": step(torch.optim.AdamW, foreach=False),
    "SGD fused": step(torch.optim.SGD, fused=True),
    "SGD foreach": step(torch.optim.SGD, foreach=True),
    "SGD": step(torch.optim.SGD, foreach=False),
    "one element": lambda weights: weights[-1].data[3, 5].add_(2.0),
    "one row": lambda weights: weights[0].data[9].mul_(2.0),
    "3 % of the elements": some,
    "clamp": lambda weights: [weight.data.clamp_(-0.5, 0.5) for weight in weights],
    "moving average": swap,
}


@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_every_write_is_seen(isa, operators, dtype, write):
    for parts in ((70,), (40, 33, 64)):
        x, drawn, _ = draw(5, parts, 130, dtype)
        weights = [torch.nn.Parameter(weight) for weight in drawn]
        before = operators.linear_of_parts(x, [w.detach() for w in weights], [], "none")
        write(weights)
        with torch.no_grad():
            y = operators.linear_of_parts(x, weights, [], "none")
        assert not torch.equal(y, before)
        fresh = [copy.deepcopy(weight).detach() for weight in weights]
        assert torch.equal(y, by_linear(operators, x, fresh, []))


def test_an_error_names_the_argument(operators):
    x, weights, biases = draw(3, (4, 5), 6, torch.float32)
    with pytest.raises(ValueError, match="weights: got no tensor, allowed: at least 1"):
        operators.linear_of_parts(x, [], [], "none")
    with pytest.raises(ValueError, match=r"weights: got shape \[5, 7\], allowed: \(N, 6\)"):
        operators.linear_of_parts(x, [weights[0], torch.randn(5, 7)], [], "none")
    with pytest.raises(TypeError, match="weights: got dtype BFloat16"):
        operators.linear_of_parts(x, [weights[0].bfloat16()], [], "none")
    with pytest.raises(ValueError, match="biases: got 1 tensors, allowed: none, or 2"):
        operators.linear_of_parts(x, weights, biases[:1], "none")
    with pytest.raises(ValueError, match="biases: got shape"):
        operators.linear_of_parts(x, weights, biases[::-1], "none")
