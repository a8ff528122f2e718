"""Comparisons of attention: 16,384 tokens at every length, dense and packed, both directions."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from benchmarks.gpu.contenders import (
    attention_variants,
    compiler,
    dense_twin,
    left_out,
    ours,
)
from benchmarks.gpu.match import Contender, Match, of_case
from fastbert.bench.attention_peers import dense_peers, varlen_peers
from fastbert.bench.choice import backend_of
from fastbert.bench.encoder import half_padded
from fastbert.bench.limits import BACKWARD, FORWARD, attention_goal
from fastbert.testing.cases import Case

BF16, FP16 = torch.bfloat16, torch.float16
FIRST_PEERS = ("sdpa FLASH", "sdpa CUDNN")


@dataclass(frozen=True)
class Scale:
    """The sizes of the attention matches; the most important length comes first."""

    tokens: int
    lengths: tuple[int, ...]
    hidden: int
    head_dims: tuple[int, ...]


# The width of BERT-large: 16 heads of dimension 64, or 32 heads of dimension 32.
FULL = Scale(16384, (512, 128, 256, 1024, 2048, 64), 1024, (64, 32))
TOY = Scale(64, (16, 32), 64, (32,))


def dense(scale: Scale, device: str) -> Iterator[Match]:
    """Yield matches of full batches at every length, then some with padding, dropout or fp16."""
    for head_dim in scale.head_dims:
        for length in scale.lengths:
            yield from _dense(scale, device, length, head_dim, BF16)
    length, head_dim = scale.lengths[0], scale.head_dims[0]
    for options in ({"mask": "padding"}, {"dropout_p": 0.1}):
        yield from _dense(scale, device, length, head_dim, BF16, **options)
    yield from _dense(scale, device, length, head_dim, FP16)
    if len(scale.lengths) > 1:
        yield from _dense(scale, device, scale.lengths[1], head_dim, BF16, mask="padding")


def _dense(scale, device, length, head_dim, dtype, **options) -> Iterator[Match]:
    shape = (scale.tokens // length, scale.hidden // head_dim, length, length, head_dim)
    kind = "".join(f" {'padding' if name == 'mask' else 'dropout'}" for name in options)
    case = Case("attention", f"S{length} D{head_dim}{kind}", shape, options)
    for direction in (FORWARD, BACKWARD):
        series = f"attention D{head_dim}{kind} {direction}"
        goal = attention_goal(direction, length, head_dim) if dtype == BF16 and not kind else None
        compiled = head_dim == scale.head_dims[0] or length in scale.lengths[:2]
        yield _match(case, dtype, direction, series, f"S{length}", device, compiled, goal)


def first(scale: Scale, device: str) -> Iterator[Match]:
    """Yield matches of full batches of the first two lengths, without CUDA C++ and most peers."""
    return _first(scale, device, without="cuda")


def first_cuda(scale: Scale, device: str) -> Iterator[Match]:
    """Yield the matches of `first` with CUDA C++ instead of Triton."""
    return _first(scale, device, without="triton")


def _first(scale: Scale, device: str, without: str) -> Iterator[Match]:
    for length in scale.lengths[:2]:
        for match in _dense(scale, device, length, scale.head_dims[0], BF16):
            contenders = [
                c
                for c in match.contenders
                if c.name in FIRST_PEERS or (c.ours and backend_of(c.name) != without)
            ]
            yield dataclasses.replace(match, contenders=contenders)


def packed(scale: Scale, device: str) -> Iterator[Match]:
    """Yield matches of packed batches; those of equal lengths are also timed as dense batches."""
    for head_dim in scale.head_dims:
        heads = scale.hidden // head_dim
        for length in scale.lengths:
            for kind, lengths in _lengths(scale.tokens, length).items():
                shape = (lengths, heads, head_dim)
                case = Case("attention_varlen", f"{kind} S{length} D{head_dim}", shape)
                for direction in (FORWARD, BACKWARD):
                    series = f"packed {kind} D{head_dim} {direction}"
                    compiled = head_dim == scale.head_dims[0]
                    yield _match(case, BF16, direction, series, f"S{length}", device, compiled)


def _lengths(tokens: int, longest: int) -> dict[str, tuple[int, ...]]:
    """Return equal lengths and evenly spread lengths with about the same sum."""
    equal = (longest,) * (tokens // longest)
    return {"equal": equal, "spread": half_padded(2 * len(equal), longest)}


def _match(case, dtype, direction, series, label, device, compiled, goal=None) -> Match:
    is_packed = case.op == "attention_varlen"
    peers = (varlen_peers if is_packed else dense_peers)(compiler(device))
    if not compiled:
        slow = "FlexAttention documents" if is_packed else "torch.compile"
        peers[slow] = left_out
    contenders = [*ours(case, dtype, device), *attention_variants(device)]
    if is_packed and len(set(case.shape[0])) == 1:
        contenders.append(dense_twin())
    contenders += [Contender(name, prepare) for name, prepare in peers.items()]
    return of_case(
        case, dtype, direction, contenders, "TFLOP/s", series=series, label=label, goal=goal
    )
