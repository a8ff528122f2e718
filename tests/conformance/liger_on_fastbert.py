"""A pytest plugin that replaces Liger's kernels by fastbert's operations.

Liger's tests compare a module of Liger with a module of transformers or torch, and a function with
Liger's own module. With this plugin, the modules run the backend that the environment names, and
the functions of ``liger_kernel.transformers.functional`` run the reference. A test of an option
that fastbert does not offer is skipped, and the skip message gives the reason.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from fastbert import ops

BACKEND = os.environ["CONFORMANCE_BACKEND"]


def not_offered(**values: Any) -> None:
    """Skip the test if a value is true: fastbert does not have the options of these names."""
    for name, value in values.items():
        if value:
            pytest.skip(f"{name}: got {value!r}, not offered")


def layer_norm(backend: str, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return ops.layer_norm(x, weight, bias, eps=eps, backend=backend)


def rms_norm(
    backend: str, x: Tensor, weight: Tensor, eps: float, offset: float = 0.0, *ways: Any
) -> Tensor:
    """Call fastbert's operation; ignore `ways`, which say where to round and write gradients."""
    not_offered(offset=offset, no_weight=weight is None)
    return ops.rms_norm(x, weight, eps=eps, backend=backend)


def rope(
    backend: str, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *places: Any
) -> tuple[Tensor, ...]:
    """Rotate q ``(B, H, T, D)`` and k; both halves of cos and sin ``(1 or B, T, D)`` are equal."""
    batch, heads, tokens, dim = q.shape
    not_offered(odd_head_dim=dim % 2, rotated_part_of_a_head=cos.shape[-1] < dim)
    both = torch.cat([q, k], dim=1).transpose(1, 2).reshape(batch * tokens, -1, dim)
    halves = (
        t[..., : dim // 2].float().expand(batch, tokens, -1).reshape(batch * tokens, -1)
        for t in (cos, sin)
    )
    rotated = ops.rotary(both, *halves, heads=both.shape[1], backend=backend)
    return rotated.view(batch, tokens, -1, dim).transpose(1, 2).split([heads, k.shape[1]], dim=1)


def linear_cross_entropy(
    backend: str, hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None,
    ce_weight: Tensor | None = None, ignore_index: int = -100, lse_square_scale: float = 0.0,
    label_smoothing: float = 0.0, reduction: str = "mean", softcap: float | None = None,
    return_z_loss: bool = False, accum_dtype: Any = None, use_token_scaling: bool = False,
    return_token_accuracy: bool = False, return_predicted_tokens: bool = False, *parallel: Any,
) -> tuple[Tensor, None, None, None]:  # fmt: skip
    not_offered(
        class_weights=ce_weight is not None, lse_square_scale=lse_square_scale,
        label_smoothing=label_smoothing, softcap=softcap, return_z_loss=return_z_loss,
        use_token_scaling=use_token_scaling, return_token_accuracy=return_token_accuracy,
        return_predicted_tokens=return_predicted_tokens, parallel=any(parallel),
    )  # fmt: skip
    options = {"ignore_index": ignore_index, "reduction": reduction, "backend": backend}
    # Liger's loss has the dtype of the logits, so the result is converted to this dtype.
    loss = ops.linear_cross_entropy(hidden, weight, bias, target, **options)
    return loss.to(hidden.dtype), None, None, None


class Served:
    """A function with the interface of an ``autograd.Function``."""

    def __init__(self, function: Any, backend: str) -> None:
        self.apply = partial(function, backend)


OPERATIONS = {
    "LigerLayerNormFunction": layer_norm,
    "LigerRMSNormFunction": rms_norm,
    "LigerRopeFunction": rope,
    "LigerFusedLinearCrossEntropyFunction": linear_cross_entropy,
}


def replace() -> None:
    """Replace `OPERATIONS` in every module of Liger that imports them, and Liger's SwiGLU."""
    from liger_kernel.transformers import functional, swiglu

    for module in [m for name, m in sys.modules.items() if name.startswith("liger_kernel")]:
        for name in OPERATIONS.keys() & vars(module).keys():
            backend = "reference" if module is functional else BACKEND
            setattr(module, name, Served(OPERATIONS[name], backend))

    def feed_forward(self: Any, x: Tensor) -> Tensor:
        first = torch.cat([self.gate_proj.weight, self.up_proj.weight])
        second = self.down_proj.weight
        return ops.feed_forward(x, first, None, second, None, activation="swiglu", backend=BACKEND)

    swiglu.LigerSwiGLUMLP.forward = feed_forward


replace()
