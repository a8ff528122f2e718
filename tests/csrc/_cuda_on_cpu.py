"""csrc/cuda's kernels built for the CPU (see shim/), behind the signatures of the C++ operators."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from ctypes import POINTER, Structure, byref, c_float, c_int32, c_int64, c_uint32, c_void_p
from pathlib import Path

import torch
from torch import Tensor

HERE = Path(__file__).parent
CUDA = HERE.parents[1] / "csrc" / "cuda"
FORMATS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


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


class BiasGeluForward(Structure):
    _fields_ = [("format", c_int32), ("gelu", c_int32), *SHAPE, ("h", Matrix)]
    _fields_ += [("bias", Parameter), ("y", c_void_p)]


class BiasGeluBackward(Structure):
    _fields_ = [("format", c_int32), ("gelu", c_int32), *SHAPE, ("dy", Matrix), ("h", Matrix)]
    _fields_ += [("bias", Parameter)]
    _fields_ += [(name, c_void_p) for name in ("dh", "partial", "dbias")]


def build(folder: Path) -> ctypes.CDLL:
    """Compiles the kernels with g++; undefined behaviour (a misaligned access, say) traps."""
    sources = folder / "sources" / "cuda"
    shutil.copytree(CUDA, sources, ignore=shutil.ignore_patterns("*.cpp"))
    shutil.copy(CUDA.parent / "normal_tail.h", sources.parent)
    shutil.copy(HERE / "shim" / "launch.cuh", sources)
    library = folder / "libkernels.so"
    command = ["g++", "-std=c++17", "-O1", "-ffp-contract=off", "-fPIC", "-shared", "-o", library]
    command += ["-fsanitize=undefined", "-fsanitize-undefined-trap-on-error"]
    command += ["-Wno-unknown-pragmas", "-I", HERE / "shim", "-I", sources, "-x", "c++"]
    command += [*sorted(sources.glob("*.cu")), HERE / "shim" / "shim.cpp"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return ctypes.CDLL(str(library))


def matrix(t: Tensor | None) -> Matrix:
    return Matrix(None, 0) if t is None else Matrix(t.data_ptr(), t.stride(0))


def parameter(t: Tensor | None) -> Parameter:
    return Parameter(None, 0) if t is None else Parameter(t.data_ptr(), FORMATS[t.dtype])


def dropout(seed: Tensor, p: float) -> Dropout:
    if p == 0.0:
        return Dropout(None, 0, 1.0)
    return Dropout(seed.data_ptr(), int(p * 2**24 + 0.5), 0.0 if p == 1.0 else 1.0 / (1.0 - p))


class Operators:
    """The four operators with the arguments of ``torch.ops.fastbert_C``."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library

    def _run(self, name: str, params: Structure) -> None:
        function = getattr(self.library, name)
        function.argtypes = [POINTER(type(params))]
        assert function(byref(params)) == 0

    def layer_norm_forward(self, x, weight, bias, residual, x_bias, seed, dropout_p, eps):
        y = torch.full(x.shape, torch.nan, dtype=x.dtype)
        mean, rstd = torch.full((2, x.shape[0]), torch.nan)
        operands = (matrix(x), matrix(residual), *map(parameter, (weight, bias, x_bias)))
        results = (t.data_ptr() for t in (y, mean, rstd))
        params = (FORMATS[x.dtype], *x.shape, *operands, dropout(seed, dropout_p), eps, *results)
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
        operands = (*map(matrix, (dy, x, residual)), *map(parameter, (weight, x_bias)))
        statistics = (mean.data_ptr(), rstd.data_ptr(), dropout(seed, dropout_p))
        # The address of an empty tensor is null, as in torch.
        results = (t.data_ptr() for t in (dsum, dx, partial, dweight, dbias, dx_bias))
        params = (FORMATS[x.dtype], *x.shape, *operands, *statistics, *results)
        self._run("run_layer_norm_backward", LayerNormBackward(*params))
        return dsum, dx, dweight, dbias, dx_bias

    def bias_gelu_forward(self, h, bias, approximate):
        y = torch.full(h.shape, torch.nan, dtype=h.dtype)
        form = approximate == "tanh"
        operands = (matrix(h), parameter(bias), y.data_ptr())
        params = BiasGeluForward(FORMATS[h.dtype], form, *h.shape, *operands)
        self._run("run_bias_gelu_forward", params)
        return y

    def bias_gelu_backward(self, dy, h, bias, approximate):
        dh = torch.full(h.shape, torch.nan, dtype=h.dtype)
        partial = torch.full((min(h.shape[0], 256), h.shape[1]), torch.nan)
        dbias = torch.full((0,) if bias is None else bias.shape, torch.nan, dtype=h.dtype)
        operands = (matrix(dy), matrix(h), parameter(bias))
        results = (t.data_ptr() for t in (dh, partial, dbias))
        form = approximate == "tanh"
        params = BiasGeluBackward(FORMATS[h.dtype], form, *h.shape, *operands, *results)
        self._run("run_bias_gelu_backward", params)
        return dh, dbias
