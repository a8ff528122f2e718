// Layer norm of a residual sum, forward and backward. Each kernel reads every operand once.
//
// In the forward, a warp (rows of up to 1024 elements) or a block of 256 threads owns a row. It
// keeps the sum residual + dropout(x + x_bias) in registers and makes two passes over it. The
// backward forms the sum again instead of storing it. Each block strides over the rows, keeps its
// share of the parameters' gradients in registers and writes it once, and sum_partials adds the
// shares.

#include "layer_norm.cuh"
#include "reduce.cuh"

namespace fastbert::cuda {
namespace {

// The argument of a kernel: its params, and whether every matrix allows 16-byte access.
template <class P>
struct Launch {
  P p;
  bool wide;
};

// The layout of a row over threads: each thread holds kElements floats, in vectors of kWidth<T>.
template <class T, int kThreads, int kElements>
struct Layout {
  static constexpr int kVectors = kElements / kWidth<T>;
  static_assert(kElements % kWidth<T> == 0);

  static __device__ int column(int vector) {
    return (vector * kThreads + static_cast<int>(threadIdx.x) % kThreads) * kWidth<T>;
  }
};

// Computes kWidth<T> elements of residual + dropout(x + x_bias).
template <class T, class P>
__device__ void load_sum(const Launch<P>& k, int64_t row, int first, float (&sum)[kWidth<T>]) {
  const int columns = static_cast<int>(k.p.columns);
  load(row_of<T>(k.p.x, row), first, columns, k.wide, sum);
  float other[kWidth<T>];
  if (k.p.x_bias.data) {
    load_in_pairs(k.p.x_bias, first, columns, other);
#pragma unroll
    for (int i = 0; i < kWidth<T>; ++i) sum[i] += other[i];
  }
  if (k.p.dropout.seed) drop(k.p.dropout, row, first, sum);
  if (k.p.residual.data) {
    load(row_of<T>(k.p.residual, row), first, columns, k.wide, other);
#pragma unroll
    for (int i = 0; i < kWidth<T>; ++i) sum[i] += other[i];
  }
}

template <int kRowThreads>
constexpr int kForwardThreads = kRowThreads < 128 ? 128 : kRowThreads;

template <class T, bool kHasBias, int kThreads, int kElements>
__global__ void __launch_bounds__(kForwardThreads<kThreads>)
    forward_kernel(Launch<LayerNormForward> k) {
  using L = Layout<T, kThreads, kElements>;
  __shared__ RowSums<kThreads> shared[2];
  const LayerNormForward& p = k.p;
  const int columns = static_cast<int>(p.columns);
  constexpr int kRows = kForwardThreads<kThreads> / kThreads;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kRows + threadIdx.x / kThreads;
  // Only whole warps return, because kRows is 1 if a row has more than one warp.
  if (row >= p.rows) return;

  float sum[L::kVectors][kWidth<T>];
  float total = 0.0f;
#pragma unroll
  for (int v = 0; v < L::kVectors; ++v) {
    load_sum<T>(k, row, L::column(v), sum[v]);
#pragma unroll
    for (int i = 0; i < kWidth<T>; ++i) total += sum[v][i];
  }
  const float inverse = 1.0f / static_cast<float>(columns);
  const float first_mean = row_sum(Pair{total, 0.0f}, shared[0]).a * inverse;
  // The sum of the deviations gives the rounding error of the mean, which matters around 1e4.
  Pair deviations = {0.0f, 0.0f};
#pragma unroll
  for (int v = 0; v < L::kVectors; ++v) {
#pragma unroll
    for (int i = 0; i < kWidth<T>; ++i) {
      const float d = L::column(v) + i < columns ? sum[v][i] - first_mean : 0.0f;
      sum[v][i] = d;
      deviations.a += d;
      deviations.b += d * d;
    }
  }
  deviations = row_sum(deviations, shared[1]);
  const float correction = deviations.a * inverse;
  const float variance = deviations.b * inverse - correction * correction;
  const float rstd = 1.0f / sqrtf(fmaxf(variance, 0.0f) + p.eps);
#pragma unroll
  for (int v = 0; v < L::kVectors; ++v) {
    float weight[kWidth<T>], bias[kWidth<T>];
    load_in_pairs(p.weight, L::column(v), columns, weight);
    // In pairs, the 16-bit kernels for sm_90 would spill.
    if (kHasBias) load(p.bias, L::column(v), columns, bias);
#pragma unroll
    for (int i = 0; i < kWidth<T>; ++i) {
      sum[v][i] = (sum[v][i] - correction) * rstd * weight[i];
      if (kHasBias) sum[v][i] += bias[i];
    }
    store(static_cast<T*>(p.y) + row * columns, L::column(v), columns, k.wide, sum[v]);
  }
  if (threadIdx.x % kThreads == 0) {
    p.mean[row] = first_mean + correction;
    p.rstd[row] = rstd;
  }
}

// Computes dsum = rstd (g - mean(g) - h mean(g h)), with g = dy * weight and the normalised row h.
template <class T, int kThreads, int kElements>
__global__ void __launch_bounds__(kThreads) backward_kernel(Launch<LayerNormBackward> k) {
  using L = Layout<T, kThreads, kElements>;
  __shared__ RowSums<kThreads> shared[2];
  const LayerNormBackward& p = k.p;
  const int columns = static_cast<int>(p.columns);
  const float inverse = 1.0f / static_cast<float>(columns);

  float dweight[L::kVectors][kWidth<T>] = {}, dbias[L::kVectors][kWidth<T>] = {};
  float dx_bias[L::kVectors][kWidth<T>] = {};
  int turn = 0;
  for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x, turn ^= 1) {
    const float mean = p.mean[row], rstd = p.rstd[row];
    float h[L::kVectors][kWidth<T>], g[L::kVectors][kWidth<T>];
    Pair sums = {0.0f, 0.0f};
#pragma unroll
    for (int v = 0; v < L::kVectors; ++v) {
      float weight[kWidth<T>];
      load_sum<T>(k, row, L::column(v), h[v]);
      load(row_of<T>(p.dy, row), L::column(v), columns, k.wide, g[v]);
      load_in_pairs(p.weight, L::column(v), columns, weight);
#pragma unroll
      for (int i = 0; i < kWidth<T>; ++i) {
        h[v][i] = (h[v][i] - mean) * rstd;
        dbias[v][i] += g[v][i];
        dweight[v][i] += g[v][i] * h[v][i];
        // Without an FMA, g is rounded as in its mean, so that a row of one column cancels exactly.
        g[v][i] = __fmul_rn(g[v][i], weight[i]);
        sums.a += g[v][i];
        sums.b += g[v][i] * h[v][i];
      }
    }
    sums = row_sum(sums, shared[turn]);
    const float g_mean = sums.a * inverse, gh_mean = sums.b * inverse;
#pragma unroll
    for (int v = 0; v < L::kVectors; ++v) {
      const int first = L::column(v);
#pragma unroll
      for (int i = 0; i < kWidth<T>; ++i) g[v][i] = (g[v][i] - g_mean - h[v][i] * gh_mean) * rstd;
      store(static_cast<T*>(p.dsum) + row * columns, first, columns, k.wide, g[v]);
      if (p.dropout.seed) {
        drop(p.dropout, row, first, g[v]);
        store(static_cast<T*>(p.dx) + row * columns, first, columns, k.wide, g[v]);
      }
#pragma unroll
      for (int i = 0; i < kWidth<T>; ++i) dx_bias[v][i] += g[v][i];
    }
  }
  // The sums of absent biases are formed, but not written.
  float* partial = p.partial + static_cast<int64_t>(blockIdx.x) * 3 * columns;
#pragma unroll
  for (int v = 0; v < L::kVectors; ++v) {
    const int first = L::column(v);
    store(partial, first, columns, k.wide, dweight[v]);
    if (p.dbias) store(partial + columns, first, columns, k.wide, dbias[v]);
    if (p.x_bias.data) store(partial + 2 * columns, first, columns, k.wide, dx_bias[v]);
  }
}

template <class T, class P>
bool wide_access(const P& p) {
  const bool residual = !p.residual.data || aligned(p.residual.data, p.residual.stride, sizeof(T));
  return p.columns % kWidth<T> == 0 && aligned(p.x.data, p.x.stride, sizeof(T)) && residual;
}

template <class T, bool kHasBias>
cudaError_t launch_forward(const LayerNormForward& p, cudaStream_t stream) {
  const bool wide = wide_access<T>(p) && aligned(p.y, p.columns, sizeof(T));
  const Launch<LayerNormForward> k = {p, wide};
  if (p.columns <= 1024) {
    const dim3 grid(static_cast<unsigned>(ceil_div(p.rows, kForwardThreads<32> / 32)));
    return launch(forward_kernel<T, kHasBias, 32, 32>, grid, kForwardThreads<32>, k, stream);
  }
  return launch(forward_kernel<T, kHasBias, 256, 24>, dim3(static_cast<unsigned>(p.rows)), 256, k,
                stream);
}

template <class T>
cudaError_t launch_backward(const LayerNormBackward& p, cudaStream_t stream) {
  const bool wide = wide_access<T>(p) && aligned(p.dy.data, p.dy.stride, sizeof(T)) &&
                    aligned(p.dsum, p.columns, sizeof(T)) && aligned(p.dx, p.columns, sizeof(T)) &&
                    aligned(p.partial, p.columns, sizeof(float));
  const Launch<LayerNormBackward> k = {p, wide};
  const dim3 grid(static_cast<unsigned>(layer_norm_partials(p.rows)));
  return p.columns <= 1024 ? launch(backward_kernel<T, 128, 8>, grid, 128, k, stream)
                           : launch(backward_kernel<T, 384, 16>, grid, 384, k, stream);
}

}  // namespace

cudaError_t layer_norm_forward(const LayerNormForward& p, cudaStream_t stream) {
  if (p.columns < 1 || p.columns > kMaxColumns) return cudaErrorInvalidValue;
  return with_format(p.format, [&](auto element) {
    return p.bias.data ? launch_forward<decltype(element), true>(p, stream)
                       : launch_forward<decltype(element), false>(p, stream);
  });
}

cudaError_t layer_norm_backward(const LayerNormBackward& p, cudaStream_t stream) {
  if (p.columns < 1 || p.columns > kMaxColumns) return cudaErrorInvalidValue;
  cudaError_t error = with_format(
      p.format, [&](auto element) { return launch_backward<decltype(element)>(p, stream); });
  void* const outputs[] = {p.dweight, p.dbias, p.x_bias.data ? p.dx_bias : nullptr};
  for (int i = 0; i < 3 && error == cudaSuccess; ++i) {
    if (!outputs[i]) continue;
    const Format format = i < 2 ? p.weight.format : p.x_bias.format;
    error = sum_partials({p.partial + i * p.columns, layer_norm_partials(p.rows), p.columns,
                          3 * p.columns, outputs[i], format},
                         stream);
  }
  return error;
}

}  // namespace fastbert::cuda
