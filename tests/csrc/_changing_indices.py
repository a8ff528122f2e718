"""Operators that run while another thread writes invalid numbers into their tensors of indices.

As a program, the file runs the case ``argv[1]`` for ``argv[2]`` seconds and prints how many calls
returned and how many calls raised an error. The program fails if a call returns a result that no
possible content of the tensor explains.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided
from torch import Tensor

from fastbert import _C  # noqa: F401  registers the operators

OPS = torch.ops.fastbert_C
ROWS, COLUMNS = 20_000, 8
WRITES = 5_000_000
HOSTILE = {torch.int64: 1 << 44, torch.int32: (1 << 31) - 1}


class Case:
    """A call, its tensor of indices that changes, the places that change, and a check."""

    def __init__(self, call: Callable[[], Any], changing: Tensor, places: list[int]) -> None:
        self.call, self.changing, self.places = call, changing, places
        self.expected = [t.clone() for t in results_of(call())]
        self.hostile = HOSTILE[changing.dtype]

    def is_right(self, results: list[Tensor]) -> bool:
        return all(map(torch.equal, results, self.expected))

    def write(self, stop: threading.Event) -> None:
        """Write an invalid number and the old number in turn, in NumPy copies without the GIL."""
        numbers = self.changing.numpy()
        flickers = []
        for place in self.places:
            both = np.array([self.hostile, numbers[place]], dtype=numbers.dtype)
            target = as_strided(numbers[place:], (WRITES, 2), (0, 0))
            flickers.append((target, np.broadcast_to(both, (WRITES, 2))))
        while not stop.is_set():
            for target, values in flickers:
                np.copyto(target, values)


class Mask(Case):
    """A mask that changes during the call; the result must be right for some choice of tokens."""

    def is_right(self, results: list[Tensor]) -> bool:
        indices, cu_seqlens, longest = results
        inside = indices.numel() == 0 or 0 <= int(indices[0]) <= int(indices[-1]) < ROWS
        return (
            inside
            and bool((indices.diff() > 0).all())
            and int(cu_seqlens[-1]) == indices.numel()
            and int(cu_seqlens.diff().max()) == int(longest)
        )

    def write(self, stop: threading.Event) -> None:
        numbers = self.changing.numpy()
        while not stop.is_set():
            numbers[...] = 1
            numbers[...] = 0


def results_of(result: Any) -> list[Tensor]:
    values = result if isinstance(result, (tuple, list)) else (result,)
    return [v if isinstance(v, Tensor) else torch.tensor(v) for v in values]


def embedding(backward: bool) -> Case:
    ids = torch.zeros(ROWS, dtype=torch.int64)
    indices = (ids, torch.zeros_like(ids), torch.zeros_like(ids))
    tables = tuple(torch.randn(rows, COLUMNS) for rows in (50, 2, 4))
    weight, bias = torch.randn(COLUMNS), torch.randn(COLUMNS)
    y, mean, rstd = OPS.embedding_forward(*indices, *tables, weight, bias, None, 1e-12, 0.0)
    last = [ROWS - 1]
    if not backward:
        return Case(
            lambda: OPS.embedding_forward(*indices, *tables, weight, bias, None, 1e-12, 0.0),
            ids,
            last,
        )
    given = (y, *indices, *tables, weight, mean, rstd)
    return Case(lambda: OPS.embedding_backward(*given, None, True, 0.0, -1), ids, last)


def unpad() -> Case:
    mask = torch.ones(ROWS // 100, 100, dtype=torch.int64)
    return Mask(lambda: OPS.unpad_indices(mask), mask, [])


def scatter_rows() -> Case:
    indices = torch.arange(ROWS)
    values = torch.randn(ROWS, COLUMNS)
    return Case(lambda: OPS.scatter_rows(values, indices, ROWS), indices, [ROWS // 2, ROWS - 1])


def lengths() -> Tensor:
    return torch.arange(0, 401, 20, dtype=torch.int32)


def attention(operator: str) -> Case:
    ends = lengths()
    q = torch.randn(400, 2, 16)
    numbers = (20, 20, 0.0, 0.25, -1, -1)
    optional = (None, None, ends, ends)

    def forward():
        return OPS.attention_forward(q, q, q, *optional, None, *numbers)

    def weights():
        return OPS.attention_weights(q, q, *optional, 20, 20, None, None, 0.25, -1, -1)

    def backward():
        into = [torch.empty_like(q) for _ in range(3)]
        OPS.attention_backward(*into, None, q, q, q, q, *optional, None, *numbers)
        return into

    call = {"forward": forward, "weights": weights, "backward": backward}[operator]
    return Case(call, ends, [10])


def relative_attention(operator: str, changing: str) -> Case:
    """Packed sequences whose boundaries or whose rows of distances change."""
    ends, index = lengths(), torch.arange(39, dtype=torch.int32) % 7
    segments = torch.arange(400) % 2
    q, keys, queries = torch.randn(400, 2, 16), torch.randn(7, 2, 16), torch.randn(7, 2, 16)
    terms = (index, keys, queries, keys[..., 0], segments, segments, q[..., 0])
    given = (*terms, None, ends, ends, None, 20, 20, 0.0, 0.25)

    def forward():
        return OPS.relative_attention_forward(q, q, q, *given)

    def weights():
        return OPS.relative_attention_weights(q, q, *given)

    def backward():
        return OPS.relative_attention_backward(q, q, q, q, *given)

    call = {"forward": forward, "weights": weights, "backward": backward}[operator]
    tensors = {"index": index, "cu_seqlens": ends}
    return Case(call, tensors[changing], [10])


def encoder() -> Case:
    ends, hidden = lengths(), torch.randn(400, 32)
    shapes = [(96, 32), (32, 32), (64, 32), (32, 64)]
    linear = [(torch.randn(shape) / 8, torch.randn(shape[0])) for shape in shapes]
    norm = (torch.ones(32), torch.zeros(32))
    layer = [*linear[0], *linear[1], *norm, *linear[2], *linear[3], *norm]
    rest = {
        "rotations": [], "windows": [], "positions": [], "scale": None, "batch": 20,
        "max_seqlen": 20, "heads": 2, "key_value_heads": 2, "projections": 1,
        "inner_projections": 1, "pre_norm": False, "rms_norm": False, "eps": 1e-12,
        "activation": "gelu", "dtype": torch.float32, "all_states": False,
    }  # fmt: skip
    return Case(lambda: OPS.encoder(hidden, layer * 4, [], ends, None, None, **rest), ends, [10])


def decoder() -> Case:
    """A step in which the slots of the earlier tokens change."""
    rows = 300
    shapes = [(96, 32), (32, 32), (32,), (32, 32), (32, 32), (32,), (64, 32), (32, 64), (32,)]
    layer = [t for shape in shapes for t in (torch.randn(shape) / 8, torch.randn(shape[0]))]
    slots = torch.zeros(rows, 40, dtype=torch.int32)
    cache, source = torch.randn(2, 2, rows, 2, 41, 16), torch.randn(2, 2, 2, 9, 16)
    ends, of_row = torch.tensor([0, 9], dtype=torch.int32), torch.zeros(rows, dtype=torch.int32)
    call = (torch.randn(rows, 32), layer * 2, cache, slots, 40, source, ends, of_row)
    rest = (2, False, 1e-5, "relu")
    return Case(lambda: OPS.decoder_step(*call, *rest), slots.view(-1), [rows - 1])


def bert() -> Case:
    ids, words = torch.zeros(20, 20, dtype=torch.int64), torch.randn(50, 32)
    shapes = [(96, 32), (32, 32), (64, 32), (32, 64)]
    linear = [(torch.randn(shape) / 8, torch.randn(shape[0])) for shape in shapes]
    norm = (torch.ones(32), torch.zeros(32))
    layer = [*linear[0], *linear[1], *norm, *linear[2], *linear[3], *norm]
    embedding = [words, torch.randn(20, 32), *norm]
    rest = ([], [], None, 2, 1, 1e-12, 1e-12, "gelu", torch.float32)

    def call() -> Tensor:
        outputs, _ = OPS.bert(ids, None, None, None, embedding, layer * 2, *rest)
        if not outputs:
            raise IndexError("ids")
        return outputs[0]

    return Case(call, ids.view(-1), [399])


def cross_entropy(backward: bool) -> Case:
    labels = torch.zeros(ROWS, dtype=torch.int64)
    hidden, weight = torch.randn(ROWS, COLUMNS), torch.randn(16, COLUMNS)
    arguments = (hidden, weight, None, labels)
    loss, statistics, order = OPS.linear_cross_entropy_forward(*arguments, -100, "mean")
    if not backward:
        return Case(
            lambda: OPS.linear_cross_entropy_forward(*arguments, -100, "mean"), labels, [ROWS - 1]
        )
    return Case(
        lambda: OPS.linear_cross_entropy_backward(loss, *arguments, statistics, order, "mean"),
        order, [ROWS // 2, ROWS],
    )  # fmt: skip


def splade(backward: bool) -> Case:
    hidden, weight = torch.randn(ROWS, COLUMNS), torch.randn(16, COLUMNS)
    ends = torch.arange(0, ROWS + 1, 8, dtype=torch.int32)
    arguments = (hidden, weight, None, ends)
    y, logits, rows = OPS.splade_forward(*arguments, True)
    if not backward:
        return Case(lambda: OPS.splade_forward(*arguments, True), ends, [ROWS // 16, ROWS // 8])
    return Case(
        lambda: OPS.splade_backward(y, hidden, weight, None, logits, rows),
        rows.view(-1), [0, rows.numel() // 2, rows.numel() - 1],
    )  # fmt: skip


CASES = {
    "embedding_forward": lambda: embedding(False),
    "embedding_backward": lambda: embedding(True),
    "unpad_indices": unpad,
    "scatter_rows": scatter_rows,
    "attention_forward": lambda: attention("forward"),
    "attention_backward": lambda: attention("backward"),
    "attention_weights": lambda: attention("weights"),
    **{
        f"relative_attention_{operator}-{changing}": (
            lambda operator=operator, changing=changing: relative_attention(operator, changing)
        )
        for operator in ("forward", "backward", "weights")
        for changing in ("index", "cu_seqlens")
    },
    "encoder": encoder,
    "bert": bert,
    "decoder_step": decoder,
    "linear_cross_entropy_forward": lambda: cross_entropy(False),
    "linear_cross_entropy_backward": lambda: cross_entropy(True),
    "splade_forward": lambda: splade(False),
    "splade_backward": lambda: splade(True),
}


def main(name: str, seconds: float) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    case = CASES[name]()
    stop, returned, refused = threading.Event(), 0, 0
    writer = threading.Thread(target=case.write, args=(stop,))
    writer.start()
    try:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                results = results_of(case.call())
            except (ValueError, IndexError):
                refused += 1
                continue
            returned += 1
            assert case.is_right(results), (
                f"a result of {name} that no state of its numbers explains"
            )
    finally:
        stop.set()
        writer.join()
    print(returned, refused)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
