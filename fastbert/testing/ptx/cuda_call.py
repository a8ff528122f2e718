"""Calls of the launchers of csrc/cuda on CPU tensors, through ctypes."""

from __future__ import annotations

from ctypes import POINTER, Structure, byref, c_float, c_uint32, c_void_p
from typing import Any

import torch
from torch import Tensor

FORMATS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class Dropout(Structure):
    """The struct `Dropout` of csrc/cuda."""

    _fields_ = [("seed", c_void_p), ("threshold", c_uint32), ("scale", c_float)]


def new(*shape: int, dtype: torch.dtype) -> Tensor:
    """Return a tensor full of NaN, which shows the elements that no kernel writes."""
    return torch.full(shape, torch.nan, dtype=dtype)


class Calls:
    """The base of operators that call a library's functions with a params struct.

    Args:
        library: A library with a function ``run_NAME`` for each operator.
    """

    def __init__(self, library: Any) -> None:
        """Store the library."""
        self.library = library
        # The tensors of the next call, which must stay alive until the call returns.
        self.tensors: list[Tensor] = []

    def _call(self, name: str, params: Structure) -> int:
        function = getattr(self.library, name)
        function.argtypes = [POINTER(type(params))]
        status: int = function(byref(params))
        return status

    def _run(self, name: str, params: Structure) -> None:
        status = self._call(name, params)
        self.tensors.clear()
        if status != 0:
            raise RuntimeError(f"{name}: the launcher returned the cudaError {status}")

    def _address(self, t: Tensor) -> int:
        """Return the address of a tensor, which is 0 for an empty tensor, as in torch."""
        self.tensors.append(t)
        return t.data_ptr()

    def _dropout(self, seed: Tensor | None, p: float) -> Dropout:
        if p == 0.0 or seed is None:
            return Dropout(None, 0, 1.0)
        scale = 0.0 if p == 1.0 else 1.0 / (1.0 - p)
        return Dropout(self._address(seed), int(p * 2**24 + 0.5), scale)
