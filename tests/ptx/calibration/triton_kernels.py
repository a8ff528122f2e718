"""Triton kernels with constructions that are known to be right on GPUs.

The kernels follow the programs of Triton's tutorials and its language reference: row-wise softmax,
grouped matrix products, layer norm with locks, fused attention, persistent products with
descriptors, and one kernel for each kind of operation.
"""

import triton
import triton.language as tl
from triton.language.extra import libdevice

# Kernels that compute row by row


@triton.jit
def softmax_rows(x_ptr, y_ptr, rows, columns, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    for row in tl.range(tl.program_id(0), rows, tl.num_programs(0), num_stages=STAGES):
        x = tl.load(x_ptr + row * columns + offsets, offsets < columns, -float("inf"))
        e = tl.exp(x.to(tl.float32) - tl.max(x, 0).to(tl.float32))
        y = e / tl.sum(e, 0)
        tl.store(y_ptr + row * columns + offsets, y, offsets < columns)


@triton.jit
def layer_norm_forward(
    x_ptr, y_ptr, w_ptr, b_ptr, mean_ptr, rstd_ptr, columns, eps, BLOCK: tl.constexpr
):
    row = tl.program_id(0)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, columns, BLOCK):
        at = first + tl.arange(0, BLOCK)
        total += tl.load(x_ptr + row * columns + at, at < columns, 0.0).to(tl.float32)
    mean = tl.sum(total, 0) / columns
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, columns, BLOCK):
        at = first + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * columns + at, at < columns, 0.0).to(tl.float32)
        x = tl.where(at < columns, x - mean, 0.0)
        total += x * x
    rstd = 1 / tl.sqrt(tl.sum(total, 0) / columns + eps)
    tl.store(mean_ptr + row, mean)
    tl.store(rstd_ptr + row, rstd)
    for first in range(0, columns, BLOCK):
        at = first + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * columns + at, at < columns, 0.0).to(tl.float32)
        w = tl.load(w_ptr + at, at < columns)
        b = tl.load(b_ptr + at, at < columns)
        tl.store(y_ptr + row * columns + at, (x - mean) * rstd * w + b, at < columns)


@triton.jit
def layer_norm_backward(
    dx_ptr, dy_ptr, dw_ptr, db_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr, lock_ptr, columns,
    GROUPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # The rows of a group add to the same sums of dw and db, one row at a time under a lock.
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    mask = at < columns
    group = row % GROUPS
    lock_ptr += group
    count_ptr = lock_ptr + GROUPS
    dw_ptr += group * columns + at
    db_ptr += group * columns + at
    x = tl.load(x_ptr + row * columns + at, mask, 0.0).to(tl.float32)
    dy = tl.load(dy_ptr + row * columns + at, mask, 0.0).to(tl.float32)
    w = tl.load(w_ptr + at, mask, 0.0).to(tl.float32)
    rstd = tl.load(rstd_ptr + row)
    normal = tl.where(mask, (x - tl.load(mean_ptr + row)) * rstd, 0.0)
    wdy = w * dy
    along = tl.sum(normal * wdy, 0) / columns
    mean = tl.sum(wdy, 0) / columns
    tl.store(dx_ptr + row * columns + at, (wdy - (normal * along + mean)) * rstd, mask)
    dw, db = dy * normal, dy
    while tl.atomic_cas(lock_ptr, 0, 1) == 1:
        pass
    if tl.load(count_ptr) == 0:
        tl.atomic_xchg(count_ptr, 1)
    else:
        dw += tl.load(dw_ptr, mask)
        db += tl.load(db_ptr, mask)
    tl.store(dw_ptr, dw, mask)
    tl.store(db_ptr, db, mask)
    tl.debug_barrier()
    tl.atomic_xchg(lock_ptr, 0)


# Matrix products ----------------------------------------------------------------------------------


@triton.jit
def grouped(tile, M, N, BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr):
    across = GROUP * tl.cdiv(N, BN)
    first = tile // across * GROUP
    height = min(tl.cdiv(M, BM) - first, GROUP)
    return first + tile % across % height, tile % across // height


@triton.jit
def matmul(
    a_ptr, b_ptr, c_ptr, M, N, K, stride_am, stride_ak, stride_bk, stride_bn,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    ACCUMULATOR: tl.constexpr, PRECISION: tl.constexpr, CHANGE_A: tl.constexpr,
):  # fmt: skip
    pid_m, pid_n = grouped(tl.program_id(0), M, N, BM, BN, GROUP)
    rows = (pid_m * BM + tl.arange(0, BM)) % M
    columns = (pid_n * BN + tl.arange(0, BN)) % N
    depth = tl.arange(0, BK)
    a_ptrs = a_ptr + rows[:, None] * stride_am + depth[None, :] * stride_ak
    b_ptrs = b_ptr + depth[:, None] * stride_bk + columns[None, :] * stride_bn
    sum = tl.zeros([BM, BN], ACCUMULATOR)
    for k in range(tl.cdiv(K, BK)):
        left = K - k * BK
        a = tl.load(a_ptrs, depth[None, :] < left, 0.0)
        b = tl.load(b_ptrs, depth[:, None] < left, 0.0)
        if CHANGE_A:
            # This change puts A into registers, so that wgmma reads A from registers.
            a = (a + a).to(a.dtype)
        sum = tl.dot(a, b, sum, input_precision=PRECISION, out_dtype=ACCUMULATOR)
        a_ptrs += BK * stride_ak
        b_ptrs += BK * stride_bk
    rows = pid_m * BM + tl.arange(0, BM)
    columns = pid_n * BN + tl.arange(0, BN)
    mask = (rows[:, None] < M) & (columns[None, :] < N)
    tl.store(c_ptr + rows[:, None] * N + columns[None, :], sum, mask)


@triton.jit
def matmul_split(
    a_ptr, b_ptr, c_ptr, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):
    # Each program along axis 2 adds the products of a part of K to the result by atomics.
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    depth = tl.program_id(2) * BK + tl.arange(0, BK)
    a = tl.load(a_ptr + rows[:, None] * K + depth[None, :])
    b = tl.load(b_ptr + depth[:, None] * N + columns[None, :])
    tl.atomic_add(c_ptr + rows[:, None] * N + columns[None, :], tl.dot(a, b), sem="relaxed")


@triton.jit
def matmul_batched(a_ptr, b_ptr, c_ptr, B: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
                   K: tl.constexpr):  # fmt: skip
    b, m, n, k = tl.arange(0, B), tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    x = tl.load(a_ptr + (b[:, None, None] * M + m[None, :, None]) * K + k[None, None, :])
    y = tl.load(b_ptr + (b[:, None, None] * K + k[None, :, None]) * N + n[None, None, :])
    z = tl.dot(x, y)
    tl.store(c_ptr + (b[:, None, None] * M + m[None, :, None]) * N + n[None, None, :], z)


@triton.jit
def matmul_chain(a_ptr, b_ptr, c_ptr, d_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
                 L: tl.constexpr):  # fmt: skip
    # This kernel computes (a b) c and a transposed product; the second product uses the first one.
    m, n, k, j = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K), tl.arange(0, L)
    a = tl.load(a_ptr + m[:, None] * K + k[None, :])
    b = tl.load(b_ptr + k[:, None] * N + n[None, :])
    c = tl.load(c_ptr + n[:, None] * L + j[None, :])
    ab = tl.dot(a, b).to(a.dtype)
    abc = tl.dot(ab, c)
    tl.store(d_ptr + m[:, None] * L + j[None, :], abc)
    back = tl.dot(tl.trans(ab), a)
    tl.store(d_ptr + M * L + n[:, None] * K + k[None, :], back)


@triton.jit
def matmul_persistent(
    a_desc, b_desc, c_desc, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    GROUP: tl.constexpr, SUBTILE: tl.constexpr, FLATTEN: tl.constexpr,
    SPECIALIZE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # Host descriptors: a (M, K), b (N, K), c (M, N).
    tiles = tl.cdiv(M, BM) * tl.cdiv(N, BN)
    for tile in tl.range(
        tl.program_id(0), tiles, tl.num_programs(0), flatten=FLATTEN, warp_specialize=SPECIALIZE,
        num_stages=STAGES,
    ):  # fmt: skip
        pid_m, pid_n = grouped(tile, M, N, BM, BN, GROUP)
        sum = tl.zeros([BM, BN], tl.float32)
        for k in range(tl.cdiv(K, BK)):
            a = a_desc.load([pid_m * BM, k * BK])
            b = b_desc.load([pid_n * BN, k * BK])
            sum = tl.dot(a, b.T, sum)
        if SUBTILE:
            halves = tl.permute(tl.reshape(sum, (BM, 2, BN // 2)), (0, 2, 1))
            left, right = tl.split(halves)
            c_desc.store([pid_m * BM, pid_n * BN], left.to(c_desc.dtype))
            c_desc.store([pid_m * BM, pid_n * BN + BN // 2], right.to(c_desc.dtype))
        else:
            c_desc.store([pid_m * BM, pid_n * BN], sum.to(c_desc.dtype))


@triton.jit
def matmul_device_descriptors(
    a_ptr, b_ptr, c_ptr, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    # This product of a (M, K) and b (K, N) into c (M, N) uses descriptors that the kernel creates.
    a_desc = tl.make_tensor_descriptor(a_ptr, [M, K], [K, 1], [BM, BK])
    b_desc = tl.make_tensor_descriptor(b_ptr, [K, N], [N, 1], [BK, BN])
    c_desc = tl.make_tensor_descriptor(c_ptr, [M, N], [N, 1], [BM, BN])
    tiles = tl.cdiv(M, BM) * tl.cdiv(N, BN)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0)):
        pid_m, pid_n = grouped(tile, M, N, BM, BN, GROUP)
        sum = tl.zeros([BM, BN], tl.float32)
        for k in range(tl.cdiv(K, BK)):
            a = a_desc.load([pid_m * BM, k * BK])
            b = b_desc.load([k * BK, pid_n * BN])
            sum = tl.dot(a, b, sum)
        c_desc.store([pid_m * BM, pid_n * BN], sum.to(c_desc.dtype))


@triton.jit
def boxes(x_desc, y_desc, sum_desc, most_desc, row, column, MOST: tl.constexpr):
    # One box is loaded by a descriptor. Then it is stored, added to memory, and max-reduced.
    x = x_desc.load([row, column])
    y_desc.store([row, column], x)
    sum_desc.atomic_add([row, column], x)
    if MOST:
        most_desc.atomic_max([row, column], x)


@triton.jit
def boxes_3d(x_desc, y_ptr, B: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    x = x_desc.load([tl.program_id(0), 1, -2])
    b, m, n = tl.arange(0, B), tl.arange(0, M), tl.arange(0, N)
    at = (b[:, None, None] * M + m[None, :, None]) * N + n[None, None, :]
    tl.store(y_ptr + tl.program_id(0) * B * M * N + at, x)


# Attention ----------------------------------------------------------------------------------------


@triton.jit
def attention_forward(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, scale, length, D: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    # One program computes BM queries of one head. The scale includes log2(e), because exp2 is used.
    head = tl.program_id(1).to(tl.int64) * length * D
    rows, columns, d = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, D)
    q = tl.load(q_ptr + head + rows[:, None] * D + d[None, :], rows[:, None] < length, 0.0)
    most = tl.full([BM], -float("inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    out = tl.zeros([BM, D], tl.float32)
    end = tl.minimum((tl.program_id(0) + 1) * BM, length) if CAUSAL else length
    for first in range(0, end, BN):
        at = first + columns
        k = tl.load(k_ptr + head + at[None, :] * D + d[:, None], at[None, :] < length, 0.0)
        v = tl.load(v_ptr + head + at[:, None] * D + d[None, :], at[:, None] < length, 0.0)
        s = tl.dot(q, k) * scale
        seen = at[None, :] < length
        if CAUSAL:
            seen = seen & (at[None, :] <= rows[:, None])
        s = tl.where(seen, s, -float("inf"))
        new = tl.maximum(most, tl.max(s, 1))
        p = tl.exp2(s - new[:, None])
        shrink = tl.exp2(most - new)
        total = total * shrink + tl.sum(p, 1)
        out = tl.dot(p.to(v.dtype), v, out * shrink[:, None])
        most = new
    out = out / total[:, None]
    tl.store(o_ptr + head + rows[:, None] * D + d[None, :], out, rows[:, None] < length)
    tl.store(lse_ptr + tl.program_id(1) * length + rows, most + tl.log2(total), rows < length)


@triton.jit
def attention_descriptors(
    q_desc, k_desc, v_desc, o_desc, scale, length, D: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, STAGES: tl.constexpr, SPECIALIZE: tl.constexpr,
):  # fmt: skip
    # q, k, v and o have the shape (heads * length, D); length is a multiple of BM and BN.
    first_row = tl.program_id(1) * length
    q = q_desc.load([first_row + tl.program_id(0) * BM, 0])
    most = tl.full([BM], -float("inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    out = tl.zeros([BM, D], tl.float32)
    for first in tl.range(0, length, BN, num_stages=STAGES, warp_specialize=SPECIALIZE):
        k = k_desc.load([first_row + first, 0])
        s = tl.dot(q, k.T) * scale
        new = tl.maximum(most, tl.max(s, 1))
        p = tl.exp2(s - new[:, None])
        shrink = tl.exp2(most - new)
        total = total * shrink + tl.sum(p, 1)
        v = v_desc.load([first_row + first, 0])
        out = tl.dot(p.to(v.dtype), v, out * shrink[:, None])
        most = new
    out = (out / total[:, None]).to(o_desc.dtype)
    o_desc.store([first_row + tl.program_id(0) * BM, 0], out)


@triton.jit
def attention_backward(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, dk_ptr, dv_ptr, scale, length,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    # One program computes BN keys of one head, and adds to dq (fp32) by atomics. The scale is for
    # exp, not for exp2.
    head = tl.program_id(1).to(tl.int64) * length * D
    d, columns = tl.arange(0, D), tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.load(k_ptr + head + columns[:, None] * D + d[None, :])
    v = tl.load(v_ptr + head + columns[:, None] * D + d[None, :])
    dk, dv = tl.zeros([BN, D], tl.float32), tl.zeros([BN, D], tl.float32)
    for first in range(0, length, BM):
        rows = first + tl.arange(0, BM)
        at = head + rows[:, None] * D + d[None, :]
        q, do = tl.load(q_ptr + at), tl.load(do_ptr + at)
        lse = tl.load(lse_ptr + tl.program_id(1) * length + rows)
        delta = tl.load(delta_ptr + tl.program_id(1) * length + rows)
        p = tl.exp(tl.dot(k, tl.trans(q)) * scale - lse[None, :])
        dv = tl.dot(p.to(do.dtype), do, dv)
        ds = p * (tl.dot(v, tl.trans(do)) - delta[None, :]) * scale
        dk = tl.dot(ds.to(q.dtype), q, dk)
        tl.atomic_add(dq_ptr + at, tl.dot(tl.trans(ds).to(k.dtype), k), sem="relaxed")
    tl.store(dk_ptr + head + columns[:, None] * D + d[None, :], dk)
    tl.store(dv_ptr + head + columns[:, None] * D + d[None, :], dv)


# Kernels for one kind of operation each


@triton.jit
def composed(a_scale, a_shift, b_scale, b_shift):
    # This function composes two maps x → scale x + shift of 32-bit integers; the order matters.
    return a_scale * b_scale, a_shift * b_scale + b_shift


@triton.jit
def welford(mean_a, m2_a, count_a, mean_b, m2_b, count_b):
    count = count_a + count_b
    delta = mean_b - mean_a
    share = tl.where(count == 0, 0.0, count_b / count)
    return mean_a + delta * share, m2_a + m2_b + delta * delta * count_a * share, count


@triton.jit
def reductions(x_ptr, out_ptr, M: tl.constexpr, N: tl.constexpr):
    m, n = tl.arange(0, M), tl.arange(0, N)
    x = tl.load(x_ptr + m[:, None] * N + n[None, :])
    at = out_ptr
    tl.store(at + n, tl.sum(x, 0))
    tl.store(at + N + n, tl.max(x, 0))
    tl.store(at + 2 * N + n, tl.argmin(x, 0))
    tl.store(at + 3 * N + n, tl.xor_sum(x, 0))
    at += 4 * N
    tl.store(at + m, tl.sum(x, 1))
    tl.store(at + M + m, tl.min(x, 1))
    tl.store(at + 2 * M + m, tl.argmax(x, 1))
    tl.store(at + 3 * M + m, tl.xor_sum(x, 1))
    tl.store(at + 4 * M, tl.sum(tl.max(x, 1), 0))


@triton.jit
def moments(x_ptr, out_ptr, M: tl.constexpr, N: tl.constexpr):
    m, n = tl.arange(0, M), tl.arange(0, N)
    x = tl.load(x_ptr + m[:, None] * N + n[None, :])
    mean, m2, count = tl.reduce((x, tl.zeros_like(x), tl.full([M, N], 1.0, tl.float32)), 1, welford)
    tl.store(out_ptr + m, mean)
    tl.store(out_ptr + M + m, m2 / count)


@triton.jit
def scans(x_ptr, y_ptr, out_ptr, M: tl.constexpr, N: tl.constexpr):
    m, n = tl.arange(0, M), tl.arange(0, N)
    at = m[:, None] * N + n[None, :]
    x, y = tl.load(x_ptr + at), tl.load(y_ptr + at)
    tl.store(out_ptr + at, tl.cumsum(x, 0))
    tl.store(out_ptr + M * N + at, tl.cumsum(x, 1, reverse=True))
    scale, shift = tl.associative_scan((x, y), 1, composed)
    tl.store(out_ptr + 2 * M * N + at, scale)
    tl.store(out_ptr + 3 * M * N + at, shift)
    scale, shift = tl.associative_scan((x, y), 0, composed, reverse=True)
    tl.store(out_ptr + 4 * M * N + at, scale)
    tl.store(out_ptr + 5 * M * N + at, shift)


@triton.jit
def sorts(x_ptr, out_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n = tl.arange(0, M), tl.arange(0, N)
    at = m[:, None] * N + n[None, :]
    x = tl.load(x_ptr + at)
    tl.store(out_ptr + at, tl.sort(x))
    tl.store(out_ptr + M * N + at, tl.sort(x, descending=True))
    tl.store(out_ptr + 2 * M * N + at, tl.flip(x, 1))
    k = tl.arange(0, K)
    tl.store(out_ptr + 3 * M * N + m[:, None] * K + k[None, :], tl.topk(x, K))


@triton.jit
def moves(x_ptr, index_ptr, out_ptr, M: tl.constexpr, N: tl.constexpr):
    m, n = tl.arange(0, M), tl.arange(0, N)
    at = m[:, None] * N + n[None, :]
    x = tl.load(x_ptr + at)
    tl.store(out_ptr + n[:, None] * M + m[None, :], tl.trans(x))
    out_ptr += M * N
    tl.store(out_ptr + at, tl.gather(x, tl.load(index_ptr + at), 0))
    tl.store(out_ptr + M * N + at, tl.gather(x, tl.load(index_ptr + M * N + at), 1))
    out_ptr += 2 * M * N
    left, right = tl.split(tl.reshape(x, (M, N // 2, 2)))
    half = tl.arange(0, N // 2)
    tl.store(out_ptr + m[:, None] * (N // 2) + half[None, :], left - right)
    out_ptr += M * N // 2
    tl.store(out_ptr + at, tl.interleave(right, left))
    out_ptr += M * N
    tl.store(
        out_ptr + tl.arange(0, M * N),
        tl.ravel(tl.permute(tl.reshape(x, (2, M // 2, N)), (1, 2, 0))),
    )


@triton.jit
def histograms(x_ptr, mask_ptr, out_ptr, N: tl.constexpr, BINS: tl.constexpr):
    n, bins = tl.arange(0, N), tl.arange(0, BINS)
    x, mask = tl.load(x_ptr + n), tl.load(mask_ptr + n) != 0
    tl.store(out_ptr + bins, tl.histogram(x, BINS))
    tl.store(out_ptr + BINS + bins, tl.histogram(x, BINS, mask=mask))


@triton.jit
def atomics(
    index_ptr, x_ptr, f_ptr, out_ptr, sums_ptr, halves_ptr, BINS: tl.constexpr, N: tl.constexpr
):
    at = tl.program_id(0) * N + tl.arange(0, N)
    index, x, f = tl.load(index_ptr + at), tl.load(x_ptr + at), tl.load(f_ptr + at)
    tl.atomic_add(out_ptr + index, x)
    tl.atomic_max(out_ptr + BINS + index, x)
    tl.atomic_min(out_ptr + 2 * BINS + index, x)
    tl.atomic_or(out_ptr + 3 * BINS + index, x)
    tl.atomic_and(out_ptr + 4 * BINS + index, x)
    tl.atomic_xor(out_ptr + 5 * BINS + index, x)
    tl.atomic_add(sums_ptr + index, f)
    tl.atomic_max(sums_ptr + BINS + index, f)
    tl.atomic_min(sums_ptr + 2 * BINS + index, f)
    tl.atomic_add(halves_ptr + tl.arange(0, N), f.to(halves_ptr.dtype.element_ty))


@triton.jit
def functions(x_ptr, out_ptr, N: tl.constexpr):
    n = tl.arange(0, N)
    x = tl.load(x_ptr + n)
    tl.store(out_ptr + n, tl.exp(x))
    tl.store(out_ptr + N + n, tl.log(tl.abs(x)))
    tl.store(out_ptr + 2 * N + n, tl.sin(x))
    tl.store(out_ptr + 3 * N + n, tl.cos(x))
    tl.store(out_ptr + 4 * N + n, tl.sqrt_rn(tl.abs(x)))
    tl.store(out_ptr + 5 * N + n, tl.rsqrt(tl.abs(x)))
    tl.store(out_ptr + 6 * N + n, tl.erf(x))
    tl.store(out_ptr + 7 * N + n, tl.sigmoid(x))
    tl.store(out_ptr + 8 * N + n, tl.floor(x))
    tl.store(out_ptr + 9 * N + n, tl.div_rn(1.0, x))
    tl.store(out_ptr + 10 * N + n, libdevice.tanh(x))
    tl.store(out_ptr + 11 * N + n, libdevice.log1p(tl.abs(x)))
    tl.store(out_ptr + 12 * N + n, libdevice.expm1(x))
    tl.store(out_ptr + 13 * N + n, libdevice.rint(x))
    tl.store(out_ptr + 14 * N + n, libdevice.pow(tl.abs(x), 1.7))
    tl.store(out_ptr + 15 * N + n, libdevice.atan(x))
    tl.store(out_ptr + 16 * N + n, libdevice.fmod(x, 0.37))
    tl.store(out_ptr + 17 * N + n, libdevice.lgamma(tl.abs(x) + 0.5))
    tl.store(out_ptr + 18 * N + n, tl.fma(x, x, -1.0))


@triton.jit
def functions_double(x_ptr, out_ptr, N: tl.constexpr):
    n = tl.arange(0, N)
    x = tl.load(x_ptr + n)
    tl.store(out_ptr + n, libdevice.exp(x))
    tl.store(out_ptr + N + n, libdevice.erf(x))
    tl.store(out_ptr + 2 * N + n, libdevice.sqrt(libdevice.abs(x)))
    tl.store(out_ptr + 3 * N + n, 1.0 / x)
    tl.store(out_ptr + 4 * N + n, libdevice.sin(x))


@triton.jit
def integers(x_ptr, y_ptr, out_ptr, N: tl.constexpr):
    n = tl.arange(0, N)
    x, y = tl.load(x_ptr + n), tl.load(y_ptr + n)
    tl.store(out_ptr + n, x // y)
    tl.store(out_ptr + N + n, x % y)
    tl.store(out_ptr + 2 * N + n, x * y - y)
    tl.store(out_ptr + 3 * N + n, x >> 3)
    tl.store(out_ptr + 4 * N + n, (x << 5) ^ (x & y))
    tl.store(out_ptr + 5 * N + n, tl.minimum(x, y) | tl.abs(y))
    tl.store(out_ptr + 6 * N + n, (x < y).to(x.dtype) + (x == y).to(x.dtype))


@triton.jit
def high_products(x_ptr, y_ptr, out_ptr, N: tl.constexpr):
    n = tl.arange(0, N)
    x, y = tl.load(x_ptr + n), tl.load(y_ptr + n)
    tl.store(out_ptr + n, tl.umulhi(x, y))
    tl.store(out_ptr + N + n, libdevice.popc(x))
    tl.store(out_ptr + 2 * N + n, libdevice.clz(x))
    tl.store(out_ptr + 3 * N + n, libdevice.brev(x))
    tl.store(out_ptr + 4 * N + n, libdevice.byte_perm(x, y, 0x3715))
    tl.store(out_ptr + 5 * N + n, libdevice.ffs(x))


@triton.jit
def assembled(x_ptr, y_ptr, out_ptr, N: tl.constexpr):
    # Each 32-bit register holds four bytes, and the inline assembly returns two registers.
    n = tl.arange(0, N)
    x, y = tl.load(x_ptr + n), tl.load(y_ptr + n)
    low = tl.inline_asm_elementwise(
        "{ .reg .b32 t; prmt.b32 t, $1, $2, 0x6420; lop3.b32 $0, t, $1, $2, 0x96; }",
        "=r,r,r", [x, y], dtype=tl.int8, is_pure=True, pack=4,
    )  # fmt: skip
    tl.store(out_ptr + n, low)


@triton.jit
def casts(x_ptr, out_ptr, N: tl.constexpr, TO: tl.constexpr):
    n = tl.arange(0, N)
    tl.store(out_ptr + n, tl.load(x_ptr + n).to(TO))


@triton.jit
def random_numbers(out_ptr, uniform_ptr, seed, N: tl.constexpr):
    n = tl.arange(0, N)
    a, b, c, d = tl.randint4x(seed, n)
    tl.store(out_ptr + n, a)
    tl.store(out_ptr + N + n, b)
    tl.store(out_ptr + 2 * N + n, c)
    tl.store(out_ptr + 3 * N + n, d)
    tl.store(uniform_ptr + n, tl.rand(seed, n))
