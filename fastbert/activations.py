"""The activation functions of a feed-forward layer, with their names and derivatives."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

# The import of this module must not load torch, because ``fastbert.config`` imports this module.
if TYPE_CHECKING:
    from torch import Tensor


class Activation(NamedTuple):
    """One activation function.

    Attributes:
        name: Name of the activation in ``fastbert.ops``, in the C++ operators and in the launchers
            of the Triton kernels.
        function_name: Value of the Triton kernels' constant ``FUNCTION`` that selects `function`.
        function: The elementwise function, in differentiable PyTorch.
        slope: The derivative of `function`.
        hidden_act: Values of the key ``hidden_act`` in a ``config.json`` that select the
            activation.
        approximate: Value of the argument `approximate` of ``ops.linear_gelu`` that selects the
            activation; "" if the activation is gated.
        gated: Whether `function` is applied to the first half of the columns and the result is
            multiplied by the second half (Shazeer 2020).
    """

    name: str
    function_name: str
    function: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor], Tensor]
    hidden_act: tuple[str, ...]
    approximate: str = ""
    gated: bool = False

    def __call__(self, h: Tensor) -> Tensor:
        """Apply the activation.

        Args:
            h: Tensor of shape ``(..., N)``, or of shape ``(..., 2N)`` if the activation is gated.

        Returns:
            Tensor of shape ``(..., N)``.
        """
        if not self.gated:
            return self.function(h)
        gate, linear = h.chunk(2, dim=-1)
        return self.function(gate) * linear


def _gelu(approximate: str, x: Tensor) -> Tensor:
    from torch.nn import functional

    return functional.gelu(x, approximate=approximate)


def _gelu_slope(approximate: str, x: Tensor) -> Tensor:
    import torch

    return torch.ops.aten.gelu_backward(torch.ones_like(x), x, approximate=approximate)


def _relu(x: Tensor) -> Tensor:
    return x.relu()


def _relu_slope(x: Tensor) -> Tensor:
    # As in torch, the slope at NaN is 1, so that the gradient of a NaN input is not set to 0.
    return (~(x <= 0)).to(x.dtype)


def _silu(x: Tensor) -> Tensor:
    from torch.nn import functional

    return functional.silu(x)


def _silu_slope(x: Tensor) -> Tensor:
    import torch

    return torch.ops.aten.silu_backward(torch.ones_like(x), x)


# Values of the fields `function_name`, `function` and `slope` for exact GELU and GELU with tanh.
_exact = ("gelu", partial(_gelu, "none"), partial(_gelu_slope, "none"))
_tanh = ("gelu_tanh", partial(_gelu, "tanh"), partial(_gelu_slope, "tanh"))

# The activations by name. GELU follows Hendrycks and Gimpel 2016, exact or with tanh.
ACTIVATIONS = {
    activation.name: activation
    for activation in (
        Activation("gelu", *_exact, ("gelu",), approximate="none"),
        Activation("gelu_tanh", *_tanh, ("gelu_new", "gelu_pytorch_tanh"), approximate="tanh"),
        Activation("relu", "relu", _relu, _relu_slope, ("relu",), approximate="relu"),
        Activation("silu", "silu", _silu, _silu_slope, ("silu", "swish"), approximate="silu"),
        Activation("geglu", *_exact, ("gelu",), gated=True),
        Activation("geglu_tanh", *_tanh, ("gelu_new", "gelu_pytorch_tanh"), gated=True),
        Activation("swiglu", "silu", _silu, _silu_slope, ("silu",), gated=True),
    )
}
# The names of the activations that are not gated.
UNGATED = tuple(name for name, activation in ACTIVATIONS.items() if not activation.gated)
# Maps values of the argument `approximate` of ``ops.linear_gelu`` to names of activations.
APPROXIMATIONS = {ACTIVATIONS[name].approximate: name for name in UNGATED}


def of_name(name: str) -> Activation:
    """Return the activation called `name`; raise ValueError if there is none."""
    if name not in ACTIVATIONS:
        raise ValueError(f"activation: got {name!r}, allowed: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def of_config(gated: bool) -> dict[str, Activation]:
    """Map the values of the key ``hidden_act`` in a ``config.json`` to their activations.

    Args:
        gated: Whether the result has the gated activations instead of the ungated activations.
    """
    return {
        hidden_act: activation
        for activation in ACTIVATIONS.values()
        if activation.gated == gated
        for hidden_act in activation.hidden_act
    }
