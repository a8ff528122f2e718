"""Replace fp32 by float64 in code that asks for fp32, so that a float64 model is an exact oracle.

An oracle is the model in float64 that serves as the exact result. Models compute a softmax, rotary
positions or a loss in fp32, even if their parameters are float64. Without the context of this
module, such a step of the oracle would round to fp32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class InFloat64(TorchFunctionMode):
    """A context in which every request for fp32 is a request for float64.

    A request is the dtype fp32 among the arguments of a function of torch, or a call of
    ``Tensor.float``.

    Examples:
        >>> import torch
        >>> from fastbert.testing.in_float64 import InFloat64
        >>> x = torch.ones(2, dtype=torch.float64)
        >>> with InFloat64():
        ...     x.float().dtype, torch.softmax(x, 0, dtype=torch.float32).dtype
        (torch.float64, torch.float64)
    """

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call the function of torch with float64 instead of fp32."""
        if function is torch.Tensor.float:
            function = torch.Tensor.double
        wide = {name: _wide(value) for name, value in (kwargs or {}).items()}
        return function(*map(_wide, args), **wide)


def _wide(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
