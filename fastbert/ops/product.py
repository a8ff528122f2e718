"""The matrix products of a linear layer and of its gradient, by backend.

The "cpu" backend takes the products from the extension fastbert._C, which can read an fp32 weight
and round it inside a 16-bit product. Under autocast, this backend therefore needs no 16-bit copies
of fp32 parameters, and it returns their gradients in fp32. The other backends use torch's products,
whose operands share one dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastbert.ops import backend as backends
from fastbert.ops.arguments import as_matrix, require, require_same_device, require_shape


def check_parameters(
    columns: int,
    x: Tensor,
    dtype: torch.dtype | None,
    weight_name: str,
    weight: Tensor,
    bias_name: str,
    bias: Tensor | None,
) -> None:
    """Check the shapes, devices and dtypes of weight (N, columns) and of bias (N,) or None.

    Args:
        columns: Number of columns of `x`.
        x: Input of the linear layer. The parameters must be on the device of `x` and, without
            autocast, must have the dtype of `x`.
        dtype: Autocast's dtype, or None without autocast. Under autocast, the parameters may have
            any of the dtypes LOW_PRECISION.
        weight_name: Name of the argument `weight`, for messages.
        weight: Weight of a linear layer.
        bias_name: Name of the argument `bias`, for messages.
        bias: Bias of a linear layer, or None.

    Raises:
        ValueError: If a shape, a device or a dtype is not allowed.
    """
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
    require(weight.dim() == 2, weight_name, shape, f"(N, {columns})")
    require_shape(weight_name, weight, (weight.shape[0], columns))
    require(weight.dtype in allowed, weight_name, weight.dtype, dtypes)
    require_same_device("x", x.device, **{weight_name: weight, bias_name: bias})
    require_shape(bias_name, bias, (weight.shape[0],))
    require(bias.dtype in allowed, bias_name, bias.dtype, dtypes)


def parameters_for(
    backend: str, dtype: torch.dtype, *parameters: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Return the parameters in dtypes that `backend` can multiply by rows of dtype `dtype`."""
    allowed = (dtype, torch.float32) if backend == "cpu" else (dtype,)
    return tuple([p if p is None or p.dtype in allowed else p.to(dtype) for p in parameters])


def needs_gradient(*tensors: Tensor | None) -> bool:
    """Tell whether autograd would record an operation on `tensors`."""
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    return False


def rows_of(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `x` of shape (..., K) as a matrix of K columns in `dtype`, as a view if possible."""
    rows = as_matrix(x)
    return rows if rows.dtype == dtype else rows.to(dtype)


class Products(NamedTuple):
    """The matrix products of one backend, for x (M, K), weight (N, K), and y and dy (M, N).

    Args:
        project: ``project(x, weight, bias)`` returns x Wᵀ + b.
        project_parts: ``project_parts(x, weights, biases)`` returns the results of `project` for
            several weights, side by side along the columns. Either all biases are None or none of
            them is None.
        gradient_of_rows: ``gradient_of_rows(dy, weight, dresidual)`` returns dy W + dresidual, or
            dy W if dresidual is None. The result has the dtype of dresidual if there is one,
            because the residual stream stays in fp32 under autocast.
        gradient_of_weight: ``gradient_of_weight(dy, x, weight)`` returns dyᵀ x in the dtype of
            weight.
        sum_rows: ``sum_rows(dy, dtype)`` returns the sum of dy over its rows, which is the gradient
            (N,) of a bias of dtype `dtype`.
    """

    project: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    project_parts: Callable[[Tensor, Any, Any], Tensor]
    gradient_of_rows: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    gradient_of_weight: Callable[[Tensor, Tensor, Tensor], Tensor]
    sum_rows: Callable[[Tensor, torch.dtype], Tensor]


def _project_parts(x: Tensor, weights: Any, biases: Any) -> Tensor:
    return F.linear(x, torch.cat(weights), None if biases[0] is None else torch.cat(biases))


def _gradient_of_rows(dy: Tensor, weight: Tensor, dresidual: Tensor | None) -> Tensor:
    if dresidual is None:
        return dy @ weight
    if dresidual.dtype != dy.dtype:
        # torch.addmm requires operands of one dtype.
        return dresidual + dy @ weight
    return torch.addmm(dresidual, dy, weight)


def _gradient_of_weight(dy: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    return dy.t() @ x


def _sum_rows(dy: Tensor, dtype: torch.dtype) -> Tensor:
    return dy.sum(dim=0, dtype=dtype)


def _triton_sum_rows(dy: Tensor, dtype: torch.dtype) -> Tensor:
    from fastbert.kernels.reduction import sum_rows

    return sum_rows(dy, dtype)


def _extension_project(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.fastbert_C.linear(x, weight, bias, None, "none", False)[0]


def _extension_project_parts(x: Tensor, weights: Any, biases: Any) -> Tensor:
    given = [] if biases[0] is None else list(biases)
    return torch.ops.fastbert_C.linear_of_parts(x, list(weights), given, "none")


def _extension_gradient_of_rows(dy: Tensor, weight: Tensor, dresidual: Tensor | None) -> Tensor:
    dtype = dy.dtype if dresidual is None else dresidual.dtype
    return torch.ops.fastbert_C.matmul(dy, weight, dresidual, dtype)


def _extension_gradient_of_weight(dy: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    return torch.ops.fastbert_C.matmul(dy.t(), x, None, weight.dtype)


def _extension_sum_rows(dy: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.ops.fastbert_C.sum_rows(dy).to(dtype)


_LIBRARY = Products(F.linear, _project_parts, _gradient_of_rows, _gradient_of_weight, _sum_rows)
PRODUCTS = {
    "reference": _LIBRARY,
    "triton": _LIBRARY._replace(sum_rows=_triton_sum_rows),
    "cuda": _LIBRARY,
    "cpu": Products(
        _extension_project,
        _extension_project_parts,
        _extension_gradient_of_rows,
        _extension_gradient_of_weight,
        _extension_sum_rows,
    ),
}


# torch.compile gets the shapes and dtypes of the results of the extension's operators `linear`,
# `matmul` and `sum_rows` from the functions below.


def _fake_linear(x, weight, bias, residual, activation, save):
    y = x.new_empty(x.shape[0], weight.shape[0])
    return y, torch.empty_like(y) if save else x.new_empty(0)


def _fake_matmul(a, b, addend, dtype):
    return a.new_empty(a.shape[0], b.shape[1], dtype=dtype)


def _fake_sum_rows(x):
    return x.new_empty(x.shape[1], dtype=torch.float32)


if backends.EXTENSION is not None:
    torch.library.register_fake("fastbert_C::sum_rows", _fake_sum_rows)
    torch.library.register_fake("fastbert_C::linear", _fake_linear)
    torch.library.register_fake("fastbert_C::matmul", _fake_matmul)
