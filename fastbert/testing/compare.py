"""The one tolerance rule: tests, ``fastbert check`` and benchmarks all decide with ``compare``.

The oracle is the plain reference in float64 on inputs already rounded to the tested dtype; the
yardstick is the same reference run in the tested dtype. A result passes when

    max error ≤ factor · (yardstick's max error) + a    factor 2; a gradient: 3 with a reason
    RMS error ≤ 1.5 · (yardstick's RMS error)           catches a bias that the maximum misses

with a = 2 · max|oracle + 0.3 − 0.3 − oracle| computed in the tested dtype: what rounding alone can
do. There is no other tolerance anywhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

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
    yardstick: Tensor,
    *,
    factor: float = MAX_FACTOR,
    reason: str | None = None,
    tested: torch.dtype | None = None,
) -> Comparison:
    """Judges ``actual`` by the rule; its dtype is the tested one, unless ``tested`` says in which
    narrower one it was computed: the fp32 loss of a 16-bit model.

    oracle float64 and yardstick in the tested dtype, both of actual's shape. ``factor`` above 2
    needs a ``reason`` in words and is never above 3. Raises ValueError on a misuse of the rule,
    never on a result.
    """
    if factor > 3.0 or (factor > MAX_FACTOR and not reason):
        raise ValueError(f"factor: got {factor}, allowed: 2, or at most 3 with a reason")
    if oracle.dtype != torch.float64:
        raise ValueError(f"oracle: got {oracle.dtype}, allowed: torch.float64")
    dtype = str(actual.dtype).removeprefix("torch.")
    actual, oracle, yardstick = (t.detach().cpu() for t in (actual, oracle, yardstick))
    problem = _problem(actual, oracle, yardstick)
    if problem is not None:
        return Comparison(name, dtype, problem=problem)
    error, best = (actual.double() - oracle).abs(), (yardstick.double() - oracle).abs()
    largest, limit = (float(e.max()) if e.numel() else 0.0 for e in (error, best))
    tested = actual.dtype if tested is None else tested
    rms_allowed = RMS_FACTOR * max(_rms(best), _representation(oracle, tested))
    return Comparison(
        name,
        dtype,
        largest,
        limit,
        factor * limit + rounding(oracle, tested),
        _rms(error),
        _rms(best),
        rms_allowed if oracle.numel() >= SAMPLE else math.inf,
    )


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
    yardstick: Tensor,
    *,
    factor: float = MAX_FACTOR,
    reason: str | None = None,
) -> Comparison:
    """``compare``, raising AssertionError with both errors when the result fails."""
    comparison = compare(name, actual, oracle, yardstick, factor=factor, reason=reason)
    assert comparison.passed, str(comparison)
    return comparison
