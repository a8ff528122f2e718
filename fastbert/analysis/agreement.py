"""Rank correlations of numbers, and distances between probability distributions."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def ranks(x: Tensor) -> Tensor:
    """Return the ranks of numbers from 1; equal numbers share the mean of their ranks.

    Args:
        x: Numbers of shape ``(N,)``.

    Returns:
        Ranks of shape ``(N,)``, float64.
    """
    smaller = (x[None, :] < x[:, None]).sum(1)
    equal = (x[None, :] == x[:, None]).sum(1)
    return smaller.double() + (equal.double() + 1) / 2


def _check(x: Tensor, y: Tensor) -> None:
    if x.dim() != 1 or x.shape != y.shape:
        raise ValueError(
            f"x and y: got the shapes {tuple(x.shape)} and {tuple(y.shape)}, allowed: (N,) twice"
        )


def spearman(x: Tensor, y: Tensor) -> float:
    """Compute Spearman's rank correlation; equal numbers share the mean of their ranks.

    Args:
        x: Numbers of shape ``(N,)``.
        y: Numbers of shape ``(N,)``.

    Returns:
        The correlation, or NaN if N is below 2, or if all numbers of `x` or of `y` are equal.

    Raises:
        ValueError: If `x` is not one-dimensional, or if `y` has another shape.

    Examples:
        >>> import torch
        >>> from fastbert.analysis import spearman
        >>> spearman(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([10.0, 30.0, 20.0]))
        0.5
    """
    _check(x, y)
    a, b = (r - r.mean() for r in (ranks(x), ranks(y)))
    scale = math.sqrt(float(a.square().sum() * b.square().sum()))
    return float((a * b).sum()) / scale if scale else math.nan


def kendall(x: Tensor, y: Tensor) -> float:
    """Compute Kendall's rank correlation τ-b, which corrects for ties.

    Args:
        x: Numbers of shape ``(N,)``.
        y: Numbers of shape ``(N,)``.

    Returns:
        The correlation, or NaN if N is below 2, or if all numbers of `x` or of `y` are equal.

    Raises:
        ValueError: If `x` is not one-dimensional, or if `y` has another shape.

    Note:
        Kendall 1945. Jain and Wallace 2019 compare attention and gradients by this correlation.
    """
    _check(x, y)
    a, b = ((z[:, None] - z[None, :]).sign().double() for z in (x, y))
    scale = math.sqrt(float(a.abs().sum() * b.abs().sum()))
    return float((a * b).sum()) / scale if scale else math.nan


def total_variation(p: Tensor, q: Tensor) -> Tensor:
    """Compute the total variation distance ``½ Σ |p − q|``, from 0 to 1.

    Args:
        p: Distributions over the last dimension, of shape ``(…, N)``.
        q: Distributions of a shape that broadcasts with `p`.

    Returns:
        Distances of shape ``(…)``.
    """
    return 0.5 * (p - q).abs().sum(-1)


def jensen_shannon(p: Tensor, q: Tensor) -> Tensor:
    """Compute the Jensen-Shannon divergence in nats, from 0 to ``ln 2`` = 0.693.

    The divergence is the mean of two relative entropies: of `p` and of `q` to their average. An
    entry of 0 in `p` or `q` adds exactly 0, with a gradient of 0, to its relative entropy.

    Args:
        p: Distributions over the last dimension, of shape ``(…, N)``.
        q: Distributions of a shape that broadcasts with `p`.

    Returns:
        Divergences of shape ``(…)``.

    Examples:
        >>> import torch
        >>> from fastbert.analysis import jensen_shannon
        >>> p, q = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
        >>> round(jensen_shannon(p, q).item(), 4), jensen_shannon(p, p).item()
        (0.6931, 0.0)
    """
    middle = 0.5 * (p + q)
    return 0.5 * (_relative_entropy(p, middle) + _relative_entropy(q, middle))


def _relative_entropy(p: Tensor, q: Tensor) -> Tensor:
    """Compute ``Σ p ln(p / q)`` for a `q` that is not 0 where `p` is not 0."""
    # The logarithm of 0 must not be computed, because 0 · ∞ would make the gradient NaN.
    there = p > 0
    safe_p, safe_q = torch.where(there, p, 1.0), torch.where(there, q, 1.0)
    return torch.where(there, p * (safe_p.log() - safe_q.log()), 0.0).sum(-1)
