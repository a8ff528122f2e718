"""The CUDA C++ operators on CPU tensors, through ctypes and the launchers of csrc/cuda.

On a GPU, csrc/cuda/cuda_ops.cpp fills the params structs and calls the launchers. `Operators` does
the same with a shared library. In `CompiledOperators`, nvcc has compiled the launchers and the
kernels, and the kernels run on the PTX machine.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from ctypes import Structure, byref, c_float, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from fastbert.activations import ACTIVATIONS
from fastbert.ops import backend as backends
from fastbert.testing.ptx import nvcc
from fastbert.testing.ptx.cuda_attention import AttentionOperators
from fastbert.testing.ptx.cuda_call import FORMATS, Dropout, new
from fastbert.testing.ptx.cuda_library import CudaLibrary
from fastbert.testing.ptx.triton_launches import STAND_IN

CUDA = Path(__file__).resolve().parents[3] / "csrc" / "cuda"
NAMES = (
    "layer_norm_forward", "layer_norm_backward", "activation_forward", "activation_backward",
    "linear_gelu_forward", "linear_gelu_gradient", "flash_attention_forward",
    "flash_attention_backward", "mask_places",
)  # fmt: skip
# Name of an activation → its value in the enumeration of csrc/activations.h.
NUMBERS = {name: i for i, name in enumerate(("none", *ACTIVATIONS))}


# The structs of the headers operands, layer_norm, feed_forward, gemm and varlen in csrc/cuda


class Matrix(Structure):
    """The struct `ConstMatrix` of csrc/cuda."""

    _fields_ = [("data", c_void_p), ("stride", c_int64)]


class Parameter(Structure):
    """The struct `Parameter` of csrc/cuda."""

    _fields_ = [("data", c_void_p), ("format", c_int32)]


SHAPE = [("rows", c_int64), ("columns", c_int64)]


class LayerNormForward(Structure):
    """The struct `LayerNormForward` of csrc/cuda."""

    _fields_ = [("format", c_int32), *SHAPE, ("x", Matrix), ("residual", Matrix)]
    _fields_ += [("weight", Parameter), ("bias", Parameter), ("x_bias", Parameter)]
    _fields_ += [("dropout", Dropout), ("eps", c_float)]
    _fields_ += [(name, c_void_p) for name in ("y", "mean", "rstd")]


class LayerNormBackward(Structure):
    """The struct `LayerNormBackward` of csrc/cuda."""

    _fields_ = [("format", c_int32), *SHAPE, ("dy", Matrix), ("x", Matrix), ("residual", Matrix)]
    _fields_ += [("weight", Parameter), ("x_bias", Parameter)]
    _fields_ += [("mean", c_void_p), ("rstd", c_void_p), ("dropout", Dropout)]
    _fields_ += [(name, c_void_p) for name in ("dsum", "dx", "partial", "dweight", "dbias")]
    _fields_ += [("dx_bias", c_void_p)]


class ActivationForward(Structure):
    """The struct `ActivationForward` of csrc/cuda."""

    _fields_ = [("format", c_int32), ("activation", c_int32), *SHAPE, ("h", Matrix)]
    _fields_ += [("bias", Parameter), ("y", c_void_p)]


class ActivationBackward(Structure):
    """The struct `ActivationBackward` of csrc/cuda."""

    _fields_ = [("format", c_int32), ("activation", c_int32), *SHAPE]
    _fields_ += [("dy", Matrix), ("h", Matrix), ("bias", Parameter)]
    _fields_ += [(name, c_void_p) for name in ("dh", "partial", "dbias")]
    _fields_ += [("dbias_format", c_int32)]


class LinearGelu(Structure):
    """The struct `LinearGelu` of csrc/cuda."""

    _fields_ = [("format", c_int32), ("activation", c_int32), *SHAPE, ("depth", c_int64)]
    _fields_ += [("x", Matrix), ("weight", Matrix)]
    _fields_ += [(name, c_void_p) for name in ("bias", "y", "h")]


class LinearGeluGradient(Structure):
    """The struct `LinearGeluGradient` of csrc/cuda."""

    _fields_ = [("format", c_int32), ("activation", c_int32), *SHAPE, ("depth", c_int64)]
    _fields_ += [("dy", Matrix), ("weight", Matrix)]
    _fields_ += [(name, c_void_p) for name in ("h", "dh", "a", "partial", "dbias")]


class MaskPlaces(Structure):
    """The struct `MaskPlaces` of csrc/cuda."""

    _fields_ = [("mask", c_void_p), ("element_size", c_int32)]
    _fields_ += [(name, c_int64) for name in ("batch", "length", "stride_row", "stride_column")]
    _fields_ += [(name, c_void_p) for name in ("indices", "rows", "cu_seqlens", "totals")]


def _unit_columns(t: Tensor | None) -> Tensor | None:
    return t if t is None or t.stride(1) == 1 else t.contiguous()


def _readable(t: Tensor | None) -> Tensor | None:
    """Return a parameter in a format that the kernels read; float64 becomes fp32."""
    return None if t is None else (t.float() if t.dtype == torch.float64 else t).contiguous()


class Operators(AttentionOperators):
    """The operators with the arguments of ``torch.ops.fastbert_C``.

    Args:
        library: A library with a function ``run_NAME`` for each operator, as ``FRONT`` defines
            them.
    """

    def _matrix(self, t: Tensor | None) -> Matrix:
        t = _unit_columns(t)
        return Matrix(None, 0) if t is None else Matrix(self._address(t), t.stride(0))

    def _parameter(self, t: Tensor | None) -> Parameter:
        t = _readable(t)
        return Parameter(None, 0) if t is None else Parameter(self._address(t), FORMATS[t.dtype])

    def layer_norm_forward(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None,
        x_bias: Tensor | None, seed: Tensor | None, dropout_p: float, eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Return y (rows, columns) in the dtype of x, and mean and rstd (rows,) in fp32."""
        y = new(*x.shape, dtype=x.dtype)
        mean, rstd = (new(x.shape[0], dtype=torch.float32) for _ in range(2))
        matrices = map(self._matrix, (x, residual))
        parameters = map(self._parameter, (weight, bias, x_bias))
        results = map(self._address, (y, mean, rstd))
        params = (FORMATS[x.dtype], *x.shape, *matrices, *parameters)
        self._run(
            "run_layer_norm_forward",
            LayerNormForward(*params, self._dropout(seed, dropout_p), eps, *results),
        )
        return y, mean, rstd

    def layer_norm_backward(
        self, dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor,
        residual: Tensor | None, x_bias: Tensor | None, seed: Tensor | None, has_bias: bool,
        dropout_p: float,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        """Return dsum, dx, dweight, dbias and dx_bias.

        dsum is the gradient of the sum that is normalized. Without dropout, dx is empty, because it
        is equal to dsum. Without a bias or an x_bias, the gradient of this argument is empty.
        """
        columns = x.shape[1]
        kind = _wide(weight.dtype)
        dsum = new(*x.shape, dtype=x.dtype)
        dx = new(*x.shape, dtype=x.dtype) if dropout_p > 0.0 else x.new_empty(0)
        partial = new(min(x.shape[0], 264), 3, columns, dtype=torch.float32)
        dweight = new(columns, dtype=kind)
        dbias = new(columns if has_bias else 0, dtype=kind)
        x_bias_kind = torch.float32 if x_bias is None else _wide(x_bias.dtype)
        dx_bias = new(0 if x_bias is None else columns, dtype=x_bias_kind)
        operands = (*map(self._matrix, (dy, x, residual)), *map(self._parameter, (weight, x_bias)))
        statistics = (*map(self._address, (mean.contiguous(), rstd.contiguous())),)
        results = map(self._address, (dsum, dx, partial, dweight, dbias, dx_bias))
        params = (FORMATS[x.dtype], *x.shape, *operands, *statistics)
        self._run(
            "run_layer_norm_backward",
            LayerNormBackward(*params, self._dropout(seed, dropout_p), *results),
        )
        if x_bias is not None:
            dx_bias = dx_bias.to(x_bias.dtype)
        return dsum, dx, dweight.to(weight.dtype), dbias.to(weight.dtype), dx_bias

    def activation_forward(self, h: Tensor, bias: Tensor | None, activation: str) -> Tensor:
        """Return activation(h + bias) in the dtype of h."""
        y = new(*h.shape, dtype=h.dtype)
        operands = (self._matrix(h), self._parameter(bias), self._address(y))
        params = (FORMATS[h.dtype], NUMBERS[activation], *h.shape, *operands)
        self._run("run_activation_forward", ActivationForward(*params))
        return y

    def activation_backward(
        self, dy: Tensor, h: Tensor, bias: Tensor | None, activation: str, sum_rows: bool,
        recompute: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Return dh, the sum of dh over the rows, and activation(h + bias).

        Without `sum_rows`, the sum is empty. Without `recompute`, the activation is empty.
        """
        rows, columns = h.shape
        kind = torch.float32 if bias is None else _wide(bias.dtype)
        dh = new(rows, columns, dtype=h.dtype)
        partial = new(min(rows, 256) if sum_rows else 0, columns, dtype=torch.float32)
        dbias = new(columns, dtype=kind) if sum_rows else h.new_empty(0)
        operands = (*map(self._matrix, (dy, h)), self._parameter(bias))
        results = (self._address(dh), self._address(partial), self._address(dbias))
        params = (FORMATS[h.dtype], NUMBERS[activation], rows, columns, *operands, *results)
        self._run("run_activation_backward", ActivationBackward(*params, FORMATS[dbias.dtype]))
        a = self.activation_forward(h, bias, activation) if recompute else h.new_empty(0)
        return dh, dbias.to(bias.dtype) if sum_rows and bias is not None else dbias, a

    def linear_gelu_forward(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, save: bool
    ) -> tuple[Tensor, Tensor]:
        """Return y = activation(x weightᵀ + bias) (rows, columns), and the pre-activation h.

        h contains the bias; without `save`, it is empty.
        """
        shape = x.shape[0], weight.shape[0]
        y = new(*shape, dtype=x.dtype)
        h = new(*shape, dtype=x.dtype) if save else x.new_empty(0)
        tensors = (None if t is None else self._address(t) for t in (bias, y, h if save else None))
        operands = (self._matrix(x), self._matrix(weight), *tensors)
        params = (FORMATS[x.dtype], NUMBERS[activation], *shape, x.shape[1], *operands)
        self._run("run_linear_gelu", LinearGelu(*params))
        return y, h

    def linear_gelu_gradient(
        self, dy: Tensor, weight: Tensor, h: Tensor, activation: str, sum_rows: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return dh = (dy weight) activation'(h), its sum over the rows, and activation(h).

        The sum has the dtype of dy; without `sum_rows`, it is empty.
        """
        (rows, depth), columns = dy.shape, weight.shape[1]
        dh, a = (new(rows, columns, dtype=dy.dtype) for _ in range(2))
        partial = new((rows + 127) // 128 if sum_rows else 0, columns, dtype=torch.float32)
        dbias = new(columns, dtype=dy.dtype) if sum_rows else dy.new_empty(0)
        tensors = map(self._address, (h.contiguous(), dh, a, partial, dbias))
        operands = (self._matrix(dy), self._matrix(weight), *tensors)
        params = (FORMATS[dy.dtype], NUMBERS[activation], rows, columns, depth, *operands)
        self._run("run_linear_gelu_gradient", LinearGeluGradient(*params))
        return dh, dbias, a

    def mask_places(
        self, mask: Tensor, with_padding: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return indices, rows, cu_seqlens, and a tensor (number of tokens, longest length).

        Without `with_padding`, rows is empty.
        """
        places, unwritten = mask.numel(), -(1 << 30)
        sizes = (places, places if with_padding else 0, mask.shape[0] + 1, 2)
        dtypes = (torch.int64, torch.int64, torch.int32, torch.int32)
        indices, rows, cu_seqlens, totals = (
            torch.full((size,), unwritten, dtype=dtype)
            for size, dtype in zip(sizes, dtypes, strict=True)
        )
        results = map(self._address, (indices, rows, cu_seqlens, totals))
        shape = (mask.itemsize, *mask.shape, *mask.stride())
        self._run("run_mask_places", MaskPlaces(self._address(mask), *shape, *results))
        return indices, rows, cu_seqlens, totals


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype == torch.float64 else dtype


FRONT = """
#include "attention.cuh"
#include "feed_forward.cuh"
#include "gemm.cuh"
#include "layer_norm.cuh"
#include "varlen.cuh"
using namespace fastbert::cuda;
extern "C" {
int run_layer_norm_forward(LayerNormForward* p) { return layer_norm_forward(*p, nullptr); }
int run_layer_norm_backward(LayerNormBackward* p) { return layer_norm_backward(*p, nullptr); }
int run_activation_forward(ActivationForward* p) { return activation_forward(*p, nullptr); }
int run_activation_backward(ActivationBackward* p) { return activation_backward(*p, nullptr); }
int run_linear_gelu(LinearGelu* p) { return linear_gelu(*p, nullptr); }
int run_linear_gelu_gradient(LinearGeluGradient* p) { return linear_gelu_gradient(*p, nullptr); }
int run_attention_forward(AttentionForward* p) { return attention_forward(*p, nullptr); }
int run_attention_backward(AttentionBackward* p) { return attention_backward(*p, nullptr); }
int64_t attention_forward_pair_words(AttentionForward* p) { return attention_pair_words(*p); }
int64_t attention_backward_pair_words(AttentionBackward* p) { return attention_pair_words(*p); }
int run_mask_places(MaskPlaces* p) { return mask_places(*p, nullptr); }
}
"""


def obstacle() -> str | None:
    """Return the reason why the operators cannot be compiled on this machine, or None."""
    if shutil.which("nvcc") is None:
        return "nvcc is not on the path"
    if not CUDA.is_dir():
        return "the sources csrc/cuda are in a checkout of fastbert only"
    return None


class CompiledOperators(Operators):
    """The operators, compiled by nvcc, on the PTX machine.

    Args:
        folder: An existing folder for the compiled files.
        arch: Architecture of the GPU, such as 90 for sm_90. The code for sm_90 is compiled for
            sm_90a, as in the extension, because only sm_90a has the instructions that exist on
            Hopper alone.

    Attributes:
        compiled: The library, which collects the reports of the launches.
        options: Keyword arguments of `Module.launch`, such as ``seed``.

    Raises:
        FileNotFoundError: If nvcc is not on the path.
        RuntimeError: If a file does not compile. The message is the output of the compiler.
    """

    def __init__(self, folder: Path, arch: int) -> None:
        """Compile csrc/cuda, with functions that call its launchers."""
        front = folder / "front.cu"
        front.write_text(FRONT, encoding="utf-8")
        sources = [*sorted(CUDA.rglob("*.cu")), front]
        name = "90a" if arch == 90 else str(arch)
        self.compiled = CudaLibrary(sources, folder, name, nvcc.flags_of(name))
        self.options: dict[str, Any] = {}
        super().__init__(self.compiled.functions)

    def _call(self, name: str, params: Structure) -> int:
        return self.compiled.call(name, byref(params), memory=self.tensors, **self.options)


@contextmanager
def serving_cuda(operators: Operators) -> Iterator[None]:
    """Let the backend "cuda" serve CPU tensors with `operators` inside the block.

    The backend "cpu" has operators of the same names, so it cannot be used inside the block.
    """
    with ExitStack() as stack:
        stack.enter_context(backends.standing_in(STAND_IN, "cuda"))
        for name in NAMES:
            # Some operators exist on CUDA alone, so a CPU build of the extension lacks them.
            patch = mock.patch.object(
                torch.ops.fastbert_C, name, getattr(operators, name), create=True
            )
            stack.enter_context(patch)
        yield


__all__ = ["CompiledOperators", "Operators", "obstacle", "serving_cuda"]
