"""Run cases on backends and judge every output and gradient by the tolerance rule of `compare`."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from fastbert import ops, reference
from fastbert.activations import APPROXIMATIONS
from fastbert.ops import backend as backends
from fastbert.ops.attention_arguments import named_options
from fastbert.testing.cases import TABLE_OF, Case, Inputs
from fastbert.testing.compare import Comparison, compare
from fastbert.testing.random_cases import random_cases
from fastbert.testing.selection import find
from fastbert.testing.yardstick import Yardstick

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class ParityRow:
    """The comparison of one tensor of one case on one backend, a line of ``fastbert check``.

    Args:
        op: Name of the operation.
        case: Name of the case.
        backend: Name of the backend.
        dtype: Dtype of the inputs, such as "bfloat16".
        tensor: Name of the tensor: "out", or a gradient such as "dq".
        error: Largest error of the tensor.
        yardstick: Largest error of the yardstick.
        ratio: `error` divided by `yardstick`.
        passed: Whether the tensor passes.
        detail: The comparison in words.
        command: The command line that runs the case again.
    """

    op: str
    case: str
    backend: str
    dtype: str
    tensor: str
    error: float
    yardstick: float
    ratio: float
    passed: bool
    detail: str
    command: str

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by name, for JSON."""
        return asdict(self)


def run_with_gradients(
    function: Callable[..., Any], inputs: Inputs, extra: dict[str, Any], seed: int = 0
) -> dict[str, Tensor]:
    """Run a function and its backward pass with a seeded gradient of the output.

    Args:
        function: Function that computes one tensor.
        inputs: The arguments of the function, and the names of the arguments with a gradient.
        extra: Further keyword arguments.
        seed: Seed of the gradient of the output.

    Returns:
        The output as "out" and the gradient of each argument ``x`` as "dx".
    """
    leaves = inputs.map(
        lambda name, v: (
            v.detach().requires_grad_(name in inputs.gradients) if isinstance(v, Tensor) else v
        )
    )
    out = function(*leaves.positional.values(), **leaves.keyword, **extra)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed))
    named = dict(leaves.items())
    targets = [named[name] for name in inputs.gradients]
    # The gradient of the output is rounded to bf16, so that all runs get the same values in every
    # dtype.
    gradients = torch.autograd.grad(out, targets, dout.bfloat16().to(out.dtype).to(out.device))
    names = (f"d{name}" for name in inputs.gradients)
    return {"out": out.detach(), **dict(zip(names, gradients, strict=True))}


def oracle_and_yardstick(
    case: Case, dtype: torch.dtype, seeds: Iterable[int] = (0,)
) -> tuple[dict[str, Tensor], Yardstick]:
    """Run the reference of a case in float64 and in the tested dtype, on the CPU.

    Both runs have the same inputs, rounded to the tested dtype.

    Args:
        case: The case.
        dtype: The tested dtype.
        seeds: Seeds of the inputs. The results of several seeds are stacked.

    Returns:
        The oracle by name of tensor, and the yardstick of the same tensors.
    """
    inputs = [case.inputs(dtype, seed=seed) for seed in seeds]
    function = getattr(reference, case.op)

    def exact(_: str, value: Any) -> Any:
        floating = isinstance(value, Tensor) and value.is_floating_point()
        return value.double() if floating else value

    def run(given: list[Inputs]) -> dict[str, Tensor]:
        return _join([run_with_gradients(function, each, {}) for each in given])

    return run([each.map(exact) for each in inputs]), Yardstick(lambda: run(inputs))


@contextlib.contextmanager
def gpu_tiles() -> Iterator[None]:
    """Make Triton's interpreter use the tiles of a GPU inside the block.

    By default, the interpreter uses larger tiles, with which it is faster.
    """
    tiles: Any = importlib.import_module("fastbert.kernels.tiles")
    before = tiles.IS_INTERPRETED
    tiles.IS_INTERPRETED = False
    try:
        yield
    finally:
        tiles.IS_INTERPRETED = before


def check_case(
    case: Case, backend: str | None, dtype: torch.dtype, device: str = "cpu", seed: int = 0
) -> list[Comparison]:
    """Run a case on a backend and compare the output and each gradient.

    The limits come from the yardstick, the reference in `dtype`. A random case can be so small that
    its yardstick is exact by luck. If such a case fails, it is judged again by the same rule on the
    joint results of four seeds, of which `seed` is the first. In the larger sample, luck no longer
    decides, and a real error still fails.

    Args:
        case: The case.
        backend: Name of the backend; None lets the operation choose.
        dtype: Dtype of the inputs.
        device: Device of the inputs.
        seed: Seed of the inputs.

    Returns:
        The comparison of each tensor.
    """
    results = _compare(case, backend, dtype, device, (seed,))
    if case.is_random and not all(result.passed for result in results):
        results = _compare(case, backend, dtype, device, range(seed, seed + 4))
    return results


def _compare(
    case: Case, backend: str | None, dtype: torch.dtype, device: str, seeds: Iterable[int]
) -> list[Comparison]:
    """Compare each tensor, stacked over the seeds."""
    tiles = gpu_tiles if case.gpu_tiles and backend == "triton" else contextlib.nullcontext
    oracle, yardstick = oracle_and_yardstick(case, dtype, seeds)
    function, options = getattr(ops, case.op), {"backend": backend}
    with tiles():
        actual = _join(
            [
                run_with_gradients(function, case.inputs(dtype, device, seed), options)
                for seed in seeds
            ]
        )
    return [compare(name, actual[name], oracle[name], yardstick[name]) for name in oracle]


def _join(results: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Stack the results of several seeds; the results of one seed are returned unchanged."""
    if len(results) == 1:
        return results[0]
    return {name: torch.stack([result[name] for result in results]) for name in results[0]}


def refusal(case: Case, backend: str, dtype: torch.dtype, device: str) -> str | None:
    """Return the reason why a backend does not serve a case.

    Args:
        case: The case.
        backend: Name of the backend.
        dtype: Dtype of the inputs.
        device: Device of the inputs.

    Returns:
        The reason in words, or None if the backend serves the case.
    """
    approximate = case.options.get("approximate", "none")
    activation = case.options.get("activation", APPROXIMATIONS[approximate])
    request = backends.Request(device, dtype, activation=activation, **_attention_request(case))
    return backends.refusal(TABLE_OF[case.op], backend, request)


def _attention_request(case: Case) -> dict[str, Any]:
    """Return the fields that an attention case determines in the request for a backend."""
    if TABLE_OF[case.op] != "attention":
        return {}
    given = case.options
    window = given.get("window", -1)
    left, right = (window, window) if isinstance(window, int) else window
    return {
        "head_dim": case.shape[-1 if case.op == "attention" else 2],
        "options": named_options(
            bool(given.get("bias")),
            left,
            0 if given.get("causal") else right,
            given.get("scale", 1.0),
            False,
        ),
    }


def devices() -> tuple[str, ...]:
    """Return the device types of this machine on which cases can run."""
    return ("cuda", "cpu") if torch.cuda.is_available() else ("cpu",)


def plan(
    op: str | None = None,
    backend: str | None = None,
    dtype: torch.dtype | None = None,
    case: str | None = None,
    quick: bool = False,
    random: int = 0,
    seed: int = 0,
) -> list[tuple[Case, str, torch.dtype, str]]:
    """List the runs of a selection that are possible on this machine.

    Args:
        op: The only operation; None is all.
        backend: The only backend; None is all.
        dtype: The only dtype; None is fp32, fp16 and bf16.
        case: Name of a case; None is all registered cases.
        quick: Whether only the cases of the quick selection run.
        random: Number of random cases, which then replace the registered cases. `case` and `quick`
            select registered cases, so neither goes together with `random`.
        seed: Seed of the random cases.

    Returns:
        A tuple of case, backend, dtype and device for each run.

    Raises:
        ValueError: If the selection is unknown or contradictory, or if no run is possible.
    """
    backends.validate(backend)
    for name, value in (("case", case), ("quick", quick)):
        if random and value:
            raise ValueError(f"{name}: got {value!r} with random={random}, allowed: one of the two")
    names = backends.BACKENDS if backend is None else (backend,)
    runs, reasons = [], []
    for selected in random_cases(random, seed, op) if random else find(op, case, quick):
        for name in names:
            for device in devices():
                for kind in DTYPES if dtype is None else (dtype,):
                    reason = refusal(selected, name, kind, device)
                    if reason is None:
                        runs.append((selected, name, kind, device))
                    else:
                        reasons.append(f"{selected.op}: {reason}")
    if not runs:
        raise ValueError(f"backend: got {backend!r}, which serves nothing here ({reasons[0]})")
    return runs


def check(
    op: str | None = None,
    backend: str | None = None,
    dtype: torch.dtype | None = None,
    case: str | None = None,
    quick: bool = False,
    random: int = 0,
    seed: int = 0,
) -> Iterator[ParityRow]:
    """Run a selection and judge every tensor.

    Args:
        op: As in `plan`.
        backend: As in `plan`.
        dtype: As in `plan`.
        case: As in `plan`.
        quick: As in `plan`.
        random: As in `plan`.
        seed: Seed of the inputs. With `random`, the seed of the random cases, whose names then
            contain it.

    Yields:
        A row for each tensor, as soon as its run is done. A run that raises an error has one row,
        which fails with the error, and the next run follows.

    Raises:
        ValueError: As in `plan`.

    Examples:
        >>> import torch
        >>> from fastbert.testing.parity import check
        >>> rows = check("linear", "reference", torch.float32, case="no_bias")
        >>> sorted({(row.tensor, row.passed) for row in rows})
        [('dweight', True), ('dx', True), ('out', True)]
    """
    of_inputs = 0 if random else seed
    for selected, name, kind, device in plan(op, backend, dtype, case, quick, random, seed):
        try:
            results = check_case(selected, name, kind, device, of_inputs)
        except Exception as error:
            results = [not_run(kind, error)]
        for result in results:
            yield parity_row(selected, name, kind, result, of_inputs)


def not_run(dtype: torch.dtype, error: Exception) -> Comparison:
    """Return a failed comparison that reports the error of a run, as of a refused launch."""
    text = " ".join(str(error).split())[:300]
    name = backends.dtype_name(dtype)
    return Comparison("run", name, problem=f"{type(error).__name__}: {text}")


def parity_row(
    case: Case, backend: str, dtype: torch.dtype, result: Comparison, seed: int = 0
) -> ParityRow:
    """Return the row of ``fastbert check`` for a comparison.

    Args:
        case: The case.
        backend: Name of the backend.
        dtype: Dtype of the inputs, which may differ from the dtype of a loss, because a loss is
            fp32.
        result: The comparison of the tensor.
        seed: Seed of the inputs.

    Returns:
        The row.
    """
    return ParityRow(
        case.op,
        case.name,
        backend,
        backends.dtype_name(dtype),
        result.name,
        result.error,
        result.yardstick,
        result.ratio,
        result.passed,
        str(result),
        case.command(backend, dtype, seed),
    )
