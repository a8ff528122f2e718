"""The speed of each operation: the backends of fastbert and stock PyTorch in one run.

An ``engine`` is the name of a backend, or ``"torch"`` for stock PyTorch. The engines take turns
(``timing.alternate``), so that the load of the machine affects all engines alike. A backend that
fails its parity cases is not timed. ``fastbert.bench.encoder`` times the whole encoder.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastbert import ops
from fastbert.bench import peers
from fastbert.bench.attention_peers import leaves
from fastbert.bench.encoder import Notify, default_device, default_dtypes, half_padded
from fastbert.bench.limits import BOTH, FORWARD
from fastbert.bench.timing import MAX_INPUT_SETS, alternate, input_sets
from fastbert.ops import backend as backends
from fastbert.ops.backend import dtype_name
from fastbert.ops.gpu_times import length_class, rows_class
from fastbert.testing import parity
from fastbert.testing.cases import TABLE_OF, Case, Inputs

PEER = "torch"


@dataclass(frozen=True)
class OpRow:
    """The speed of one ``engine`` on one case in one direction; ``seconds`` is the time of a call.

    ``speedup`` is the time of stock PyTorch divided by ``seconds``; a value above 1 is faster than
    PyTorch. ``chosen`` marks the backend that ``backend=None`` chooses. ``tflops`` and
    ``gigabytes_per_second``, which only rows of the forward pass have, are computed from the FLOPs
    of the case and the fewest bytes that it must move. ``refused`` is the reason why the engine was
    not timed.
    """

    op: str
    case: str
    dtype: str
    device: str
    direction: str
    engine: str
    chosen: bool = False
    seconds: float | None = None
    p10: float | None = None
    p90: float | None = None
    tflops: float | None = None
    gigabytes_per_second: float | None = None
    speedup: float | None = None
    refused: str | None = None


def bench_cases(*, quick: bool = False) -> list[Case]:
    """Return shapes of BERT-base and MiniLM layers on 8×128 and 1×128 tokens, or small shapes."""
    half = half_padded(8, 128)
    if quick:
        return [
            _case("attention", "4×64 D64", 4, 4, 64, 64, 64),
            _case("attention_varlen", "4×64 half D64", half_padded(4, 64), 4, 64),
            _case("layer_norm", "256×256", 256, 256),
            _case("linear_gelu", "256×256×1024", 256, 256, 1024),
            _case("feed_forward", "256×256×1024", 256, 256, 1024),
            _case("embedding", "256×256", 256, 4096, 256),
            _case("linear_cross_entropy", "256×256×4096", 256, 256, 4096),
        ]
    return [
        _case("attention", "base 8×128", 8, 12, 128, 128, 64),
        _case("attention", "base 8×128 mask", 8, 12, 128, 128, 64, mask="padding"),
        _case("attention", "base 1×128", 1, 12, 128, 128, 64),
        _case("attention", "MiniLM 8×128", 8, 12, 128, 128, 32),
        _case("attention_varlen", "base 8×128 half", half, 12, 64),
        _case("attention_varlen", "MiniLM 8×128 half", half, 12, 32),
        _case("layer_norm", "base 1024×768", 1024, 768),
        _case("layer_norm", "base 1024×768 drop", 1024, 768, dropout_p=0.1),
        _case("layer_norm", "base 128×768", 128, 768),
        _case("layer_norm", "MiniLM 1024×384", 1024, 384),
        _case("linear_gelu", "base 1024 tokens", 1024, 768, 3072),
        _case("linear_gelu", "MiniLM 1024 tokens", 1024, 384, 1536),
        _case("feed_forward", "base 1024 tokens", 1024, 768, 3072),
        _case("feed_forward", "base 128 tokens", 128, 768, 3072),
        _case("feed_forward", "MiniLM 1024 tokens", 1024, 384, 1536),
        _case("embedding", "base 1024 tokens", 1024, 30522, 768),
        _case("linear_cross_entropy", "base 1024 tokens", 1024, 768, 30522),
    ]


def _case(op: str, name: str, *shape: Any, **options: Any) -> Case:
    return Case(op, name, shape, options)


def bench_ops(
    names: Sequence[str] | None = None,
    *,
    quick: bool = False,
    dtypes: Sequence[torch.dtype] | None = None,
    device: str | None = None,
    seconds: float | None = None,
    notify: Notify = lambda text: None,
) -> list[OpRow]:
    """Time the operations ``names``, or all if None, in every backend and in stock PyTorch.

    The parity check `gate` runs first, and a backend that fails a case of this check is not timed.
    ``seconds`` limits the timing of one case in one dtype and direction.

    Raises:
        ValueError: If an operation is not known.
    """
    for name in names or ():
        if name not in TABLE_OF:
            raise ValueError(f"op: got {name!r}, allowed: {', '.join(TABLE_OF)}")
    device = device or default_device()
    seconds = seconds or (0.3 if quick else 1.5)
    dtypes = dtypes or default_dtypes(device)
    rows: list[OpRow] = []
    gates: dict[tuple[str, str, torch.dtype], str | None] = {}
    for case in bench_cases(quick=quick):
        if names and case.op not in names:
            continue
        for dtype in dtypes:
            notify(f"{case.op} {case.name}, {dtype_name(dtype)}")
            rows += _bench_case(case, dtype, device, seconds, gates)
    return rows


def _bench_case(
    case: Case,
    dtype: torch.dtype,
    device: str,
    seconds: float,
    gates: dict[tuple[str, str, torch.dtype], str | None],
) -> list[OpRow]:
    refused = {}
    for name in served(case, dtype, device):
        if (case.op, name, dtype) not in gates:
            gates[case.op, name, dtype] = gate(case.op, name, dtype)
        if reason := gates[case.op, name, dtype]:
            refused[name] = reason
    engines = [name for name in served(case, dtype, device) if name not in refused] + [PEER]
    sets = rotated_inputs(case, dtype, device)
    chosen = chosen_backend(case, dtype, device)
    rows = []
    for direction in (FORWARD, BOTH):
        common = (case.op, case.name, dtype_name(dtype), device, direction)
        calls = {engine: build(case.op, engine, direction, sets) for engine in engines}
        with torch.inference_mode(direction == FORWARD):
            timings = alternate(calls, device=device, seconds=seconds)
        for engine, timing in timings.items():
            rate = 1 / timing.median if direction == FORWARD else None
            rows.append(
                OpRow(
                    *common,
                    engine if engine == PEER else f"fastbert {engine}",
                    chosen=engine == chosen,
                    seconds=timing.median,
                    p10=timing.p10,
                    p90=timing.p90,
                    tflops=rate and case.flops() * rate / 1e12,
                    gigabytes_per_second=rate and case.bytes(dtype) * rate / 1e9,
                    speedup=timings[PEER].median / timing.median,
                )
            )
        rows += [OpRow(*common, f"fastbert {name}", refused=why) for name, why in refused.items()]
    return rows


def served(case: Case, dtype: torch.dtype, device: str) -> list[str]:
    """Return the backends to time, without Triton's interpreter, which only checks kernels."""
    return [
        name
        for name in backends.BACKENDS
        if not (name == "triton" and device == "cpu")
        and parity.refusal(case, name, dtype, device) is None
    ]


def rotated_inputs(
    case: Case, dtype: torch.dtype, device: str, *, at_most: int = MAX_INPUT_SETS
) -> list[Inputs]:
    """Return sets of inputs that together overflow the caches, with the strides of the case."""
    first = case.inputs(dtype, device)
    size = sum(value.nbytes for _, value in first.items() if isinstance(value, Tensor))
    count = input_sets(size, at_most=at_most)
    return [first, *(other_values(first, shift) for shift in range(1, count))]


def other_values(inputs: Inputs, shift: int) -> Inputs:
    """Return inputs whose floating-point tensors are rolled copies, with the same statistics.

    Slices of one buffer remain slices of one buffer. The function draws no random numbers, because
    that would take most of the time of a benchmark.
    """
    buffers: dict[int, Tensor] = {}

    def change(_: str, value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        storage = value.untyped_storage()
        if storage.data_ptr() not in buffers:
            flat = torch.empty(0, dtype=value.dtype, device=value.device).set_(storage)
            buffers[storage.data_ptr()] = flat.roll(17 * shift)
        buffer = buffers[storage.data_ptr()]
        return buffer.as_strided(value.shape, value.stride(), value.storage_offset())

    return inputs.map(change)


def chosen_backend(case: Case, dtype: torch.dtype, device: str) -> str:
    """Return the backend that ``backend=None`` chooses when no gradient is needed."""
    table, last = TABLE_OF[case.op], case.shape[-1]
    request = backends.Request(device, dtype)
    if table == "attention":
        # The shape of attention_varlen begins with the lengths of the packed sequences.
        lengths = case.shape[0] if case.op == "attention_varlen" else case.shape[2:4]
        length = length_class(max(lengths, default=0))
        request = request._replace(head_dim=last, length=length)
    elif table == "layer_norm":
        request = request._replace(columns=last)
    elif table in ("linear_gelu", "feed_forward"):
        rows, columns = case.shape[:2]
        request = request._replace(columns=columns, rows=rows_class(rows))
    return backends.resolve(table, None, request).backend


def gate(op: str, backend: str, dtype: torch.dtype) -> str | None:
    """Return the first quick parity case that fails, with its error, or None if all pass."""
    for row in parity.check(op, backend, dtype, quick=True):
        if not row.passed:
            return f"parity is red: {row.op}, {row.case}: {row.detail}"
    return None


def build(op: str, engine: str, direction: str, sets: Sequence[Inputs]) -> Callable[[int], object]:
    """Return a function of an index, which runs ``op`` on one of ``sets``."""
    if engine == PEER:
        function: Callable[..., Tensor] = peers.OPS[op]
        sets = [without_seed(inputs) for inputs in sets]
    else:
        function, sets = getattr(ops, op), [_with_backend(inputs, engine) for inputs in sets]
    if direction == FORWARD:
        return lambda index: _run(function, sets[index % len(sets)])
    prepared = [_leaves(function, inputs) for inputs in sets]

    def train(index: int) -> object:
        inputs, targets, gradient = prepared[index % len(prepared)]
        return torch.autograd.grad(_run(function, inputs), targets, gradient)

    return train


def _run(function: Callable[..., Tensor], inputs: Inputs) -> Tensor:
    return function(*inputs.positional.values(), **inputs.keyword)


def _leaves(function: Callable[..., Tensor], inputs: Inputs) -> tuple[Inputs, list[Tensor], Tensor]:
    """Return inputs of leaf tensors, the leaves that need gradients, and a random output gradient.

    The output gradient has the shape and dtype of the output of ``function``.
    """
    ready = leaves(inputs)
    named = dict(ready.items())
    with torch.no_grad():
        gradient = torch.randn_like(_run(function, ready))
    return ready, [named[name] for name in inputs.gradients], gradient


def without_seed(inputs: Inputs) -> Inputs:
    """Return inputs without the dropout seed, for a peer that draws a dropout mask of its own."""
    keyword = {key: value for key, value in inputs.keyword.items() if key != "dropout_seed"}
    return Inputs(inputs.positional, keyword, inputs.gradients)


def _with_backend(inputs: Inputs, backend: str) -> Inputs:
    return Inputs(inputs.positional, {**inputs.keyword, "backend": backend}, inputs.gradients)
