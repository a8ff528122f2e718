"""The one tolerance rule: tests, ``fastbert check`` and benchmarks all decide with ``compare``.

The oracle is the plain reference in float64 on inputs already rounded to the tested dtype; the
yardstick is the same reference run in the tested dtype. A result passes when

    max error ≤ factor · (yardstick's max error) + a    factor 2; a gradient: 3 with a reason
    RMS error ≤ 1.5 · (yardstick's RMS error)           catches a bias that the maximum misses

with a = 2 · max|oracle + 0.3 − 0.3 − oracle| computed in the tested dtype: what rounding alone can
do. There is no other tolerance anywhere.

The verdict does not depend on the processor. torch's products are more exact on one processor than
on another, so a yardstick that was computed by torch alone may be too exact by luck. A
``Yardstick`` can also run the reference with plain sums, in several orders that are the same on
every processor. A result that fails beside torch's run is judged again beside the plain ones, and
the yardstick's errors are then the largest of all runs: never below those of a plain summation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fastbert.testing.yardstick import Yardstick

MAX_FACTOR = 2.0
RMS_FACTOR = 1.5
# Below this many elements neither an RMS nor a sampled rounding error means anything: one lucky
# rounding of a scalar would decide. The RMS rule then rests, and ``a`` takes its bound instead of
# its sample.
SAMPLE = 64


@dataclass(frozen=True)
class Comparison:
    """Both errors of one tensor, what the rule allows them to be, and the verdict."""

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
        """Max error ÷ the yardstick's max error: 1 is as good as PyTorch in the same dtype."""
        if self.error == 0.0:
            return 0.0
        return self.error / self.yardstick if self.yardstick > 0.0 else math.inf

    @property
    def passed(self) -> bool:
        within = self.error <= self.allowed and self.rms_error <= self.rms_allowed
        return self.problem is None and within

    def __str__(self) -> str:
        verdict = "ok" if self.passed else f"FAILED{f' ({self.problem})' if self.problem else ''}"
        return (
            f"{self.name} [{self.dtype}]: max error {self.error:.3e} (yardstick "
            f"{self.yardstick:.3e}, allowed {self.allowed:.3e}), RMS {self.rms_error:.3e} "
            f"(yardstick {self.rms_yardstick:.3e}, allowed {self.rms_allowed:.3e}): {verdict}"
        )


def rounding(oracle: Tensor, dtype: torch.dtype) -> float:
    """a of the rule: twice the largest |x + 0.3 − 0.3 − x| over ``oracle``, computed in ``dtype``.

    Of few elements: twice what two roundings to nearest can make of it, eps (max|x| + 0.3).
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
    """Judges ``actual`` by the rule; its dtype is the tested one, unless ``tested`` says in which
    narrower one it was computed: the fp32 loss of a 16-bit model.

    The oracle is in float64 and the yardstick in the tested dtype, both of actual's shape. The
    yardstick of a computation with products is a ``Yardstick``, any other may be a tensor.
    ``factor`` above 2 needs a ``reason`` in words and is never above 3. Raises ValueError on a
    misuse of the rule, never on a result.
    """
    if factor > 3.0 or (factor > MAX_FACTOR and not reason):
        raise ValueError(f"factor: got {factor}, allowed: 2, or at most 3 with a reason")
    if oracle.dtype != torch.float64:
        raise ValueError(f"oracle: got {oracle.dtype}, allowed: torch.float64")
    dtype = str(actual.dtype).removeprefix("torch.")
    actual, oracle = (t.detach().cpu() for t in (actual, oracle))
    runs = _runs(yardstick)
    best = next(runs)
    problem = _problem(actual, oracle, best)
    if problem is not None:
        return Comparison(name, dtype, problem=problem)
    tested = actual.dtype if tested is None else tested
    floor = _representation(oracle, tested)
    largest, rms = _errors(actual, oracle)
    limits = _errors(best, oracle)
    while True:
        verdict = Comparison(
            name,
            dtype,
            largest,
            limits[0],
            factor * limits[0] + rounding(oracle, tested),
            rms,
            limits[1],
            RMS_FACTOR * max(limits[1], floor) if oracle.numel() >= SAMPLE else math.inf,
        )
        plain = None if verdict.passed else next(runs, None)
        if plain is None:
            return verdict
        more = _errors(plain, oracle)
        limits = max(limits[0], more[0]), max(limits[1], more[1])


def _runs(yardstick: Tensor | Yardstick) -> Iterator[Tensor]:
    """torch's run, then the finite ones with plain sums."""
    if isinstance(yardstick, Tensor):
        yield yardstick.detach().cpu()
        return
    yield yardstick.library.detach().cpu()
    for plain in yardstick.plain():
        if bool(torch.isfinite(plain).all()):
            yield plain.detach().cpu()


def _errors(x: Tensor, oracle: Tensor) -> tuple[float, float]:
    """The largest error and the RMS error of ``x``."""
    error = (x.double() - oracle).abs()
    return (float(error.max()) if error.numel() else 0.0), _rms(error)


def _representation(oracle: Tensor, dtype: torch.dtype) -> float:
    """RMS error of the oracle merely rounded to ``dtype``: the floor under any yardstick.

    A yardstick can be exact by luck (small integers, a copy); nothing can be asked to beat its
    rounding.
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
    """``compare``, raising AssertionError with both errors when the result fails."""
    comparison = compare(name, actual, oracle, yardstick, factor=factor, reason=reason)
    assert comparison.passed, str(comparison)
    return comparison
