"""The kernels of csrc/cuda, built for the CPU (see shim/), as functions like the C++ operators."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from ctypes import POINTER, Structure, byref, c_float, c_int32, c_int64, c_uint32, c_void_p
from pathlib import Path

import torch
from torch import Tensor

from fastbert.activations import ACTIVATIONS
from fastbert.testing.ptx.cuda_library import CudaLibrary

HERE = Path(__file__).parent
CUDA = HERE.parents[1] / "csrc" / "cuda"
FORMATS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
# The enumeration of csrc/activations.h.
NUMBERS = {name: i for i, name in enumerate(("none", *ACTIVATIONS))}


class Matrix(Structure):
    _fields_ = [("data", c_void_p), ("stride", c_int64)]


class Parameter(Structure):
    _fields_ = [("data", c_void_p), ("format", c_int32)]


class Dropout(Structure):
    _fields_ = [("seed", c_void_p), ("threshold", c_uint32), ("scale", c_float)]


SHAPE = [("rows", c_int64), ("columns", c_int64)]


class LayerNormForward(Structure):
    _fields_ = [("format", c_int32), *SHAPE, ("x", Matrix), ("residual", Matrix)]
    _fields_ += [("weight", Parameter), ("bias", Parameter), ("x_bias", Parameter)]
    _fields_ += [("dropout", Dropout), ("eps", c_float)]
    _fields_ += [(name, c_void_p) for name in ("y", "mean", "rstd")]


class LayerNormBackward(Structure):
    _fields_ = [("format", c_int32), *SHAPE, ("dy", Matrix), ("x", Matrix), ("residual", Matrix)]
    _fields_ += [("weight", Parameter), ("x_bias", Parameter)]
    _fields_ += [("mean", c_void_p), ("rstd", c_void_p), ("dropout", Dropout)]
    _fields_ += [(name, c_void_p) for name in ("dsum", "dx", "partial", "dweight", "dbias")]
    _fields_ += [("dx_bias", c_void_p)]


class ActivationForward(Structure):
    _fields_ = [("format", c_int32), ("activation", c_int32), *SHAPE, ("h", Matrix)]
    _fields_ += [("bias", Parameter), ("y", c_void_p)]


class ActivationBackward(Structure):
    _fields_ = [("format", c_int32), ("activation", c_int32), *SHAPE]
    _fields_ += [("dy", Matrix), ("h", Matrix), ("bias", Parameter)]
    _fields_ += [(name, c_void_p) for name in ("dh", "partial", "dbias")]
    _fields_ += [("dbias_format", c_int32)]


def build(folder: Path) -> ctypes.CDLL:
    """Compile the kernels with g++; undefined behaviour, such as a misaligned access, traps."""
    sources = folder / "sources" / "cuda"
    shutil.copytree(CUDA, sources, ignore=shutil.ignore_patterns("*.cpp"))
    for header in ("activations.h", "normal_tail.h"):
        shutil.copy(CUDA.parent / header, sources.parent)
    shutil.copy(HERE / "shim" / "launch.cuh", sources)
    library = folder / "libkernels.so"
    command = ["g++", "-std=c++17", "-O1", "-ffp-contract=off", "-fPIC", "-shared", "-o", library]
    command += ["-fsanitize=undefined", "-fsanitize-undefined-trap-on-error"]
    command += ["-Wno-unknown-pragmas", "-I", HERE / "shim", "-I", sources, "-x", "c++"]
    command += [*sorted(sources.glob("*.cu")), HERE / "shim" / "shim.cpp"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return ctypes.CDLL(str(library))


class Operators:
    """The four operators with the arguments of ``torch.ops.fastbert_C``."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        self.tensors: list[Tensor] = []  # those of the call that is prepared

    def _run(self, name: str, params: Structure) -> None:
        function = getattr(self.library, name)
        function.argtypes = [POINTER(type(params))]
        assert function(byref(params)) == 0
        self.tensors.clear()

    def _address(self, t: Tensor) -> int:
        """Return the address; that of an empty tensor is 0, as in torch."""
        self.tensors.append(t)
        return t.data_ptr()

    def _matrix(self, t: Tensor | None) -> Matrix:
        return Matrix(None, 0) if t is None else Matrix(self._address(t), t.stride(0))

    def _parameter(self, t: Tensor | None) -> Parameter:
        return Parameter(None, 0) if t is None else Parameter(self._address(t), FORMATS[t.dtype])

    def _dropout(self, seed: Tensor, p: float) -> Dropout:
        if p == 0.0:
            return Dropout(None, 0, 1.0)
        scale = 0.0 if p == 1.0 else 1.0 / (1.0 - p)
        return Dropout(self._address(seed), int(p * 2**24 + 0.5), scale)

    def layer_norm_forward(self, x, weight, bias, residual, x_bias, seed, dropout_p, eps):
        y = torch.full(x.shape, torch.nan, dtype=x.dtype)
        mean, rstd = torch.full((2, x.shape[0]), torch.nan)
        operands = (
            self._matrix(x),
            self._matrix(residual),
            *map(self._parameter, (weight, bias, x_bias)),
        )
        results = (self._address(t) for t in (y, mean, rstd))
        params = (
            FORMATS[x.dtype],
            *x.shape,
            *operands,
            self._dropout(seed, dropout_p),
            eps,
            *results,
        )
        self._run("run_layer_norm_forward", LayerNormForward(*params))
        return y, mean, rstd

    def layer_norm_backward(
        self, dy, x, weight, mean, rstd, residual, x_bias, seed, has_bias, dropout_p
    ):
        dsum, dx = torch.full((2, *x.shape), torch.nan, dtype=x.dtype)
        partial = torch.full((min(x.shape[0], 264), 3, x.shape[1]), torch.nan)
        dweight = torch.full_like(weight, torch.nan)
        dbias = torch.full_like(weight if has_bias else weight[:0], torch.nan)
        dx_bias = torch.full((0,) if x_bias is None else x_bias.shape, torch.nan, dtype=x.dtype)
        operands = (*map(self._matrix, (dy, x, residual)), *map(self._parameter, (weight, x_bias)))
        statistics = (self._address(mean), self._address(rstd), self._dropout(seed, dropout_p))
        results = (self._address(t) for t in (dsum, dx, partial, dweight, dbias, dx_bias))
        params = (FORMATS[x.dtype], *x.shape, *operands, *statistics, *results)
        self._run("run_layer_norm_backward", LayerNormBackward(*params))
        return dsum, dx, dweight, dbias, dx_bias

    def activation_forward(self, h, bias, activation):
        y = torch.full(h.shape, torch.nan, dtype=h.dtype)
        operands = (self._matrix(h), self._parameter(bias), self._address(y))
        params = (FORMATS[h.dtype], NUMBERS[activation], *h.shape, *operands)
        self._run("run_activation_forward", ActivationForward(*params))
        return y

    def activation_backward(self, dy, h, bias, activation, sum_rows, recompute):
        dh = torch.full(h.shape, torch.nan, dtype=h.dtype)
        partial = torch.full((min(h.shape[0], 256), h.shape[1]), torch.nan)
        dbias = torch.full(
            (h.shape[1],), torch.nan, dtype=torch.float32 if bias is None else h.dtype
        )
        operands = (
            self._matrix(dy),
            self._matrix(h),
            self._parameter(bias),
            self._address(dh),
            self._address(partial),
        )
        summed = (self._address(dbias) if sum_rows else None, FORMATS[dbias.dtype])
        params = (FORMATS[h.dtype], NUMBERS[activation], *h.shape, *operands, *summed)
        self._run("run_activation_backward", ActivationBackward(*params))
        a = self.activation_forward(h, bias, activation) if recompute else h.new_empty(0)
        return dh, dbias if sum_rows else h.new_empty(0), a


FRONT = """
#include "feed_forward.cuh"
#include "layer_norm.cuh"
using namespace fastbert::cuda;
extern "C" {
int run_layer_norm_forward(LayerNormForward* p) { return layer_norm_forward(*p, nullptr); }
int run_layer_norm_backward(LayerNormBackward* p) { return layer_norm_backward(*p, nullptr); }
int run_activation_forward(ActivationForward* p) { return activation_forward(*p, nullptr); }
int run_activation_backward(ActivationBackward* p) { return activation_backward(*p, nullptr); }
}
"""


class CompiledOperators(Operators):
    """The operators as nvcc compiles them, on the PTX machine."""

    def __init__(self, folder: Path, arch: str) -> None:
        front = folder / "front.cu"
        front.write_text(FRONT)
        sources = [*sorted(CUDA.glob("*.cu")), front]
        library = CudaLibrary(sources, folder, arch, ["-I", str(CUDA)])
        super().__init__(library.functions)
        self.compiled = library

    def _run(self, name: str, params: Structure) -> None:
        assert self.compiled.call(name, byref(params), memory=self.tensors) == 0
        self.tensors.clear()
