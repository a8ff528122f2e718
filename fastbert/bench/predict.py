"""Lower bounds of the times of the Triton and CUDA C++ kernels, from counts of the PTX machine.

The PTX machine (`fastbert.testing.ptx`) executes compiled kernels on the CPU. It runs some blocks
of each kernel at the true shapes and counts their work (`fastbert.testing.ptx.sample`). The counts
of a launch divided by the rates of a GPU are the times for which each unit of the GPU is busy. The
launch takes at least as long as the busiest unit, and the launches of an operation run one after
another.

The figures are bounds, not measurements. There are two kinds of bounds.

- ``bound`` has only work that no assembler can remove: matrix products, special functions,
  wavefronts of shared memory, and the operation's least traffic of device memory.
- ``estimate`` adds the FP32, integer and memory instructions and the issue of all instructions.
  These counts are corrected by the mix of instructions in the machine code
  (`fastbert.testing.ptx.sass`). The estimate also adds the memory traffic of each launch without
  matrix instructions and of each product of the library. The estimate is a bound only if the
  correction is exact and no tensor stays in the L2 cache between two launches. In an operation of
  matrix products, each product takes at least the time of the library's product
  (``LIBRARY_SHARE``), because no kernel is expected to be faster.

The time of memory traffic is computed with the rate of the fastest measured copy
(``MEMORY_SHARE``). Neither bound includes latencies, the time of launches, the L2 cache, or clocks
below the boost clock. The time of matrix products is computed with the rate of the architecture's
fastest instruction. On a Hopper GPU, this instruction is ``wgmma``, even for kernels compiled for
compute capability 8.0, which use the slower ``mma.sync``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from fastbert.bench.limits import BACKWARD, FORWARD, GOALS, Goal, attention_goal, work
from fastbert.bench.limits import H200 as H200_LIMITS
from fastbert.gpus import GPUS, H200, LANES, Gpu
from fastbert.ops import backend as backends
from fastbert.testing import parity
from fastbert.testing.cases import TABLE_OF, Case
from fastbert.testing.ptx import cuda_operators
from fastbert.testing.ptx.sample import Launched, count
from fastbert.testing.ptx.triton_launches import STAND_IN

# The assembler ptxas cannot remove work of these units.
STRICT = ("tensor", "mufu", "shared")
# For each architecture of the code, the number of multiprocessors for which the grid of a launch is
# made.
GRID_OF = {80: 108, 89: 128, 90: 132}
NOT_EXECUTED = (
    "sm_100 code multiplies with tcgen05, which the PTX machine lacks, so the bound has only the "
    "least products and the least traffic of the operation"
)
TOKENS, HIDDEN = 16384, 1024
# The library's products are assumed to reach this share of the matrix rate on every GPU: the share
# of the fastest product that was measured on an H200.
LIBRARY_SHARE = H200_LIMITS.measured_flops / H200_LIMITS.flops
# Memory is assumed to reach this share of the datasheet's bandwidth on every GPU: the share of the
# fastest copy that was measured on an H200.
MEMORY_SHARE = H200_LIMITS.measured_bytes / H200_LIMITS.bytes


@dataclass(frozen=True)
class Bound:
    """The bound of one operation at one shape on one GPU.

    Args:
        op: Name of the operation.
        case: Name of the shape.
        dtype: Dtype of the inputs.
        direction: "forward" or "backward".
        gpu: Name of the GPU.
        launches: Names of the launches, in their order.
        seconds: Busy time by unit, over all launches; "memory" is the least traffic of the
            operation. Units that were not counted are missing.
        bound: Lower bound of the operation's time in seconds.
        binds: The unit that determines `bound`.
        estimate: Estimated seconds, which include all units and the memory traffic of the launches;
            0 if units are missing.
        estimate_binds: The unit that determines `estimate`.
        rate: Work of the operation divided by `bound`, in `unit`.
        estimate_rate: Work of the operation divided by `estimate`, in `unit`.
        unit: "TFLOP/s" or "TB/s".
        goal: The rate to reach, or None.
        reason: Why units are missing and the estimate is 0; empty if nothing is missing.
    """

    op: str
    case: str
    dtype: str
    direction: str
    gpu: str
    launches: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    bound: float = 0.0
    binds: str = ""
    estimate: float = 0.0
    estimate_binds: str = ""
    rate: float = 0.0
    estimate_rate: float = 0.0
    unit: str = ""
    goal: float | None = None
    reason: str = ""


# Shapes


def cases() -> tuple[Case, ...]:
    """Return the shapes of the goals, of the choice of backends, of the loss and of DeBERTa."""
    made = []
    for head_dim in (64, 32, 128):
        for length in (128, 256, 512, 1024, 2048):
            sizes = (TOKENS // length, HIDDEN // head_dim, length, length, head_dim)
            made.append(Case("attention", f"S{length} D{head_dim}", sizes))
    for batch, length in ((8, 128), (16, 512)):
        # The distances of sequences of 128 tokens have 255 rows, and longer ones have 512 buckets.
        tables = (batch, 12, length, length, 64, min(2 * length - 1, 512))
        made.append(Case("relative_attention", f"{batch}×{length}", tables, {"tables": "kq"}))
    for columns in (1024, 768):
        made.append(Case("layer_norm", f"{TOKENS}×{columns}", (TOKENS, columns)))
        dropped = {"dropout_p": 0.1}
        made.append(Case("layer_norm", f"{TOKENS}×{columns} drop", (TOKENS, columns), dropped))
    for hidden, inner in ((768, 3072), (1024, 4096), (384, 1536)):
        for rows in (TOKENS, 2048, 128):
            for op in ("linear_gelu", "feed_forward"):
                made.append(Case(op, f"{rows}×{hidden}×{inner}", (rows, hidden, inner)))
    for hidden in (768, 1024):
        shape = (TOKENS, hidden, 30522)
        made.append(Case("linear_cross_entropy", "×".join(map(str, shape)), shape))
    return tuple(made)


def dtypes_of(case: Case) -> tuple[torch.dtype, ...]:
    """Return the dtypes in which a case is predicted.

    A layer norm without options is predicted in bf16 and fp32, and every other case only in bf16.
    In fp32, both backends use the library's matrix products, and only Triton computes attention.
    """
    if case.op == "layer_norm" and not case.options:
        return torch.bfloat16, torch.float32
    return (torch.bfloat16,)


# Times


def busy(launch: Launched, gpu: Gpu) -> dict[str, float]:
    """Return the seconds for which each unit of a multiprocessor is busy with a launch.

    The busiest multiprocessor gets at least an equal share of the blocks, rounded up to whole
    blocks. The share is not rounded if the grid was made for another number of multiprocessors, or
    if the launch is a product of the library.
    """
    c = {key: float(value) for key, value in launch.counts.items()}

    def of(name: str) -> float:
        return c.get(name, 0.0)

    cycles = {
        "tensor": of("tensor_flops") / gpu.tensor,
        "mufu": LANES * of("mufu") / gpu.mufu,
        "shared": of("shared_wavefronts") + of("tensor_shared_bytes") / gpu.shared,
        "fma": LANES * of("sass_fma") / gpu.fma,
        "alu": LANES * of("sass_alu") / gpu.alu,
        "lsu": LANES * of("sass_lsu") / gpu.lsu,
        "issue": of("sass_issue") / gpu.issue,
    }
    share = 1 / gpu.multiprocessors
    if launch.blocks and GRID_OF.get(gpu.arch) == gpu.multiprocessors:
        share = math.ceil(launch.blocks / gpu.multiprocessors) / launch.blocks
    return {unit: n * share / gpu.clock for unit, n in cycles.items()}


def streamed(launch: Launched) -> float:
    """Return the fewest bytes that a launch reads from and writes to device memory.

    A kernel with matrix instructions counts as 0 bytes, because it may read only parts of its
    tensors.
    """
    return 0.0 if launch.multiplies and launch.blocks else launch.bytes


def bound(
    case: Case, dtype: torch.dtype, direction: str, launches: Sequence[Launched], gpu: Gpu
) -> Bound:
    """Return the bound of an operation on a GPU from the counts of its launches.

    Args:
        case: The case.
        dtype: Dtype of the inputs.
        direction: "forward" or "backward".
        launches: The launches of the code for the GPU's architecture. For sm_100 and newer, they
            are launches of the code for sm_90, which are used only if no kernel among them has
            matrix instructions.
        gpu: The GPU.
    """
    common = (case.op, case.name, backends.dtype_name(dtype), direction, gpu.name)
    names = [launch.name for launch in launches]
    least = work(case, dtype, direction)
    bandwidth = MEMORY_SHARE * gpu.memory
    memory = least.bytes / bandwidth
    by_rows = TABLE_OF[case.op] in ("layer_norm", "rms_norm", "embedding")
    amount = least.bytes if by_rows else least.flops
    unit = "TB/s" if by_rows else "TFLOP/s"
    if gpu.arch >= 100 and any(launch.multiplies and launch.blocks for launch in launches):
        only = {"tensor": least.flops / gpu.flops, "memory": memory}
        seconds = max(only.values())
        return Bound(
            *common, names, only, seconds, max(only, key=lambda name: only[name]),
            rate=amount / seconds / 1e12, unit=unit, reason=NOT_EXECUTED,
        )  # fmt: skip
    times = [busy(launch, gpu) for launch in launches]
    total = {unit: sum(time[unit] for time in times) for unit in times[0]} | {"memory": memory}
    strict = [{unit: time[unit] for unit in STRICT} for time in times]
    in_turn = sum(max(time.values()) for time in strict)
    reached = 1.0 if TABLE_OF[case.op] == "attention" else LIBRARY_SHARE
    full = [
        {**time, "tensor": time["tensor"] / reached, "memory": streamed(launch) / bandwidth}
        for time, launch in zip(times, launches, strict=True)
    ]
    seconds = max(memory, in_turn)
    estimate = max(seconds, sum(max(time.values()) for time in full))
    goal = _goal(case, direction) if gpu is H200 else None
    return Bound(
        *common,
        launches=names,
        seconds=total,
        bound=seconds,
        binds="memory" if memory >= in_turn else _busiest(strict),
        estimate=estimate,
        estimate_binds="memory" if memory >= estimate else _busiest(full),
        rate=amount / seconds / 1e12,
        estimate_rate=amount / estimate / 1e12,
        unit=unit,
        goal=None if goal is None else goal.value / (1e3 if by_rows else 1.0),
    )


def _busiest(times: Sequence[dict[str, float]]) -> str:
    """Return the unit that is the busiest for the longest time, summed over the launches."""
    bound_by: dict[str, float] = {}
    for time in times:
        unit = max(time, key=lambda name: time[name])
        bound_by[unit] = bound_by.get(unit, 0.0) + time[unit]
    return max(bound_by, key=lambda name: bound_by[name])


def _goal(case: Case, direction: str) -> Goal | None:
    if case.op == "attention":
        return attention_goal(direction, case.shape[3], case.shape[-1])
    return GOALS.get(f"{case.op} {direction}")


@dataclass(frozen=True)
class Prediction:
    """Bounds, and the counts of the launches from which they were computed.

    Args:
        bounds: One `Bound` for each case, dtype, direction and GPU.
        launches: The launches of the code for an architecture, under keys of the form ``"op case
            dtype direction sm_90"``.
    """

    bounds: list[Bound]
    launches: dict[str, list[Launched]]

    def to_dict(self) -> dict[str, Any]:
        """Return both fields for JSON, with a label that says that the figures are bounds."""
        return {"kind": "lower bounds from counted instructions, not measurements", **asdict(self)}


def predict(
    selected: Sequence[Case],
    gpus: Sequence[Gpu] = GPUS,
    notify: Callable[[str], None] = lambda text: None,
    backend: str = "triton",
) -> Prediction:
    """Return the bounds of cases on GPUs, forward and backward, in the dtypes of `dtypes_of`.

    Args:
        selected: The cases whose times are bounded.
        gpus: The GPUs on which the times are bounded.
        notify: Function that receives the name of each case and architecture before the case runs.
        backend: "triton" or "cuda".

    Raises:
        ImportError: If Triton, whose wheel has the disassembler, or the C++ extension is missing.
        ValueError: If Triton kernels run in the interpreter, which compiles nothing, or if the
            backend "cuda" cannot be compiled here or does not serve a case.
    """
    if not backends.HAS_TRITON:
        raise ImportError("triton is not installed: pip install 'fastbert[triton]'")
    if backend == "triton" and backends.interpreted():
        raise ValueError(
            "TRITON_INTERPRET: got 1, allowed: unset; the interpreter compiles nothing"
        )
    if backend == "cuda":
        reason = cuda_operators.obstacle() or _refusal(selected)
        if reason is not None:
            raise ValueError(f"backend: got 'cuda', which cannot be predicted here: {reason}")
    prediction = Prediction([], {})
    for case, dtype in _with_dtypes(selected):
        by_arch: dict[int, dict[str, list[Launched]]] = {}
        name = f"{case.op} {case.name} {backends.dtype_name(dtype)}"
        for arch in sorted({code_for(gpu) for gpu in gpus}):
            notify(f"{name} sm_{arch}")
            by_arch[arch] = count(case, dtype, arch, GRID_OF[arch], backend)
            for direction, launches in by_arch[arch].items():
                prediction.launches[f"{name} {direction} sm_{arch}"] = launches
        for direction in (FORWARD, BACKWARD):
            for gpu in gpus:
                launches = by_arch[code_for(gpu)][direction]
                prediction.bounds.append(bound(case, dtype, direction, launches, gpu))
    return prediction


def _with_dtypes(selected: Sequence[Case]) -> list[tuple[Case, torch.dtype]]:
    return [(case, dtype) for case in selected for dtype in dtypes_of(case)]


def _refusal(selected: Sequence[Case]) -> str | None:
    """Return why the CUDA C++ kernels do not serve one of the cases, or None."""
    with backends.standing_in(STAND_IN, "cuda"):
        reasons = (
            parity.refusal(case, "cuda", dtype, "cpu") for case, dtype in _with_dtypes(selected)
        )
        return next((reason for reason in reasons if reason is not None), None)


def code_for(gpu: Gpu) -> int:
    """Return the newest architecture in ``GRID_OF`` that is not newer than the GPU's."""
    return max(arch for arch in GRID_OF if arch <= gpu.arch)


def markdown(rows: Sequence[Bound]) -> Iterator[str]:
    """Yield the meaning of the columns, then a table per operation, direction and dtype."""
    yield "Lower bounds from counted instructions, NOT measurements; times in µs."
    yield ""
    yield (
        "`bound`: the busiest of tensor, mufu, shared (launch by launch) and memory. `estimate`: "
        "also fma, alu, lsu and issue by the mix of the machine code, and the tensors of launches "
        "without products."
    )
    for reason in sorted({row.reason for row in rows if row.reason}):
        missing = {row.gpu: None for row in rows if row.reason == reason}
        yield ""
        yield f"{', '.join(missing)}: {reason}."
    units = ("tensor", "mufu", "shared", "memory", "fma", "alu", "lsu", "issue")
    head = ("case", "GPU", *units, "bound", "binds", "rate", "estimate", "binds", "rate", "goal")
    groups: dict[tuple[str, str, str], list[Bound]] = {}
    for row in rows:
        groups.setdefault((row.op, row.direction, row.dtype), []).append(row)
    for (op, direction, dtype), group in groups.items():
        yield from ("", f"## {op} {direction}, {dtype}", "")
        yield f"| {' | '.join(head)} |"
        yield "|---|---|" + "---:|" * (len(units) + 1) + "---|---:|---:|---|---:|---:|"
        for row in group:
            yield f"| {' | '.join(_cells(row, units))} |"


def _cells(row: Bound, units: Sequence[str]) -> list[str]:
    estimate = [f"{row.estimate * 1e6:.1f}", row.estimate_binds, f"{row.estimate_rate:.3g}"]
    return [
        row.case,
        row.gpu,
        *(f"{row.seconds[unit] * 1e6:.1f}" if unit in row.seconds else "–" for unit in units),
        f"{row.bound * 1e6:.1f}",
        row.binds,
        f"{row.rate:.3g} {row.unit}",
        *(estimate if row.estimate else ["–"] * 3),
        "–" if row.goal is None else f"{row.goal:.3g}",
    ]
