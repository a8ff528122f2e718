"""Whether the backend "cuda" applies an activation inside a matrix product or after the product.

The CUDA C++ kernels read both operands of a product in place, 16 bytes at a time, and apply the
activation in the epilogue. The cuBLAS library computes any product that the kernels cannot compute,
and a separate kernel then applies the activation. In both cases, the pre-activation is rounded to
the dtype of the operands before the activation, as in PyTorch.

cuBLAS also computes the products without an activation: the second product of a feed-forward, whose
bias cuBLASLt adds in the epilogue, and the gradients of the input and of the weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

# The number of bytes that the kernels read with one access.
ACCESS = 16
# For each product of a feed-forward, the reason why cuBLAS always computes the product. None marks
# a product with an activation, for which `library_reason` decides.
PRODUCTS: dict[str, str | None] = {
    "gelu(x W1ᵀ + b1)": None,
    "(dy W2) gelu'(h)": None,
    "gelu(h) W2ᵀ + b2": "it has no activation, and cuBLASLt adds the bias in its epilogue",
    "dh W1, dhᵀ x, dyᵀ gelu(h)": "it has no epilogue",
}


def library_reason(left: Tensor, weight: Tensor, bias: Tensor | None) -> str | None:
    """Return the reason why cuBLAS computes a product of the backend "cuda".

    The result is None if a CUDA C++ kernel computes the product.

    Args:
        left: Left operand of shape ``(M, K)``.
        weight: Right operand of shape ``(N, K)`` or ``(K, N)``.
        bias: Bias of shape ``(N,)`` in the dtype of the operands, or None.

    Examples:
        >>> import torch
        >>> from fastbert.ops.fused_products import library_reason
        >>> x, weight = torch.empty(8, 30).half(), torch.empty(64, 30).half()
        >>> library_reason(x, weight, None)
        'the weight has the shape (64, 30), not of multiples of 8'
    """
    if left.dtype == torch.float32:
        return "fp32 products in IEEE have no matrix units"
    if weight.numel() == 0:
        return "the weight is empty"
    # Both sizes must be multiples of 8: the size along K, and the number of columns of the result.
    for size in weight.shape:
        if 2 * size % ACCESS:
            return f"the weight has the shape {tuple(weight.shape)}, not of multiples of 8"
    for name, operand in (("left operand", left), ("weight", weight)):
        step, unit = operand.stride()
        if unit != 1 or step <= 0 or 2 * step % ACCESS:
            return f"the {name} has the strides {step} and {unit}"
    for operand in (left, weight, bias):
        if operand is not None and operand.data_ptr() % ACCESS:
            return "an address is not a multiple of 16"
    if bias is not None and not bias.is_contiguous():
        return "the bias is not contiguous"
    return None
