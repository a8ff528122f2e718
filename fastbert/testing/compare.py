"""The only tolerance rule: tests, ``fastbert check`` and benchmarks all decide with `compare`.

The oracle is the reference in float64, on inputs that are rounded to the tested dtype. The
yardstick is the same reference in the tested dtype. A result passes if two inequalities hold:

    max error ≤ factor · (yardstick's max error) + a
    RMS error ≤ 1.5 · (yardstick's RMS error)

The factor is 2, or at most 3 if the caller states a reason. The number a is the error that rounding
alone can cause, a = 2 · max|oracle + 0.3 − 0.3 − oracle|, computed in the tested dtype. The second
inequality finds a bias that the maximum misses. If rounding the oracle to the tested dtype has a
larger RMS error than the yardstick, the error of this rounding replaces the yardstick's RMS error.
No other tolerance is used.

The result of the rule does not depend on the processor. Matrix products of torch are more exact on
one processor than on another, so a yardstick by torch alone may be too exact. A `Yardstick` can
also run the reference with sums in several fixed orders, which are the same on every processor. A
result that fails against the run by torch is judged again. The yardstick's errors are then the
largest errors of all runs: the run by torch and the runs in fixed orders.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fastbert.ops.backend import dtype_name
from fastbert.testing.yardstick import Yardstick

MAX_FACTOR = 2.0
RMS_FACTOR = 1.5
# With fewer elements than this number, an RMS or a sampled rounding error has no meaning, because
# one lucky rounding would decide. The inequality of the RMS errors then does not apply, and the
# number a of the tolerance rule is a bound of the rounding errors instead of a sample.
SAMPLE = 64
# If an error exceeds its limit by this factor, no lucky order of terms can explain the error.
HOPELESS = 10.0


@dataclass(frozen=True)
class Comparison:
    """The errors of one tensor, their limits by the tolerance rule, and the result.

    Args:
        name: Name of the tensor.
        dtype: Dtype of the tensor.
        error: Largest error of the tensor.
        yardstick: Largest error of the yardstick.
        allowed: Limit of `error`.
        rms_error: RMS error of the tensor.
        rms_yardstick: RMS error of the yardstick.
        rms_allowed: Limit of `rms_error`.
        problem: The reason why the tensor cannot be compared, or None.
    """

    name: str
    dtype: str
    error: float = math.nan
    yardstick: float = math.nan
    allowed: float = math.nan
    rms_error: float = math.nan
    rms_yardstick: float = math.nan
    rms_allowed: float = math.nan
    problem: str | None = None

    @property
    def ratio(self) -> float:
        """The largest error divided by the largest error of the yardstick.

        A result that is as exact as PyTorch's result in the same dtype has the ratio 1.
        """
        if self.error == 0.0:
            return 0.0
        return self.error / self.yardstick if self.yardstick > 0.0 else math.inf

    @property
    def passed(self) -> bool:
        """Whether the tensor could be compared and both errors are within their limits."""
        within = self.error <= self.allowed and self.rms_error <= self.rms_allowed
        return self.problem is None and within

    @property
    def is_close(self) -> bool:
        """Whether both errors are small enough for luck: at most ``HOPELESS`` times the limits."""
        within = self.error <= HOPELESS * self.allowed
        return within and self.rms_error <= HOPELESS * self.rms_allowed

    def __str__(self) -> str:
        """State the errors, their limits and the result on one line."""
        result = "ok" if self.passed else f"FAILED{f' ({self.problem})' if self.problem else ''}"
        return (
            f"{self.name} [{self.dtype}]: max error {self.error:.3e} (yardstick "
            f"{self.yardstick:.3e}, allowed {self.allowed:.3e}), RMS {self.rms_error:.3e} "
            f"(yardstick {self.rms_yardstick:.3e}, allowed {self.rms_allowed:.3e}): {result}"
        )


def rounding(oracle: Tensor, dtype: torch.dtype) -> float:
    """Return the number a in the tolerance rule: the error that rounding alone can cause.

    The number is twice the largest ``|x + 0.3 − 0.3 − x|`` over the elements of `oracle`, computed
    in `dtype`. For fewer than ``SAMPLE`` elements, the number is twice the bound of two roundings
    to nearest, ``eps (max|x| + 0.3)``.

    Args:
        oracle: The exact result, of any shape.
        dtype: The tested dtype.

    Returns:
        The error, as a float; 0 for a tensor without elements.
    """
    x = oracle.to(dtype)
    if x.numel() == 0:
        return 0.0
    if x.numel() < SAMPLE:
        return 2.0 * torch.finfo(dtype).eps * (float(x.abs().max()) + 0.3)
    return 2.0 * float((x + 0.3 - 0.3 - x).abs().max())


def _rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt()) if x.numel() else 0.0


def compare(
    name: str,
    actual: Tensor,
    oracle: Tensor,
    yardstick: Tensor | Yardstick,
    *,
    factor: float = MAX_FACTOR,
    reason: str | None = None,
    tested: torch.dtype | None = None,
) -> Comparison:
    """Judge a result by the tolerance rule of this module.

    Args:
        name: Name of the result, for messages.
        actual: The result, of any shape.
        oracle: The exact result, float64 in the shape of `actual`.
        yardstick: The result of the reference in the dtype and shape of `actual`. The yardstick of
            a computation with products is a `Yardstick`; any other yardstick may be a tensor.
        factor: Factor of the yardstick's largest error, at most 3.
        reason: The reason, in words, for a factor above 2.
        tested: The dtype whose rounding counts, if it is narrower than the dtype of `actual`. An
            example is the fp32 loss of a 16-bit model. None is the dtype of `actual`.

    Returns:
        The comparison. A tensor of another shape or dtype, or with elements that are
        not finite, gives a comparison that names this problem.

    Raises:
        ValueError: If `factor` is above 3, or above 2 without a reason, or if the dtype of `oracle`
            is not float64. A wrong `actual` raises no error.

    Examples:
        >>> import torch
        >>> from fastbert.testing.compare import compare
        >>> oracle = torch.linspace(0, 1, 100, dtype=torch.float64).exp()
        >>> yardstick = oracle.float()
        >>> compare("exp", yardstick, oracle, yardstick).passed
        True
        >>> compare("exp", yardstick + 1e-3, oracle, yardstick).passed
        False
    """
    _check(factor, reason, oracle)
    runs = _runs(yardstick)
    judged = _Judged(name, actual, oracle, next(runs), factor, tested)
    while not judged.comparison.passed:
        run = None if judged.comparison.problem else next(runs, None)
        if run is None:
            break
        judged.widen(run)
    return judged.comparison


def compare_all(
    actual: Mapping[str, Tensor],
    oracle: Mapping[str, Tensor],
    yardstick: Yardstick,
    *,
    factor: float = MAX_FACTOR,
    reason: str | None = None,
    tested: torch.dtype | None = None,
) -> list[Comparison]:
    """Judge several results of one computation by the rule of `compare`.

    The runs of the yardstick are visited once for all results, so that a `Yardstick` that stores no
    results needs the memory of one run. After the first run in a fixed order, a result whose error
    exceeds ``HOPELESS`` times its limit is not judged again, because the errors of the runs in
    further orders have the same distribution.

    Args:
        actual: The results by name.
        oracle: The exact results, of the same names.
        yardstick: The results of the reference, a mapping of the same names.
        factor: As in `compare`.
        reason: As in `compare`.
        tested: As in `compare`.

    Returns:
        The comparison of each result, in the order of `oracle`.

    Raises:
        ValueError: As in `compare`, or if a name is missing in `actual` or in the yardstick.
    """
    _check(factor, reason, *oracle.values())
    for side in (actual, yardstick.library):
        if side.keys() != oracle.keys():
            raise ValueError(f"actual: got {sorted(side)}, allowed: {sorted(oracle)}")
    judged = [
        _Judged(name, actual[name], oracle[name], yardstick.library[name], factor, tested)
        for name in oracle
    ]
    runs = yardstick.in_fixed_orders()
    while open_ones := [each for each in judged if each.is_open]:
        tensors = next(runs, None)
        if tensors is None:
            break
        for each in open_ones:
            each.widen(tensors[each.comparison.name])
    return [each.comparison for each in judged]


class _Judged:
    """A result and its current comparison; each run of the yardstick can raise the limits."""

    def __init__(
        self,
        name: str,
        actual: Tensor,
        oracle: Tensor,
        library: Tensor,
        factor: float,
        tested: torch.dtype | None,
    ) -> None:
        self.name, self.dtype, self.factor = name, dtype_name(actual.dtype), factor
        self.tested = actual.dtype if tested is None else tested
        actual, self.oracle, library = (t.detach().cpu() for t in (actual, oracle, library))
        self.runs = 1
        problem = _problem(actual, self.oracle, library)
        if problem is not None:
            self.comparison = Comparison(name, self.dtype, problem=problem)
            return
        self.floor = _representation(self.oracle, self.tested)
        self.errors = _errors(actual, self.oracle)
        self.limits = _errors(library, self.oracle)
        self.comparison = self._compared()

    @property
    def is_open(self) -> bool:
        """Whether the result has failed, and a further run of the yardstick may let it pass."""
        comparison = self.comparison
        if comparison.passed or comparison.problem is not None:
            return False
        return self.runs == 1 or comparison.is_close

    def widen(self, run: Tensor) -> None:
        """Judge again with a further run of the yardstick, unless the run is not finite."""
        self.runs += 1
        run = run.detach().cpu()
        if bool(torch.isfinite(run).all()):
            more = _errors(run, self.oracle)
            self.limits = max(self.limits[0], more[0]), max(self.limits[1], more[1])
            self.comparison = self._compared()

    def _compared(self) -> Comparison:
        return Comparison(
            self.name,
            self.dtype,
            self.errors[0],
            self.limits[0],
            self.factor * self.limits[0] + rounding(self.oracle, self.tested),
            self.errors[1],
            self.limits[1],
            RMS_FACTOR * max(self.limits[1], self.floor)
            if self.oracle.numel() >= SAMPLE
            else math.inf,
        )


def _check(factor: float, reason: str | None, *oracles: Tensor) -> None:
    if factor > 3.0 or (factor > MAX_FACTOR and not reason):
        raise ValueError(f"factor: got {factor}, allowed: 2, or at most 3 with a reason")
    for oracle in oracles:
        if oracle.dtype != torch.float64:
            raise ValueError(f"oracle: got {oracle.dtype}, allowed: torch.float64")


def _runs(yardstick: Tensor | Yardstick) -> Iterator[Tensor]:
    """Yield the result of the run by torch, and then the results of the runs in fixed orders."""
    if isinstance(yardstick, Tensor):
        yield yardstick
        return
    yield yardstick.library
    yield from yardstick.in_fixed_orders()


def _errors(x: Tensor, oracle: Tensor) -> tuple[float, float]:
    """Return the largest error and the RMS error of `x`."""
    error = (x.double() - oracle).abs()
    return (float(error.max()) if error.numel() else 0.0), _rms(error)


def _representation(oracle: Tensor, dtype: torch.dtype) -> float:
    """Return the RMS error of rounding the oracle to `dtype`.

    The rule replaces a smaller RMS error of the yardstick by this number. The yardstick can be
    exact by luck, as for small integers or a copy, but a result in `dtype` need not be more exact
    than its rounding.
    """
    return _rms(oracle.to(dtype).double() - oracle)


def _problem(actual: Tensor, oracle: Tensor, yardstick: Tensor) -> str | None:
    if actual.shape != oracle.shape:
        return f"shape {tuple(actual.shape)}, expected {tuple(oracle.shape)}"
    if yardstick.dtype != actual.dtype:
        return f"dtype {actual.dtype}, expected {yardstick.dtype}"
    if not bool(torch.isfinite(actual).all()):
        return f"{int((~torch.isfinite(actual)).sum())} elements are not finite"
    return None


def assert_close(
    name: str,
    actual: Tensor,
    oracle: Tensor,
    yardstick: Tensor | Yardstick,
    *,
    factor: float = MAX_FACTOR,
    reason: str | None = None,
) -> Comparison:
    """Judge a result with `compare` and raise if it fails.

    Args:
        name: As in `compare`.
        actual: As in `compare`.
        oracle: As in `compare`.
        yardstick: As in `compare`.
        factor: As in `compare`.
        reason: As in `compare`.

    Returns:
        The comparison, which passed.

    Raises:
        AssertionError: If the result fails. The message states both errors.
        ValueError: As in `compare`.
    """
    comparison = compare(name, actual, oracle, yardstick, factor=factor, reason=reason)
    assert comparison.passed, str(comparison)
    return comparison
