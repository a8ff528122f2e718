"""Launches of the kernels in triton_kernels.py, with inputs and expected results.

A case makes a launch and checks the results of the launch. Integers and products of small integers
are compared bit by bit, because every order of summation is exact. Other results are checked by the
tolerance rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton.language as tl
import triton_kernels as kernels
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor
from triton_launch import Launch

from fastbert.testing.compare import assert_close

HALVES = (torch.float16, torch.bfloat16)
INFINITY = float("inf")


class Problem(NamedTuple):
    """A launch, and a function that raises AssertionError if the results are wrong."""

    launch: Launch
    check: Callable[[], None]


class Case(NamedTuple):
    """A named function that makes a `Problem`, and the architectures to run it on.

    For PTX that breaks a rule of the manual although GPUs give the right result, ``breach`` is the
    kind of the machine's error and a reason. Without the search for races, the machine's result
    must be right too.
    """

    name: str
    architectures: tuple[int, ...]
    make: Callable[[], Problem]
    breach: tuple[str, str] | None = None


CASES: list[Case] = []


def case(
    name: str, architectures: tuple[int, ...] = (80, 90), breach: tuple[str, str] | None = None
) -> Callable[[Any], Any]:
    def add(make: Callable[[], Problem]) -> Callable[[], Problem]:
        CASES.append(Case(name, architectures, make, breach))
        return make

    return add


def equal(actual: Tensor, expected: Tensor) -> None:
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    wrong = (actual != expected).nonzero()
    assert len(wrong) == 0, (
        f"{len(wrong)} of {actual.numel()} elements differ, the first at {wrong[0].tolist()}: "
        f"{actual[tuple(wrong[0])]} instead of {expected[tuple(wrong[0])]}"
    )


def small(*shape: int, dtype: torch.dtype, most: int = 3) -> Tensor:
    """Return random integers whose products and sums are exact in every accumulator format."""
    return torch.randint(-most, most + 1, shape).to(dtype)


# Kernels that compute row by row


def _softmax(dtype: torch.dtype, columns: int) -> Problem:
    x = 4 * torch.randn(13, columns).to(dtype)
    y = torch.full_like(x, math.nan)
    block = 1 << (columns - 1).bit_length()
    arguments = {
        "x_ptr": x,
        "y_ptr": y,
        "rows": 13,
        "columns": columns,
        "BLOCK": block,
        "STAGES": 4,
    }

    def check() -> None:
        assert_close("softmax", y, x.double().softmax(1), x.softmax(1))

    return Problem(Launch(kernels.softmax_rows, (3,), arguments), check)


for _dtype in (torch.float32, *HALVES):
    for _columns in (781, 64):
        _name = f"softmax of rows, {_columns} columns, {_dtype}".replace("torch.", "")
        case(_name)(lambda dtype=_dtype, columns=_columns: _softmax(dtype, columns))


@case("layer norm, forward")
def _() -> Problem:
    x, w, b = torch.randn(7, 500), torch.randn(500), torch.randn(500)
    y, mean, rstd = torch.full_like(x, math.nan), torch.zeros(7), torch.zeros(7)
    arguments = {
        "x_ptr": x, "y_ptr": y, "w_ptr": w, "b_ptr": b, "mean_ptr": mean, "rstd_ptr": rstd,
        "columns": 500, "eps": 1e-5, "BLOCK": 256,
    }  # fmt: skip

    def check() -> None:
        norm = torch.nn.functional.layer_norm
        oracle = norm(x.double(), (500,), w.double(), b.double(), 1e-5)
        assert_close("y", y, oracle, norm(x, (500,), w, b, 1e-5))
        assert_close("mean", mean, x.double().mean(1), x.mean(1))

    return Problem(Launch(kernels.layer_norm_forward, (7,), arguments), check)


@case("layer norm, backward, with locks between blocks")
def _() -> Problem:
    x, dy, w = torch.randn(9, 120), torch.randn(9, 120), torch.randn(120)
    groups = 2
    mean, rstd = x.mean(1), 1 / (x.var(1, correction=0) + 1e-5).sqrt()
    dx = torch.full_like(x, math.nan)
    dw, db = torch.full((groups, 120), math.nan), torch.full((groups, 120), math.nan)
    arguments = {
        "dx_ptr": dx, "dy_ptr": dy, "dw_ptr": dw, "db_ptr": db, "x_ptr": x, "w_ptr": w,
        "mean_ptr": mean, "rstd_ptr": rstd, "lock_ptr": torch.zeros(2 * groups, dtype=torch.int32),
        "columns": 120, "GROUPS": groups, "BLOCK": 128,
    }  # fmt: skip

    def check() -> None:
        def gradients(dtype: torch.dtype) -> list[Tensor]:
            leaves = [t.to(dtype).requires_grad_() for t in (x, w, torch.zeros(120))]
            y = torch.nn.functional.layer_norm(leaves[0], (120,), leaves[1], leaves[2], 1e-5)
            return list(torch.autograd.grad(y, leaves, dy.to(dtype)))

        exact, plain = gradients(torch.float64), gradients(torch.float32)
        for n, actual in enumerate((dx, dw.sum(0), db.sum(0))):
            assert_close(["dx", "dw", "db"][n], actual, exact[n], plain[n])

    return Problem(Launch(kernels.layer_norm_backward, (9,), arguments), check)


# Matrix products ----------------------------------------------------------------------------------

NUMBERS = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float32: torch.float32,
    torch.int8: torch.int32,
    torch.float8_e4m3fn: torch.float32,
    torch.float8_e5m2: torch.float32,
}


def _matmul(
    dtype: torch.dtype, order: str, *, accumulator: Any = None, precision: str = "tf32",
    tile: tuple[int, int, int] = (64, 64, 64), warps: int = 4, change_a: bool = False,
    size: tuple[int, int, int] = (136, 72, 136), stages: int = 3,
) -> Problem:  # fmt: skip
    m, n, k = size
    a, b = small(m, k, dtype=dtype), small(k, n, dtype=dtype)
    kept_a = a.T.contiguous().T if order[0] == "c" else a
    kept_b = b.T.contiguous().T if order[1] == "c" else b
    result = NUMBERS[dtype] if accumulator is None else torch.float16
    c = torch.full((m, n), -99).to(result)
    integer = dtype == torch.int8
    arguments = {
        "a_ptr": kept_a, "b_ptr": kept_b, "c_ptr": c, "M": m, "N": n, "K": k,
        "stride_am": kept_a.stride(0), "stride_ak": kept_a.stride(1),
        "stride_bk": kept_b.stride(0), "stride_bn": kept_b.stride(1),
        "BM": tile[0], "BN": tile[1], "BK": tile[2], "GROUP": 2,
        "ACCUMULATOR": accumulator or (tl.int32 if integer else tl.float32),
        "PRECISION": precision, "CHANGE_A": change_a,
    }  # fmt: skip
    grid = (-(-m // tile[0]) * -(-n // tile[1]),)

    def check() -> None:
        expected = (1 + change_a) * (a.double() @ b.double())
        equal(c, expected.to(result))

    return Problem(Launch(kernels.matmul, grid, arguments, warps, stages), check)


for _dtype in (*HALVES, torch.float32, torch.int8):
    for _order in ("rr", "rc", "cr", "cc"):
        _name = f"matmul {_dtype}, a {_order[0]}, b {_order[1]}".replace("torch.", "")
        case(_name)(lambda dtype=_dtype, order=_order: _matmul(dtype, order))
for _dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
    _name = f"matmul {_dtype}".replace("torch.", "")
    case(_name, (90,))(lambda dtype=_dtype: _matmul(dtype, "rc"))
case("matmul float32, IEEE products")(lambda: _matmul(torch.float32, "rc", precision="ieee"))
case("matmul float32, tf32x3")(lambda: _matmul(torch.float32, "rc", precision="tf32x3"))
case("matmul float16 with fp16 accumulators", (80,))(
    lambda: _matmul(torch.float16, "rc", accumulator=tl.float16)
)
case(
    "matmul float16 with fp16 accumulators of wgmma", (90,),
    ("uninitialised", "mov.b32 takes accumulators apart before wgmma.wait_group"),
)(lambda: _matmul(torch.float16, "rc", accumulator=tl.float16))  # fmt: skip
for _dtype in (*HALVES, torch.float32):
    _name = f"matmul {_dtype}, a from registers".replace("torch.", "")
    case(_name)(lambda dtype=_dtype: _matmul(dtype, "rc", change_a=True))
_TILES = {
    (128, 128, 32): 8, (128, 64, 64): 4, (64, 128, 32): 8, (16, 32, 64): 4, (32, 32, 32): 2,
    (64, 256, 32): 8, (256, 64, 16): 8,
}  # fmt: skip
for _tile, _warps in _TILES.items():
    _name = f"matmul bfloat16, tile {_tile}, {_warps} warps"
    case(_name)(lambda t=_tile, w=_warps: _matmul(torch.bfloat16, "rr", tile=t, warps=w))
case("matmul float16, 2 stages")(lambda: _matmul(torch.float16, "rc", stages=2))
case("matmul float16, 5 stages")(lambda: _matmul(torch.float16, "rc", stages=5, tile=(64, 64, 32)))
case("matmul float16, odd sizes")(lambda: _matmul(torch.float16, "rc", size=(33, 65, 47)))


@case("matmul, sum over K by atomics")
def _() -> Problem:
    a, b = small(64, 128, dtype=torch.float16), small(128, 64, dtype=torch.float16)
    c = torch.zeros(64, 64)
    arguments = {"a_ptr": a, "b_ptr": b, "c_ptr": c, "M": 64, "N": 64, "K": 128}
    tiles = {"BM": 32, "BN": 64, "BK": 32}
    launch = Launch(kernels.matmul_split, (2, 1, 4), arguments | tiles)
    return Problem(launch, lambda: equal(c, a.float() @ b.float()))


@case("matmul of three dimensions")
def _() -> Problem:
    a, b = small(4, 32, 32, dtype=torch.float16), small(4, 32, 32, dtype=torch.float16)
    c = torch.zeros(4, 32, 32)
    arguments = {"a_ptr": a, "b_ptr": b, "c_ptr": c, "B": 4, "M": 32, "N": 32, "K": 32}
    launch = Launch(kernels.matmul_batched, (1,), arguments)
    return Problem(launch, lambda: equal(c, a.float() @ b.float()))


@case("matmul of a product, and of its transpose")
def _() -> Problem:
    a, b, c = (small(64, 64, dtype=torch.bfloat16, most=1) for _ in range(3))
    d = torch.zeros(2, 64, 64)
    sizes = {"M": 64, "N": 64, "K": 64, "L": 64}
    arguments = {"a_ptr": a, "b_ptr": b, "c_ptr": c, "d_ptr": d, **sizes}

    def check() -> None:
        ab = (a.float() @ b.float()).bfloat16().float()
        equal(d[0], ab @ c.float())
        equal(d[1], ab.T @ a.float())

    return Problem(Launch(kernels.matmul_chain, (1,), arguments), check)


def _persistent(
    dtype: torch.dtype, tile: tuple[int, int, int], warps: int, *, specialize: bool = False,
    flatten: bool = False, subtile: bool = False, size: tuple[int, int, int] = (200, 264, 200),
) -> Problem:  # fmt: skip
    m, n, k = size
    a, b = small(m, k, dtype=dtype), small(n, k, dtype=dtype)
    c = torch.full((m, n), math.nan, dtype=torch.float32 if dtype.itemsize == 4 else torch.float16)
    bm, bn, bk = tile
    descriptor = TensorDescriptor.from_tensor
    arguments = {
        "a_desc": descriptor(a, [bm, bk]), "b_desc": descriptor(b, [bn, bk]),
        "c_desc": descriptor(c, [bm, bn // (2 if subtile else 1)]), "M": m, "N": n, "K": k,
        "BM": bm, "BN": bn, "BK": bk, "GROUP": 2, "SUBTILE": subtile, "FLATTEN": flatten,
        "SPECIALIZE": specialize, "STAGES": 3,
    }  # fmt: skip

    def check() -> None:
        equal(c, (a.double() @ b.double().T).to(c.dtype))

    return Problem(Launch(kernels.matmul_persistent, (3,), arguments, warps), check)


for _dtype in (*HALVES, torch.float32, torch.float8_e4m3fn):
    _bk = 128 // _dtype.itemsize
    _name = f"persistent matmul with descriptors, {_dtype}".replace("torch.", "")
    case(_name, (90,))(
        lambda dtype=_dtype, bk=_bk: _persistent(
            dtype, (64, 64, bk), 4, size=(200, 264, 208 if dtype.itemsize == 1 else 200)
        )
    )
for _bk in (16, 32, 128):
    case(f"persistent matmul with descriptors, rows of {2 * _bk} bytes", (90,))(
        lambda bk=_bk: _persistent(torch.float16, (64, 64, bk), 4)
    )
case("persistent matmul with descriptors, in parts of a tile", (90,))(
    lambda: _persistent(torch.float16, (128, 128, 64), 8, subtile=True)
)
case("persistent matmul with descriptors, one flat loop", (90,))(
    lambda: _persistent(torch.float16, (64, 128, 64), 4, flatten=True)
)
case("persistent matmul with descriptors, specialised warps", (90,))(
    lambda: _persistent(torch.float16, (128, 128, 64), 8, specialize=True)
)
case(
    "persistent matmul with descriptors, specialised warps, 4 of them", (90,),
    ("race", "two partitions store the same values of one tile, in no order"),
)(lambda: _persistent(torch.float16, (64, 128, 64), 4, specialize=True))  # fmt: skip
case("persistent matmul with descriptors, on pointers", (80,))(
    lambda: _persistent(torch.float16, (64, 64, 32), 4)
)


@case("persistent matmul with descriptors that the kernel makes")
def _() -> Problem:
    a, b = small(136, 104, dtype=torch.float16), small(104, 136, dtype=torch.float16)
    c = torch.full((136, 136), math.nan, dtype=torch.float16)
    arguments = {"a_ptr": a, "b_ptr": b, "c_ptr": c, "M": 136, "N": 136, "K": 104}
    tiles = {"BM": 64, "BN": 64, "BK": 32, "GROUP": 2}
    launch = Launch(kernels.matmul_device_descriptors, (4,), arguments | tiles)
    return Problem(launch, lambda: equal(c, (a.float() @ b.float()).half()))


def _boxes(dtype: torch.dtype, shape: tuple[int, int], box: tuple[int, int]) -> Problem:
    x, before = small(*shape, dtype=dtype, most=50), small(*shape, dtype=dtype, most=50)
    y, added, most = torch.zeros_like(x), before.clone(), before.clone()
    row, column = 2, 8
    descriptors = [TensorDescriptor.from_tensor(t, list(box)) for t in (x, y, added, most)]
    names = ("x_desc", "y_desc", "sum_desc", "most_desc")
    arguments = dict(zip(names, descriptors, strict=True)) | {"row": row, "column": column}
    arguments["MOST"] = not dtype.is_floating_point

    def check() -> None:
        inside = torch.zeros(shape, dtype=torch.bool)
        inside[row : row + box[0], column : column + box[1]] = True
        equal(y, torch.where(inside, x, torch.zeros_like(x)))
        equal(added, torch.where(inside, before + x, before))
        if not dtype.is_floating_point:
            equal(most, torch.where(inside, torch.maximum(before, x), before))

    return Problem(Launch(kernels.boxes, (1,), arguments), check)


for _dtype in (torch.float16, torch.int32):
    for _box in ((16, 32), (32, 16), (8, 128)):
        _name = f"copies and sums of boxes {_box}, {_dtype}".replace("torch.", "")
        case(_name, (90,))(lambda d=_dtype, box=_box: _boxes(d, (40, 144), box))


@case("boxes of three dimensions, partly outside", (90,))
def _() -> Problem:
    x = torch.arange(5 * 9 * 48, dtype=torch.int32).reshape(5, 9, 48)
    y = torch.zeros(2, 2, 8, 32, dtype=torch.int32)
    descriptor = TensorDescriptor.from_tensor(x, [2, 8, 32])
    arguments = {"x_desc": descriptor, "y_ptr": y, "B": 2, "M": 8, "N": 32}

    def check() -> None:
        for first in range(2):
            expected = torch.zeros(2, 8, 32, dtype=torch.int32)
            expected[:, :, 2:] = x[first : first + 2, 1:9, :30]
            equal(y[first], expected)

    return Problem(Launch(kernels.boxes_3d, (2,), arguments), check)


# Attention ----------------------------------------------------------------------------------------


def _reference(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    s = q @ k.transpose(1, 2) * scale
    if causal:
        s = s.masked_fill(torch.ones(s.shape[1:]).triu(1).bool(), -INFINITY)
    return s.softmax(-1) @ v, s.logsumexp(-1)


def _attention(
    dtype: torch.dtype, d: int, causal: bool, length: int, tile: tuple[int, int], warps: int
) -> Problem:
    heads = 2
    q, k, v = (torch.randn(heads, length, d).to(dtype) for _ in range(3))
    o, lse = torch.full_like(q, math.nan), torch.full((heads, length), math.nan)
    scale = d**-0.5
    arguments = {
        "q_ptr": q, "k_ptr": k, "v_ptr": v, "o_ptr": o, "lse_ptr": lse,
        "scale": scale * math.log2(math.e), "length": length, "D": d, "BM": tile[0], "BN": tile[1],
        "CAUSAL": causal,
    }  # fmt: skip

    def check() -> None:
        exact = _reference(q.double(), k.double(), v.double(), scale, causal)
        plain = _reference(q, k, v, scale, causal)
        assert_close("out", o, exact[0], plain[0])
        single = _reference(q.float(), k.float(), v.float(), scale, causal)
        assert_close("lse", lse * math.log(2), exact[1], single[1])

    grid = (-(-length // tile[0]), heads)
    return Problem(Launch(kernels.attention_forward, grid, arguments, warps), check)


for _dtype in HALVES:
    for _causal in (False, True):
        _name = f"attention {_dtype}{', causal' if _causal else ''}".replace("torch.", "")
        case(_name)(lambda d=_dtype, c=_causal: _attention(d, 64, c, 150, (64, 32), 4))
case("attention float16, head dim 128, 8 warps")(
    lambda: _attention(torch.float16, 128, True, 200, (128, 64), 8)
)


def _attention_descriptors(specialize: bool) -> Problem:
    heads, length, d, rows = 2, 256, 64, 64
    q, k, v = (torch.randn(heads, length, d).half() for _ in range(3))
    o = torch.full_like(q, math.nan)
    tensors = {"q": q, "k": k, "v": v, "o": o}
    arguments = {
        f"{name}_desc": TensorDescriptor.from_tensor(t.view(heads * length, d), [rows, d])
        for name, t in tensors.items()
    }
    arguments |= {
        "scale": d**-0.5 * math.log2(math.e), "length": length, "D": d, "BM": rows, "BN": 64,
        "STAGES": 3, "SPECIALIZE": specialize,
    }  # fmt: skip

    def check() -> None:
        exact = _reference(q.double(), k.double(), v.double(), d**-0.5, False)
        assert_close("out", o, exact[0], _reference(q, k, v, d**-0.5, False)[0])

    grid = (length // rows, heads)
    return Problem(Launch(kernels.attention_descriptors, grid, arguments), check)


case("attention with descriptors", (90,))(lambda: _attention_descriptors(False))
case(
    "attention with descriptors, specialised warps", (90,),
    ("race", "two partitions store the same values of one tile, in no order"),
)(lambda: _attention_descriptors(True))  # fmt: skip


@case("attention, backward")
def _() -> Problem:
    heads, length, d = 2, 128, 64
    q, k, v, do = (torch.randn(heads, length, d).half() for _ in range(4))
    scale = d**-0.5

    def gradients(dtype: torch.dtype) -> tuple[Tensor, ...]:
        leaves = [t.to(dtype).requires_grad_() for t in (q, k, v)]
        return torch.autograd.grad(_reference(*leaves, scale, False)[0], leaves, do.to(dtype))

    o, lse = _reference(q.double(), k.double(), v.double(), scale, False)
    dq = torch.zeros(heads, length, d)
    dk, dv = torch.full((heads, length, d), math.nan), torch.full((heads, length, d), math.nan)
    arguments = {
        "q_ptr": q, "k_ptr": k, "v_ptr": v, "do_ptr": do, "lse_ptr": lse.float(),
        "delta_ptr": (o * do).sum(-1).float(), "dq_ptr": dq, "dk_ptr": dk, "dv_ptr": dv,
        "scale": scale, "length": length, "D": d, "BM": 32, "BN": 64,
    }  # fmt: skip

    def check() -> None:
        exact, plain = gradients(torch.float64), gradients(torch.float16)
        for n, actual in enumerate((dq, dk, dv)):
            assert_close(["dq", "dk", "dv"][n], actual.half(), exact[n], plain[n])

    return Problem(Launch(kernels.attention_backward, (length // 64, heads), arguments), check)


# Kernels for one kind of operation each


@case("reductions")
def _() -> Problem:
    m, n = 32, 64
    x = torch.randperm(m * n).int().reshape(m, n)
    out = torch.full((4 * n + 4 * m + 1,), -1, dtype=torch.int32)

    def check() -> None:
        def xor(dim: int) -> Tensor:
            bits = torch.stack([(x >> b & 1).sum(dim) % 2 << b for b in range(16)])
            return bits.sum(0).int()

        parts = [x.sum(0), x.amax(0), x.argmin(0), xor(0), x.sum(1), x.amin(1), x.argmax(1), xor(1)]
        parts.append(x.amax(1).sum().reshape(1))
        equal(out, torch.cat([p.int() for p in parts]))

    arguments = {"x_ptr": x, "out_ptr": out, "M": m, "N": n}
    return Problem(Launch(kernels.reductions, (1,), arguments), check)


@case("a reduction of three values")
def _() -> Problem:
    x = torch.randn(16, 128)
    out = torch.full((2, 16), math.nan)

    def check() -> None:
        assert_close("mean", out[0], x.double().mean(1), x.mean(1))
        assert_close("var", out[1], x.double().var(1, correction=0), x.var(1, correction=0))

    arguments = {"x_ptr": x, "out_ptr": out, "M": 16, "N": 128}
    return Problem(Launch(kernels.moments, (1,), arguments), check)


def _compositions(x: Tensor, y: Tensor, dim: int, reverse: bool) -> list[Tensor]:
    scales, shifts = torch.empty_like(x), torch.empty_like(y)
    count = x.shape[dim]
    order = range(count - 1, -1, -1) if reverse else range(count)
    scale = shift = None
    for k in order:
        a, b = x.select(dim, k), y.select(dim, k)
        scale, shift = (a, b) if scale is None else (scale * a, shift * a + b)
        scales.select(dim, k).copy_(scale)
        shifts.select(dim, k).copy_(shift)
    return [scales, shifts]


@case("scans")
def _() -> Problem:
    m, n = 16, 64
    x, y = (torch.randint(-(2**31), 2**31, (m, n)).int() for _ in range(2))
    out = torch.zeros(6, m, n, dtype=torch.int32)

    def check() -> None:
        expected = [x.cumsum(0).int(), x.flip(1).cumsum(1).flip(1).int()]
        expected += _compositions(x, y, 1, False) + _compositions(x, y, 0, True)
        equal(out, torch.stack(expected))

    arguments = {"x_ptr": x, "y_ptr": y, "out_ptr": out, "M": m, "N": n}
    return Problem(Launch(kernels.scans, (1,), arguments), check)


for _dtype in (torch.int32, torch.int16, torch.float32):

    def _sorts(dtype: torch.dtype) -> Problem:
        m, n, k = 4, 128, 16
        x = torch.randint(-1000, 1000, (m, n)).to(dtype)
        out = torch.zeros(3 * m * n + m * k, dtype=dtype)

        def check() -> None:
            ordered = x.sort(1).values
            parts = [ordered, ordered.flip(1), x.flip(1), ordered.flip(1)[:, :k]]
            equal(out, torch.cat([p.reshape(-1) for p in parts]))

        arguments = {"x_ptr": x, "out_ptr": out, "M": m, "N": n, "K": k}
        return Problem(Launch(kernels.sorts, (1,), arguments), check)

    case(f"sort, top k and flip, {_dtype}".replace("torch.", ""))(lambda d=_dtype: _sorts(d))


for _dtype in (torch.int32, torch.float16, torch.int8):

    def _moves(dtype: torch.dtype) -> Problem:
        m, n = 32, 64
        x = torch.randint(-100, 100, (m, n)).to(dtype)
        index = torch.stack([torch.randint(0, m, (m, n)), torch.randint(0, n, (m, n))]).int()
        out = torch.zeros(11 * m * n // 2, dtype=dtype)

        def check() -> None:
            pairs = x.view(m, n // 2, 2)
            left, right = pairs[..., 0], pairs[..., 1]
            parts = [x.T, x.gather(0, index[0].long()), x.gather(1, index[1].long()), left - right]
            parts += [torch.stack([right, left], 2), x.view(2, m // 2, n).permute(1, 2, 0)]
            equal(out, torch.cat([p.reshape(-1) for p in parts]))

        arguments = {"x_ptr": x, "index_ptr": index, "out_ptr": out, "M": m, "N": n}
        return Problem(Launch(kernels.moves, (1,), arguments), check)

    case(f"transpose, gather, split, join, permute, {_dtype}".replace("torch.", ""))(
        lambda d=_dtype: _moves(d)
    )


@case("histograms")
def _() -> Problem:
    x, mask = torch.randint(0, 64, (1024,)).int(), torch.randint(0, 2, (1024,)).int()
    out = torch.zeros(2, 64, dtype=torch.int32)

    def check() -> None:
        equal(out[0], torch.bincount(x, minlength=64).int())
        equal(out[1], torch.bincount(x[mask == 1], minlength=64).int())

    arguments = {"x_ptr": x, "mask_ptr": mask, "out_ptr": out, "N": 1024, "BINS": 64}
    return Problem(Launch(kernels.histograms, (1,), arguments), check)


@case("atomics")
def _() -> Problem:
    count, bins = 512, 16
    index, x = torch.randint(0, bins, (count,)).int(), torch.randint(-99, 99, (count,)).int()
    f = x.float() / 4
    out = torch.tensor([0, -(2**31), 2**31 - 1, 0, -1, 0])[:, None].repeat(1, bins).int()
    sums = torch.tensor([0, -INFINITY, INFINITY])[:, None].repeat(1, bins)
    halves = torch.zeros(256, dtype=torch.float16)

    def check() -> None:
        for bin_ in range(bins):
            chosen, floats = x[index == bin_], f[index == bin_]
            values = chosen.tolist()
            any_, all_, odd = 0, -1, 0
            for v in values:
                any_, all_, odd = any_ | v, all_ & v, odd ^ v
            expected = [sum(values), max(values), min(values), any_, all_, odd]
            equal(out[:, bin_], torch.tensor(expected).int())
            equal(sums[:, bin_], torch.stack([floats.sum(), floats.max(), floats.min()]))
        equal(halves, f.view(2, 256).sum(0).half())

    arguments = {
        "index_ptr": index, "x_ptr": x, "f_ptr": f, "out_ptr": out, "sums_ptr": sums,
        "halves_ptr": halves, "BINS": bins, "N": 256,
    }  # fmt: skip
    return Problem(Launch(kernels.atomics, (2,), arguments), check)


def _near(actual: Tensor, exact: Tensor, name: str) -> None:
    """Check that results of functions have a relative error of at most 2⁻²⁰, element by element.

    For exact results below 1/8 in magnitude, the limit is an absolute error of 2⁻²³.
    Triton computes exp and log by ex2, lg2 and a product, whose rounding error can grow.
    """
    bound = 2.0**-20 * exact.abs().clamp(min=2.0**-3)
    worst = ((actual.double() - exact).abs() / bound).max()
    assert worst <= 1, f"{name}: error of {worst:.2f} bounds"


@case("functions of fp32, by libdevice")
def _() -> Problem:
    x = torch.randn(512) * 3
    out = torch.full((19, 512), math.nan)

    def check() -> None:
        d, a = x.double(), x.double().abs()
        one_and_a_bit = float(torch.tensor(1.7))
        expected = {
            "exp": d.exp(), "log": a.log(), "sin": d.sin(), "cos": d.cos(), "sqrt": a.sqrt(),
            "rsqrt": a.rsqrt(), "erf": d.erf(), "sigmoid": d.sigmoid(), "floor": d.floor(),
            "div": 1 / d, "tanh": d.tanh(), "log1p": a.log1p(), "expm1": d.expm1(),
            "rint": d.round(), "pow": a**one_and_a_bit, "atan": d.atan(),
            "fmod": torch.fmod(d, float(torch.tensor(0.37))), "lgamma": (a + 0.5).lgamma(),
            "fma": d * d - 1,
        }  # fmt: skip
        for n, (name, exact) in enumerate(expected.items()):
            _near(out[n], exact, name)
        # The expected root is rounded from float64, because torch's float32 root is less exact.
        equal(out[4], a.sqrt().float())
        equal(out[9], 1 / x)
        equal(out[18], (d * d - 1).float())

    arguments = {"x_ptr": x, "out_ptr": out, "N": 512}
    return Problem(Launch(kernels.functions, (1,), arguments), check)


@case("functions of fp64, by libdevice")
def _() -> Problem:
    x = torch.randn(256, dtype=torch.float64) * 3
    out = torch.full((5, 256), math.nan, dtype=torch.float64)

    def check() -> None:
        expected = torch.stack([x.exp(), x.erf(), x.abs().sqrt(), 1 / x, x.sin()])
        bound = 2.0**-50 * expected.abs().clamp(min=2.0**-10)
        assert ((out - expected).abs() <= bound).all()
        equal(out[2], torch.tensor([math.sqrt(abs(v)) for v in x.tolist()], dtype=x.dtype))
        equal(out[3], expected[3])

    arguments = {"x_ptr": x, "out_ptr": out, "N": 256}
    return Problem(Launch(kernels.functions_double, (1,), arguments), check)


for _dtype in (torch.int8, torch.int16, torch.int32, torch.int64):

    def _integers(dtype: torch.dtype) -> Problem:
        least, most = torch.iinfo(dtype).min, torch.iinfo(dtype).max
        x = torch.randint(least, most, (512,)).to(dtype)
        y = torch.randint(least, most, (512,)).to(dtype)
        y[::3] = (y[::3] % 19) + 1
        y[y == 0] = 7
        out = torch.zeros(7, 512, dtype=dtype)

        def check() -> None:
            quotient = torch.div(x, y, rounding_mode="trunc")
            smaller = torch.minimum(x, y) | y.abs()
            compared = (x < y).to(dtype) + (x == y).to(dtype)
            expected = [quotient, torch.fmod(x, y), x * y - y, x >> 3, (x << 5) ^ (x & y), smaller]
            equal(out, torch.stack([*expected, compared]))

        arguments = {"x_ptr": x, "y_ptr": y, "out_ptr": out, "N": 512}
        return Problem(Launch(kernels.integers, (1,), arguments), check)

    case(f"integers, {_dtype}".replace("torch.", ""))(lambda d=_dtype: _integers(d))


@case("bits of 32-bit integers")
def _() -> Problem:
    x, y = (torch.randint(-(2**31), 2**31, (256,)).int() for _ in range(2))
    x[:4] = torch.tensor([0, 1, -1, 1 << 30])
    out = torch.zeros(6, 256, dtype=torch.int32)

    def check() -> None:
        def row(f: Callable[[int, int], int]) -> Tensor:
            pairs = zip(x.tolist(), y.tolist(), strict=True)
            values = [f(a % 2**32, b % 2**32) % 2**32 for a, b in pairs]
            return torch.tensor(values).to(torch.int32)

        def permuted(a: int, b: int) -> int:
            taken = (a | b << 32).to_bytes(8, "little")
            return int.from_bytes(bytes(taken[s] for s in (5, 1, 7, 3)), "little")

        expected = [
            row(lambda a, b: a * b >> 32), row(lambda a, _: a.bit_count()),
            row(lambda a, _: 32 - a.bit_length()), row(lambda a, _: int(f"{a:032b}"[::-1], 2)),
            row(permuted), row(lambda a, _: (a & -a).bit_length()),
        ]  # fmt: skip
        equal(out, torch.stack(expected))

    arguments = {"x_ptr": x, "y_ptr": y, "out_ptr": out, "N": 256}
    return Problem(Launch(kernels.high_products, (1,), arguments), check)


@case("inline assembly")
def _() -> Problem:
    x, y = (torch.randint(-128, 128, (512,)).to(torch.int8) for _ in range(2))
    out = torch.zeros(512, dtype=torch.int8)

    def check() -> None:
        four_x, four_y = x.view(-1, 4), y.view(-1, 4)
        chosen = torch.cat([four_x[:, ::2], four_y[:, ::2]], 1)
        equal(out.view(-1, 4), chosen ^ four_x ^ four_y)

    arguments = {"x_ptr": x, "y_ptr": y, "out_ptr": out, "N": 512}
    return Problem(Launch(kernels.assembled, (1,), arguments), check)


_CASTS = [
    (torch.float32, torch.float16, tl.float16), (torch.float32, torch.bfloat16, tl.bfloat16),
    (torch.float16, torch.float32, tl.float32), (torch.bfloat16, torch.float16, tl.float16),
    (torch.float32, torch.int32, tl.int32), (torch.float32, torch.int8, tl.int8),
    (torch.int32, torch.float32, tl.float32), (torch.int64, torch.bfloat16, tl.bfloat16),
    (torch.int8, torch.float16, tl.float16), (torch.float64, torch.float16, tl.float16),
    (torch.float32, torch.float64, tl.float64), (torch.float16, torch.int64, tl.int64),
    (torch.float32, torch.float8_e5m2, tl.float8e5),
    (torch.float8_e5m2, torch.float32, tl.float32),
    (torch.float8_e5m2, torch.bfloat16, tl.bfloat16),
    (torch.float16, torch.float8_e5m2, tl.float8e5),
    (torch.float8_e4m3fn, torch.float32, tl.float32),
    (torch.float8_e4m3fn, torch.float16, tl.float16),
    (torch.float32, torch.float8_e4m3fn, tl.float8e4nv),
    (torch.bfloat16, torch.float8_e4m3fn, tl.float8e4nv),
]  # fmt: skip


def _casts(source: torch.dtype, target: torch.dtype, name: Any) -> Problem:
    if source.itemsize == 1 and source.is_floating_point:
        bits = torch.arange(256).to(torch.uint8).repeat(2)
        x = bits.view(source)
        # Triton converts e5m2 by a multiplication, so an infinity becomes 65536.
        x = torch.where(x.float().isfinite(), x.float(), torch.ones(512)).to(source)
    elif source.is_floating_point:
        x = (torch.randn(512, dtype=torch.float64) * 20).to(source)
        x[::2] = (x[::2].double() / 2**16).to(source)
    else:
        least, most = torch.iinfo(source).min, torch.iinfo(source).max
        x = torch.randint(least, most, (512,)).to(source)
    out = torch.zeros(512).to(target)

    def check() -> None:
        equal(out.double(), x.to(target).double())

    arguments = {"x_ptr": x, "out_ptr": out, "N": 512, "TO": name}
    return Problem(Launch(kernels.casts, (1,), arguments), check)


for _source, _target, _type in _CASTS:
    _four = torch.float8_e4m3fn in (_source, _target)
    case(f"cast {_source} to {_target}".replace("torch.", ""), (90,) if _four else (80, 90))(
        lambda s=_source, t=_target, n=_type: _casts(s, t, n)
    )


@case("random numbers")
def _() -> Problem:
    out, uniform = torch.zeros(4, 256, dtype=torch.int32), torch.zeros(256)

    def philox(counter: list[int], key: list[int]) -> list[int]:
        # Ten rounds of Philox 4x32 (Salmon et al. 2011).
        a, b, c, d = counter
        for _ in range(10):
            low, high = 0xD2511F53 * a, 0xCD9E8D57 * c
            a, b, c, d = high >> 32 ^ b ^ key[0], high % 2**32, low >> 32 ^ d ^ key[1], low % 2**32
            key = [(key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32]
        return [a, b, c, d]

    def check() -> None:
        expected = torch.tensor([philox([n, 0, 0, 0], [9917, 0]) for n in range(256)]).T
        equal(out, expected.to(torch.int32))
        first = expected[0].to(torch.int32)
        equal(uniform, torch.where(first < 0, -first - 1, first).float() * 4.6566127342e-10)

    arguments = {"out_ptr": out, "uniform_ptr": uniform, "seed": 9917, "N": 256}
    return Problem(Launch(kernels.random_numbers, (1,), arguments), check)
