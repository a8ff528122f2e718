"""One encoder layer in training as one autograd function, computed by kernels for GPUs.

If the operations of a layer are called separately, a short batch takes more time on the host than
on the GPU. `gpu_layer` is used only if nothing observes the operators (see `register.is_watched`).
If something observes them, such as a profiler, the operations run one by one, and the results have
the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastbert.ops.layer_parts import Parts, launchers
from fastbert.ops.layer_weights import OF_PRODUCTS, PARAMETERS
from fastbert.ops.register import first_derivative, without_autocast

# The number of fields of ``fastbert.kernels.layer.Inputs``.
INPUTS = 6


def gpu_layer(
    hidden: Tensor,
    parameters: Sequence[Tensor],
    inputs: tuple[Tensor | None, ...],
    shape: tuple[Any, ...],
    parts: Parts,
) -> Tensor:
    """Run a layer on rows; the result is differentiable once.

    The caller must have chosen the backends and checked the tensors.

    Args:
        hidden: Rows of shape ``(T, H)``, in the dtype of the products or in fp32.
        parameters: The parameters of the layer, in the order of ``ops.encoder``.
        inputs: The fields of ``fastbert.kernels.layer.Inputs``.
        shape: The fields of ``fastbert.kernels.layer.LayerShape``.
        parts: The backends of attention, feed-forward and layer norm.

    Returns:
        The output rows of the layer, in the shape and dtype of `hidden`.
    """
    return _GpuLayer.apply(shape, parts, inputs, hidden, *parameters)


def _copies(parameters: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return all parameters; the parameters of products are converted to `dtype` in one call."""
    tensors = list(parameters)
    places = [i for i in OF_PRODUCTS if parameters[i].dtype != dtype]
    if places:
        copies = [torch.empty_like(parameters[i], dtype=dtype) for i in places]
        torch._foreach_copy_(copies, [parameters[i] for i in places])
        for i, copy in zip(places, copies, strict=True):
            tensors[i] = copy
    return tensors


@without_autocast
def _forward(
    hidden: Tensor,
    ctx: Any,
    shape: tuple[Any, ...],
    parts: Parts,
    inputs: tuple[Tensor | None, ...],
    given: tuple[Tensor, ...],
) -> Tensor:
    from fastbert.kernels.layer import Inputs, LayerShape, layer_forward

    ctx.shape, ctx.launchers = LayerShape(*shape), launchers(parts)
    parameters = _copies(given, ctx.shape.dtype)
    rows = hidden if hidden.is_contiguous() else hidden.contiguous()
    y, saved = layer_forward(rows, parameters, Inputs(*inputs), ctx.shape, ctx.launchers)
    ctx.dtypes = [p.dtype for p in given]
    ctx.save_for_backward(*inputs, *parameters, *saved)
    return y


@without_autocast
def _backward(dy: Tensor, ctx: Any) -> list[Tensor | None]:
    from fastbert.kernels.layer import Inputs, Saved, layer_backward

    tensors, last = ctx.saved_tensors, INPUTS + PARAMETERS
    inputs, saved = Inputs(*tensors[:INPUTS]), Saved(*tensors[last:])
    needs = ctx.needs_input_grad[3:]
    dhidden, *dparameters = layer_backward(
        dy, tensors[INPUTS:last], inputs, saved, ctx.shape, needs, ctx.launchers
    )
    gradients = [dhidden if needs[0] else None]
    for gradient, needed, dtype in zip(dparameters, needs[1:], ctx.dtypes, strict=True):
        # Under autocast, the gradient of a product's parameter has autocast's dtype, and is
        # converted here to the dtype of the parameter.
        wanted = gradient if needed else None
        gradients.append(wanted if wanted is None or wanted.dtype == dtype else wanted.to(dtype))
    return gradients


class _GpuLayer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        shape: tuple[Any, ...],
        parts: Parts,
        inputs: tuple[Tensor | None, ...],
        hidden: Tensor,
        *parameters: Tensor,
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        return _forward(hidden, ctx, shape, parts, inputs, parameters)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return (None, None, None, *_backward(dy, ctx))
