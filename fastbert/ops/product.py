"""The matrix products of a linear layer and of its gradient, by backend, and the checks of its
parameters.

The "cpu" backend takes them from fastbert._C, which packs a weight once per version and converts
while it packs: it reads fp32 parameters under autocast as they are, and gives fp32 gradients back,
where the other backends cast first.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fastbert.ops import backend as backends
from fastbert.ops.arguments import require, require_same_device, require_shape


def check_parameters(
    columns: int,
    x: Tensor,
    dtype: torch.dtype | None,
    weight_name: str,
    weight: Tensor,
    bias_name: str,
    bias: Tensor | None,
) -> None:
    """weight (N, columns), bias (N,) or None, on x's device and in its dtype; in any of
    LOW_PRECISION where autocast computes in ``dtype``. Raises ValueError naming the argument."""
    allowed = (x.dtype,) if dtype is None else backends.LOW_PRECISION
    shape = weight.shape
    fits = len(shape) == 2 and shape[1] == columns and weight.dtype in allowed
    fits = fits and weight.device == x.device
    if bias is not None:
        fits = fits and bias.shape == shape[:1] and bias.dtype in allowed
        fits = fits and bias.device == x.device
    if not fits:
        _explain(columns, x, allowed, weight_name, weight, bias_name, bias)


def _explain(columns, x, allowed, weight_name, weight, bias_name, bias):
    dtypes = ", ".join(map(str, allowed)) + (", as x" if len(allowed) == 1 else "")
    shape = f"shape {tuple(weight.shape)}"
    require(weight.dim() == 2, weight_name, shape, f"shape (N, {columns})")
    require_shape(weight_name, weight, (weight.shape[0], columns))
    require(weight.dtype in allowed, weight_name, weight.dtype, dtypes)
    require_same_device("x", x.device, **{weight_name: weight, bias_name: bias})
    require_shape(bias_name, bias, (weight.shape[0],))
    require(bias.dtype in allowed, bias_name, bias.dtype, dtypes)


def parameters_for(
    backend: str, dtype: torch.dtype, *parameters: Tensor | None
) -> tuple[Tensor | None, ...]:
    """The parameters as ``backend`` multiplies them by an x of ``dtype``."""
    kept = (dtype, torch.float32) if backend == "cpu" else (dtype,)
    return tuple([p if p is None or p.dtype in kept else p.to(dtype) for p in parameters])


def needs_gradient(*tensors: Tensor | None) -> bool:
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    return False


def rows_of(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x (..., K) as (M, K) of ``dtype``, itself where it is that."""
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return rows if rows.dtype == dtype else rows.to(dtype)


def runs_directly(backend: str, differentiated: bool) -> bool:
    """Whether an operator's implementation may be called without the operator: nobody
    differentiates or traces, and one sequence on a CPU is over before a detour through the
    dispatcher is."""
    return backend == "cpu" and not differentiated and not torch.compiler.is_compiling()


def project(x: Tensor, weight: Tensor, bias: Tensor | None, backend: str) -> Tensor:
    """x Wᵀ + b, (M, K) → (M, N) in x's dtype."""
    if backend == "cpu":
        return torch.ops.fastbert_C.linear(x, weight, bias, None, "none", False)[0]
    return F.linear(x, weight, bias)


def gradient_of_rows(dy: Tensor, weight: Tensor, dresidual: Tensor | None, backend: str) -> Tensor:
    """dy W + dresidual, (M, N) → (M, K): in dy's dtype, or in dresidual's where there is one, which
    stays in fp32 under autocast."""
    if backend == "cpu":
        dtype = dy.dtype if dresidual is None else dresidual.dtype
        return torch.ops.fastbert_C.matmul(dy, weight, dresidual, dtype)
    if dresidual is None:
        return dy @ weight
    if dresidual.dtype != dy.dtype:  # which no GEMM of the library adds
        return dresidual + dy @ weight
    return torch.addmm(dresidual, dy, weight)


def gradient_of_weight(dy: Tensor, x: Tensor, weight: Tensor, backend: str) -> Tensor:
    """dyᵀ x, (M, N) and (M, K) → (N, K) in the weight's dtype."""
    if backend == "cpu":
        return torch.ops.fastbert_C.matmul(dy.t(), x, None, weight.dtype)
    return dy.t() @ x


# What torch.compile needs to know of the products.


def _fake_linear(x, weight, bias, residual, activation, save):
    y = x.new_empty(x.shape[0], weight.shape[0])
    return y, torch.empty_like(y) if save else x.new_empty(0)


def _fake_matmul(a, b, addend, dtype):
    return a.new_empty(a.shape[0], b.shape[1], dtype=dtype)


if backends.EXTENSION is not None:
    torch.library.register_fake("fastbert_C::linear", _fake_linear)
    torch.library.register_fake("fastbert_C::matmul", _fake_matmul)
