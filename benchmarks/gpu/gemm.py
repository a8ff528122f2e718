"""The matches of operations with a matrix product: feed_forward, linear_gelu and the loss."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.contenders import compiler, gemm_variants, ours, stock
from benchmarks.gpu.match import Contender, Match, of_case
from fastbert.bench import peers
from fastbert.bench.attention_peers import Prepared, of_function
from fastbert.bench.limits import BACKWARD, FORWARD, RATIO_GOALS
from fastbert.testing.cases import Case, Inputs

BF16, FP16 = torch.bfloat16, torch.float16


@dataclass(frozen=True)
class Scale:
    """Sizes of the matches: tokens, (hidden, inner) widths, vocabulary, and tokens of a loss."""

    tokens: tuple[int, ...]
    widths: tuple[tuple[int, int], ...]
    vocabulary: int
    loss_tokens: int


FULL = Scale((16384, 2048, 128), ((1024, 4096), (768, 3072), (384, 1536)), 30522, 16384)
TOY = Scale((32,), ((32, 64),), 97, 96)


def matches(scale: Scale, device: str) -> Iterator[Match]:
    largest = scale.tokens[0]
    for hidden, inner in scale.widths:
        for direction in (FORWARD, BACKWARD):
            yield _loss(scale, hidden, direction, device)
        for op in ("linear_gelu", "feed_forward"):
            for direction in (FORWARD, BACKWARD):
                yield _product(op, largest, hidden, inner, BF16, direction, device)
    for tokens in scale.tokens[1:]:
        for hidden, inner in scale.widths:
            for op in ("linear_gelu", "feed_forward"):
                for direction in (FORWARD, BACKWARD):
                    yield _product(op, tokens, hidden, inner, BF16, direction, device)
    hidden, inner = scale.widths[0]
    for op in ("linear_gelu", "feed_forward"):
        yield _product(op, largest, hidden, inner, FP16, FORWARD, device)


def _product(op, tokens, hidden, inner, dtype, direction, device) -> Match:
    case = Case(op, f"{tokens}×{hidden}×{inner}", (tokens, hidden, inner))
    contenders = [
        *ours(case, dtype, device),
        *gemm_variants(op, direction, device),
        *stock(op, device),
    ]
    if (op, direction) == ("linear_gelu", FORWARD):
        contenders += other_functions()
    return _match(case, dtype, direction, contenders, memory=False)


def other_functions() -> list[Contender]:
    """Return contenders for the product alone, and for cuBLAS's product with a tanh GELU."""
    return [
        Contender("product alone", functools.partial(of_function, F.linear), same_function=False),
        Contender("tanh epilogue", _tanh_epilogue, same_function=False),
    ]


def _tanh_epilogue(inputs: Inputs) -> Prepared:
    def fused(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return torch._addmm_activation(bias, x, weight.t(), use_gelu=True)

    return of_function(fused, inputs)


def _loss(scale: Scale, hidden: int, direction: str, device: str) -> Match:
    shape = (scale.loss_tokens, hidden, scale.vocabulary)
    case = Case("linear_cross_entropy", "×".join(map(str, shape)), shape)
    contenders = [*ours(case, BF16, device), *stock(case.op, device)]
    for name, change in (("eager", None), ("torch.compile", compiler(device))):
        prepare = functools.partial(_gathered, change)
        contenders.append(Contender(f"{name} gathered", prepare))
    return _match(case, BF16, direction, contenders, memory=direction == BACKWARD)


def _gathered(change, inputs: Inputs) -> Prepared:
    """Prepare the loss of the labelled rows; their indices are computed before the timing."""
    rows = (inputs.positional["labels"] >= 0).nonzero().squeeze(1)
    function = change(peers.linear_cross_entropy) if change else peers.linear_cross_entropy

    def run(hidden: Tensor, weight: Tensor, bias: Tensor, labels: Tensor) -> Tensor:
        return function(hidden[rows], weight, bias, labels[rows])

    return of_function(run, inputs)


def _match(case, dtype, direction, contenders, memory) -> Match:
    goal = RATIO_GOALS[case.op] if direction == FORWARD else None
    return of_case(case, dtype, direction, contenders, "TFLOP/s", ratio_goal=goal, memory=memory)
