"""The CUDA C++ operators of attention on CPU tensors, through the launchers of csrc/cuda."""

from __future__ import annotations

import math
from ctypes import Structure, byref, c_float, c_int32, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from fastbert.testing.ptx.cuda_call import FORMATS, Calls, Dropout, new


class HeadRows(Structure):
    """The struct `HeadRows` of csrc/cuda."""

    _fields_ = [("data", c_void_p), ("batch", c_int64), ("head", c_int64), ("row", c_int64)]


class AttentionMask(Structure):
    """The struct `AttentionMask` of csrc/cuda."""

    _fields_ = [("data", c_void_p), *((name, c_int64) for name in ("batch", "head", "row", "key"))]


class Sequences(Structure):
    """The struct `Sequences` of csrc/cuda."""

    _fields_ = [(name, c_int32) for name in ("batches", "heads", "max_q", "max_k")]
    _fields_ += [("cu_seqlens_q", c_void_p), ("cu_seqlens_k", c_void_p)]
    _fields_ += [("rows_q", c_int64), ("rows_k", c_int64)]


def _fields(*rows: str) -> list[tuple[str, Any]]:
    """Return the fields, up to `scale`, that AttentionForward and AttentionBackward share."""
    return [
        ("format", c_int32), ("head_dim", c_int32), ("sequences", Sequences),
        *((name, HeadRows) for name in rows),
        ("lse", c_void_p), ("lse_stride_batch", c_int64), ("lse_stride_head", c_int64),
        ("mask", AttentionMask), ("dropout", Dropout), ("scale", c_float),
    ]  # fmt: skip


class AttentionForward(Structure):
    """The struct `AttentionForward` of csrc/cuda."""

    _fields_ = _fields("q", "k", "v", "out")
    _fields_ += [("pair_bits", c_void_p)]


class AttentionBackward(Structure):
    """The struct `AttentionBackward` of csrc/cuda."""

    _fields_ = _fields("q", "k", "v", "out", "dout")
    _fields_ += [("delta", c_void_p), ("dq_sums", c_void_p)]
    _fields_ += [(name, HeadRows) for name in ("dq", "dk", "dv")]
    _fields_ += [("pair_bits", c_void_p)]


def _is_aligned(t: Tensor) -> bool:
    """Return whether the kernels can use `t` without a copy.

    The last dimension is then contiguous, and every row begins at a multiple of 16 bytes.
    """
    strides = [step for size, step in zip(t.shape[:-1], t.stride()[:-1], strict=True) if size > 1]
    fits = all(step * t.itemsize % 16 == 0 for step in strides)
    return t.stride(-1) == 1 and t.data_ptr() % 16 == 0 and fits


def _readable(t: Tensor) -> Tensor:
    return t if _is_aligned(t) else t.clone(memory_format=torch.contiguous_format)


class AttentionOperators(Calls):
    """Attention with the arguments of ``torch.ops.fastbert_C.flash_attention_*``.

    q, k and v are (B, H, L, D), or packed (T, H, D), in fp16 or bf16.
    """

    def _rows(self, t: Tensor) -> HeadRows:
        batch, head, row = (0, 1, 0) if t.dim() == 3 else (t.stride(0), 1, 2)
        return HeadRows(self._address(t), batch, t.stride(head), t.stride(row))

    def _optional(self, t: Tensor | None) -> int | None:
        return None if t is None else self._address(t)

    def _problem(
        self, q: Tensor, k: Tensor, cu_q: Tensor | None, cu_k: Tensor | None, max_q: int, max_k: int
    ) -> tuple[int, int, Sequences]:
        batches = q.shape[0] if cu_q is None else cu_q.numel() - 1
        axis = 2 if cu_q is None else 0
        sequences = Sequences(
            batches, q.shape[1], max_q, max_k, self._optional(cu_q), self._optional(cu_k),
            q.shape[axis], k.shape[axis],
        )  # fmt: skip
        return FORMATS[q.dtype], q.shape[-1], sequences

    def _mask(self, mask: Tensor | None, sequences: Sequences) -> AttentionMask:
        if mask is None:
            return AttentionMask(None, 0, 0, 0, 0)
        shape = (sequences.batches, sequences.heads, sequences.max_q, sequences.max_k)
        bytes_of = mask.expand(shape).view(torch.uint8)
        return AttentionMask(self._address(bytes_of), *bytes_of.stride())

    def _run_with_pairs(self, name: str, params: AttentionForward | AttentionBackward) -> None:
        """Call ``run_NAME`` with a new buffer for the bits of query-key pairs, full of ones."""
        count = getattr(self.library, f"{name}_pair_words")
        count.restype = c_int64
        bits = torch.full((count(byref(params)),), -1, dtype=torch.int32)
        params.pair_bits = self._address(bits)
        self._run(f"run_{name}", params)

    def flash_attention_forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, cu_seqlens_q: Tensor | None,
        cu_seqlens_k: Tensor | None, seed: Tensor | None, max_seqlen_q: int, max_seqlen_k: int,
        dropout_p: float, scale: float,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Return out in the shape and the dtype of q, and the natural log-sum-exp in fp32."""
        if q.dim() == 3:
            out = new(*q.shape, dtype=q.dtype)
            lse, batch = new(q.shape[1], q.shape[0], dtype=torch.float32), 0
        else:
            b, h, length, d = q.shape
            out = new(b, length, h, d, dtype=q.dtype).transpose(1, 2)
            lse, batch = new(b, h, length, dtype=torch.float32), h * length
        q, k, v = map(_readable, (q, k, v))
        head = self._problem(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        if head[2].batches == 0:
            return out.zero_(), lse.fill_(-math.inf)
        rows = (*map(self._rows, (q, k, v, out)), self._address(lse), batch, lse.shape[-1])
        options = self._mask(mask, head[2]), self._dropout(seed, dropout_p), scale
        self._run_with_pairs("attention_forward", AttentionForward(*head, *rows, *options))
        return out, lse

    def flash_attention_backward(
        self, dq: Tensor, dk: Tensor, dv: Tensor, dout: Tensor, q: Tensor, k: Tensor, v: Tensor,
        out: Tensor, lse: Tensor, mask: Tensor | None, cu_seqlens_q: Tensor | None,
        cu_seqlens_k: Tensor | None, seed: Tensor | None, max_seqlen_q: int, max_seqlen_k: int,
        dropout_p: float, scale: float,
    ) -> None:  # fmt: skip
        """Write the gradients into dq, dk and dv."""
        q, k, v, out, dout = map(_readable, (q, k, v, out, dout))
        head = self._problem(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        if head[2].batches == 0:
            for gradient in (dq, dk, dv):
                gradient.zero_()
            return
        batch = 0 if q.dim() == 3 else q.shape[1] * q.shape[2]
        written = [x if _is_aligned(x) else new(*x.shape, dtype=x.dtype) for x in (dq, dk, dv)]
        delta = new(*lse.shape, dtype=torch.float32)
        dq_sums = new(*lse.shape, q.shape[-1], dtype=torch.float32)
        rows = (
            *map(self._rows, (q, k, v, out, dout)), self._address(lse), batch, lse.shape[-1],
        )  # fmt: skip
        options = self._mask(mask, head[2]), self._dropout(seed, dropout_p), scale
        memory = self._address(delta), self._address(dq_sums), *map(self._rows, written)
        params = AttentionBackward(*head, *rows, *options, *memory)
        self._run_with_pairs("attention_backward", params)
        for wanted, result in zip((dq, dk, dv), written, strict=True):
            if result is not wanted:
                wanted.copy_(result)


__all__ = ["AttentionOperators"]
