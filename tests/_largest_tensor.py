"""The size of the largest tensor that a computation makes or keeps for its backward."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class LargestTensor(TorchDispatchMode):
    """Record the size of the largest memory behind a tensor that an operator returns.

    Attributes:
        elements: The size, in elements of fp32.
    """

    elements = 0

    def see(self, x: Any) -> Any:
        if isinstance(x, Tensor):
            self.elements = max(self.elements, x.untyped_storage().nbytes() // 4)
        return x

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function.namespace == "fastbert":
            # The implementation is Python, whose operators are recorded too.
            device = next(x.device.type for x in args if isinstance(x, Tensor))
            key = getattr(torch._C.DispatchKey, device.upper())
            with self:
                found = function.redispatch(torch._C.DispatchKeySet(key), *args, **kwargs)
        else:
            found = function(*args, **kwargs)
        for x in found if isinstance(found, (tuple, list)) else [found]:
            self.see(x)
        return found


@contextlib.contextmanager
def largest_tensor() -> Iterator[LargestTensor]:
    """Record the results of operators, and the tensors that autograd keeps, in a with block."""
    mode = LargestTensor()
    with mode, torch.autograd.graph.saved_tensors_hooks(mode.see, lambda x: x):
        yield mode
