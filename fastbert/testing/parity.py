"""Runs cases on backends and judges every output and gradient by the rule of ``compare``."""

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
from fastbert.testing.cases import TABLE_OF, Case, Inputs
from fastbert.testing.compare import Comparison, compare
from fastbert.testing.random_cases import random_cases
from fastbert.testing.selection import find
from fastbert.testing.yardstick import Yardstick

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class ParityRow:
    """One tensor of one case on one backend: what ``fastbert check`` prints and writes as JSON."""

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
        return asdict(self)


def run_with_gradients(
    function: Callable[..., Any], inputs: Inputs, extra: dict[str, Any], seed: int = 0
) -> dict[str, Tensor]:
    """The output and every gradient of ``function``, by name, for a seeded gradient of the
    output.
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
    # Rounded to bf16, whose values every dtype holds, so that all runs see the same gradient.
    gradients = torch.autograd.grad(out, targets, dout.bfloat16().to(out.dtype).to(out.device))
    names = (f"d{name}" for name in inputs.gradients)
    return {"out": out.detach(), **dict(zip(names, gradients, strict=True))}


def oracle_and_yardstick(
    case: Case, dtype: torch.dtype, seeds: Iterable[int] = (0,)
) -> tuple[dict[str, Tensor], Yardstick]:
    """The reference in float64 and in ``dtype`` on the same rounded inputs, on the CPU."""
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
    """Triton's interpreter plays the tiles of a GPU, not the larger ones that it is faster with."""
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
    """Runs ``case`` on ``backend`` and compares the output and each gradient.

    A random case can be so small that its yardstick is right by luck. If it fails, it is judged
    again on the results of four seeds together, the first among them: a larger sample, the same
    rule. An error that is there stays there.
    """
    results = _compare(case, backend, dtype, device, (seed,))
    if case.is_random and not all(result.passed for result in results):
        results = _compare(case, backend, dtype, device, range(seed, seed + 4))
    return results


def _compare(
    case: Case, backend: str | None, dtype: torch.dtype, device: str, seeds: Iterable[int]
) -> list[Comparison]:
    """The comparison of each tensor, joined over the seeds."""
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
    """The results of several seeds as one."""
    if len(results) == 1:
        return results[0]
    return {name: torch.stack([result[name] for result in results]) for name in results[0]}


def refusal(case: Case, backend: str, dtype: torch.dtype, device: str) -> str | None:
    """Why ``backend`` does not serve this case; None when it does."""
    head_dim = case.shape[-1] if case.op == "attention" else 0
    approximate = case.options.get("approximate", "none")
    activation = case.options.get("activation", APPROXIMATIONS[approximate])
    request = backends.Request(device, dtype, head_dim=head_dim, activation=activation)
    return backends.refusal(TABLE_OF[case.op], backend, request)


def devices() -> tuple[str, ...]:
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
    """Every (case, backend, dtype, device) that this machine can run, of the registered cases or of
    ``random`` random ones, drawn by ``seed``.

    Raises ValueError when the selection is unknown, or when an asked-for backend serves none of it.
    """
    backends.validate(backend)
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
    """One ``ParityRow`` per tensor, as the runs of ``plan`` go by; ``plan``'s errors.

    ``seed`` is that of the inputs, or of random cases, whose names then hold it.
    """
    of_inputs = 0 if random else seed
    for selected, name, kind, device in plan(op, backend, dtype, case, quick, random, seed):
        for result in check_case(selected, name, kind, device, of_inputs):
            yield parity_row(selected, name, kind, result, of_inputs)


def parity_row(
    case: Case, backend: str, dtype: torch.dtype, result: Comparison, seed: int = 0
) -> ParityRow:
    """``dtype`` is that of the inputs; a loss comes back in fp32 all the same."""
    return ParityRow(
        case.op,
        case.name,
        backend,
        str(dtype).removeprefix("torch."),
        result.name,
        result.error,
        result.yardstick,
        result.ratio,
        result.passed,
        str(result),
        case.command(backend, dtype, seed),
    )
