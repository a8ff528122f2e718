"""Calls of the launchers of csrc/cuda on CPU tensors, by ctypes."""

from __future__ import annotations

from ctypes import POINTER, Structure, byref, c_float, c_uint32, c_void_p
from typing import Any

import torch
from torch import Tensor

FORMATS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class Dropout(Structure):
    """Dropout."""

    _fields_ = [("seed", c_void_p), ("threshold", c_uint32), ("scale", c_float)]


def new(*shape: int, dtype: torch.dtype) -> Tensor:
    """Return a tensor full of NaN, so that an element that no kernel writes is seen."""
    return torch.full(shape, torch.nan, dtype=dtype)


class Calls:
    """The base of operators that call a library's functions with a params struct.

    Args:
        library: Has the functions ``run_NAME`` for each operator's name.
    """

    def __init__(self, library: Any) -> None:
        """Keep the library."""
        self.library = library
        # The tensors of the call that is prepared. They stay alive until the call returns.
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
        """Return the address; that of an empty tensor is 0, as in torch."""
        self.tensors.append(t)
        return t.data_ptr()

    def _dropout(self, seed: Tensor | None, p: float) -> Dropout:
        if p == 0.0 or seed is None:
            return Dropout(None, 0, 1.0)
        scale = 0.0 if p == 1.0 else 1.0 / (1.0 - p)
        return Dropout(self._address(seed), int(p * 2**24 + 0.5), scale)
