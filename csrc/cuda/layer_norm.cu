// Layer norm of a residual sum, forward and backward. Each kernel reads every operand once.
//
// Half a warp, one warp or two warps compute a row of up to 1024 elements, and keep the sum
// residual + dropout(x + x_bias) in registers. Longer rows take four warps or all threads of a
// block. For rows that fill the lanes exactly (384, 512, 768 and 1024 elements), there are kernels
// that do not test whether a column exists.
//
// The thread blocks are persistent, and each block takes rows at a regular distance. While a row is
// computed, the next rows are copied to shared memory (row_ring.cuh), so that the reads from memory
// continue during the arithmetic.
//
// The forward does not store the sum residual + dropout(x + x_bias); the backward computes it
// again. Each warp keeps its share of the parameters' gradients in registers; a block adds the
// shares of its warps and writes the sum once, and sum_partials adds the sums of the blocks.
//
// By the counts in README.md, memory is the limit of both passes on an H200, even with dropout.

#include <algorithm>

#include "hopper/device.cuh"
#include "layer_norm.cuh"
#include "reduce.cuh"
#include "row_ring.cuh"

namespace fastbert::cuda {
namespace {

// The argument of a kernel: its params, and whether every matrix allows 16-byte access.
template <class P>
struct Launch {
  P p;
  bool wide;
};

// Reads a parameter, such as the weight, in fp32. If a block has several rows at a time, the
// parameter is copied to shared memory once, and otherwise it is read from global memory. The
// elements of an absent parameter are 0.
template <class L>
struct Shared {
  static constexpr int kCount = kWidth<typename L::Element>, kPart = kWidth<float>;
  static constexpr bool kStaged = L::kRows > 1;
  // The parts of 16 bytes of a vector are stored in different rows of `part`, so that the lanes of
  // a warp read without bank conflicts.
  float4 part[kStaged ? L::kVectors * kCount / kPart : 1][kStaged ? L::kThreads : 1];

  // The caller must synchronize the block between `fill` and the first `read`.
  __device__ void fill(const Parameter& parameter, int columns) {
    if constexpr (kStaged) {
      // Neighbouring threads read neighbouring parts.
      for (int n = threadIdx.x; n < L::kThreads * L::kElements / kPart; n += L::kBlock) {
        float values[kPart] = {};
        if (parameter.data) fastbert::cuda::load(parameter, n * kPart, columns, values);
        const int vector = n / (kCount / kPart);
        part[vector / L::kThreads * (kCount / kPart) + n % (kCount / kPart)][vector % L::kThreads] =
            {values[0], values[1], values[2], values[3]};
      }
    }
  }
  __device__ void read(const Parameter& parameter, int v, int columns, float (&out)[kCount]) const {
    if constexpr (kStaged) {
#pragma unroll
      for (int e = 0; e < kCount / kPart; ++e) {
        const float4 x = part[v * (kCount / kPart) + e][threadIdx.x % L::kThreads];
        out[kPart * e] = x.x, out[kPart * e + 1] = x.y;
        out[kPart * e + 2] = x.z, out[kPart * e + 3] = x.w;
      }
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) out[i] = 0.0f;
      if (parameter.data) load_in_pairs(parameter, L::column(v), columns, out);
    }
  }
};

// Dropout for the columns of a thread. If kHeld is true, registers hold the parts of Philox that
// depend only on the columns.
template <class L, bool kHeld>
struct ColumnDropout {
  // The number of groups of four elements in a vector.
  static constexpr int kGroups = kWidth<typename L::Element> / 4;

  uint64_t seed;
  bool active;  // whether any element can be dropped
  float scale;
  uint32_t last_dropped;  // the largest word that drops its element
  ColumnPhilox held[kHeld ? L::kVectors : 1][kGroups];

  __device__ explicit ColumnDropout(const Dropout& dropout)
      : seed(dropout.seed ? static_cast<uint64_t>(*dropout.seed) : 0),
        active(dropout.seed && dropout.threshold > 0),
        scale(active ? dropout.scale : 1.0f),
        last_dropped((dropout.threshold << 8) - 1) {
    if constexpr (kHeld) {
      if (!active) return;
#pragma unroll
      for (int v = 0; v < L::kVectors; ++v) {
#pragma unroll
        for (int g = 0; g < kGroups; ++g) held[v][g] = of_group(v, g);
      }
    }
  }
  __device__ ColumnPhilox of_group(int v, int g) const {
    return ColumnPhilox(seed, static_cast<uint32_t>(L::column(v) / 4 + g));
  }

  // Replaces each element of x by base + scale * x, rounded once, or by base if dropout drops the
  // element. Bit v * kWidth + i of the result is 1 if dropout keeps element [v][i].
  __device__ uint32_t add(int64_t row, const typename L::Vectors& base,
                          typename L::Vectors& x) const {
    static_assert(L::kElements <= 32);
    uint32_t kept = ~0u;
#pragma unroll
    for (int v = 0; v < L::kVectors; ++v) {
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        const ColumnPhilox philox = kHeld ? held[kHeld ? v : 0][g] : of_group(v, g);
        const Words words = philox.of_row(seed, static_cast<uint32_t>(row));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const bool keep = words.word[i] > last_dropped;
          const int n = 4 * g + i;
          x[v][n] = keep ? fmaf(x[v][n], scale, base[v][n]) : base[v][n];
          if (!keep) kept &= ~(1u << (v * kWidth<typename L::Element> + n));
        }
      }
    }
    return kept;
  }
};

// Computes the sum residual + dropout(x + x_bias) of a row. Bit v * kWidth + i of the result is 1
// if dropout keeps element [v][i].
template <class L, class P, bool kHeld>
__device__ uint32_t sum_of(const P& p, const Shared<L>& x_biases,
                           const ColumnDropout<L, kHeld>& dropout, int64_t row, const RowPart<L>& x,
                           const RowPart<L>& residual, typename L::Vectors& out) {
  constexpr int kCount = kWidth<typename L::Element>;
  typename L::Vectors base;
#pragma unroll
  for (int v = 0; v < L::kVectors; ++v) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      out[v][i] = x[v][i];
      base[v][i] = residual[v][i];
    }
  }
  if (p.x_bias.data) {
#pragma unroll
    for (int v = 0; v < L::kVectors; ++v) {
      float bias[kCount];
      x_biases.read(p.x_bias, v, static_cast<int>(p.columns), bias);
#pragma unroll
      for (int i = 0; i < kCount; ++i) out[v][i] += bias[i];
    }
  }
  if (dropout.active) return dropout.add(row, base, out);
#pragma unroll
  for (int v = 0; v < L::kVectors; ++v) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) out[v][i] += base[v][i];
  }
  return ~0u;
}

template <class L>
__device__ void store_vector(void* matrix, int64_t row, int v, int columns, bool wide,
                             const float (&x)[kWidth<typename L::Element>]) {
  using T = typename L::Element;
  T* to = static_cast<T*>(matrix) + row * columns;
  if (L::kExact)
    store(to, L::column(v), L::kThreads * L::kElements, true, x);
  else
    store(to, L::column(v), columns, wide, x);
}

// The number of blocks of the forward that share a multiprocessor. This number limits the registers
// of each thread. If a thread has 128 bytes of a row, the blocks need so much shared memory that
// only two fit. At most two blocks of 256 threads share a multiprocessor.
template <class L>
constexpr int kResident = L::kBlock > 128 || L::kVectors* kAccess > 96 ? 2 : (L::kExact ? 4 : 3);

template <class L>
__global__ void __launch_bounds__(L::kBlock, kResident<L>)
    forward_kernel(Launch<LayerNormForward> k) {
  constexpr int kCount = kWidth<typename L::Element>;
  extern __shared__ __align__(16) unsigned char ring_memory[];
  __shared__ RowSums<L::kThreads> shared[2][L::kRows];
  __shared__ Shared<L> weights, biases, x_biases;
  const LayerNormForward& p = k.p;
  const int columns = L::kExact ? L::kThreads * L::kElements : static_cast<int>(p.columns);
  const float inverse = 1.0f / static_cast<float>(columns);

  RowRing<L, 2> ring(ring_memory, {p.x, p.residual}, p.rows, columns, k.wide);
  weights.fill(p.weight, columns);
  x_biases.fill(p.x_bias, columns);
  biases.fill(p.bias, columns);
  const ColumnDropout<L, L::kExact> dropout(p.dropout);
  if (Shared<L>::kStaged) __syncthreads();

  // All threads of a block make the same number of iterations. Rows after the last row are
  // computed, but not written.
  for (int64_t first = L::first_row(); first < p.rows; first += L::row_step()) {
    const int64_t row = first + L::group();
    const bool exists = L::exists(row, p.rows);
    RowPart<L> parts[2];
    ring.take(parts);
    typename L::Vectors sum;
    sum_of<L>(p, x_biases, dropout, row, parts[0], parts[1], sum);
    float total = 0.0f;
#pragma unroll
    for (int v = 0; v < L::kVectors; ++v) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) total += sum[v][i];
    }
    const float first_mean = row_sum(total, shared[0][L::group()]) * inverse;
    // The sum of the deviations from the first mean gives the rounding error of this mean, which
    // matters for elements around 1e4.
    Pair deviations = {0.0f, 0.0f};
#pragma unroll
    for (int v = 0; v < L::kVectors; ++v) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const float d = L::inside(L::column(v) + i, columns) ? sum[v][i] - first_mean : 0.0f;
        sum[v][i] = d;
        deviations.a += d;
        deviations.b += d * d;
      }
    }
    deviations = row_sum(deviations, shared[1][L::group()]);
    const float correction = deviations.a * inverse;
    const float variance = deviations.b * inverse - correction * correction;
    const float rstd = 1.0f / sqrtf(fmaxf(variance, 0.0f) + p.eps);
#pragma unroll
    for (int v = 0; v < L::kVectors; ++v) {
      float weight[kCount], bias[kCount];
      weights.read(p.weight, v, columns, weight);
      biases.read(p.bias, v, columns, bias);
#pragma unroll
      for (int i = 0; i < kCount; ++i)
        sum[v][i] = (sum[v][i] - correction) * rstd * weight[i] + bias[i];
    }
    if (!exists) continue;
#pragma unroll
    for (int v = 0; v < L::kVectors; ++v) store_vector<L>(p.y, row, v, columns, k.wide, sum[v]);
    if (threadIdx.x % L::kThreads == 0) {
      p.mean[row] = first_mean + correction;
      p.rstd[row] = rstd;
    }
  }
}

// Adds the shares of a parameter's gradient that the threads of different rows hold, and writes the
// totals of the block to a row of the partial sums.
template <class L>
__device__ void write_partial(float* to, const typename L::Vectors& own, int columns, bool wide,
                              float (&memory)[L::kRows > 1 ? L::kThreads * L::kElements : 1]) {
  constexpr int kCount = kWidth<typename L::Element>;
  if constexpr (L::kRows == 1) {
#pragma unroll
    for (int v = 0; v < L::kVectors; ++v) store(to, L::column(v), columns, wide, own[v]);
    return;
  } else {
    for (int turn = 0; turn < L::kRows; ++turn) {
      if (turn == L::group()) {
#pragma unroll
        for (int v = 0; v < L::kVectors; ++v) {
#pragma unroll
          for (int i = 0; i < kCount; ++i) {
            // Neighbouring lanes use neighbouring banks.
            float& sum = memory[(v * kCount + i) * L::kThreads + threadIdx.x % L::kThreads];
            sum = turn == 0 ? own[v][i] : sum + own[v][i];
          }
        }
      }
      __syncthreads();
    }
    for (int n = threadIdx.x; n < columns; n += L::kBlock) {
      const int lane = n / kCount % L::kThreads, v = n / (kCount * L::kThreads);
      to[n] = memory[(v * kCount + n % kCount) * L::kThreads + lane];
    }
    __syncthreads();
  }
}

// Computes dsum = rstd (g - mean(g) - h mean(g h)), with g = dy * weight and the normalised row h.
template <class L>
__global__ void __launch_bounds__(L::kBlock, 1) backward_kernel(Launch<LayerNormBackward> k) {
  constexpr int kCount = kWidth<typename L::Element>;
  extern __shared__ __align__(16) unsigned char ring_memory[];
  __shared__ RowSums<L::kThreads> shared[2][L::kRows];
  __shared__ Shared<L> weights, x_biases;
  __shared__ float memory[L::kRows > 1 ? L::kThreads * L::kElements : 1];
  const LayerNormBackward& p = k.p;
  const int columns = L::kExact ? L::kThreads * L::kElements : static_cast<int>(p.columns);
  const float inverse = 1.0f / static_cast<float>(columns);

  RowRing<L, 3> ring(ring_memory, {p.dy, p.x, p.residual}, p.rows, columns, k.wide);
  weights.fill(p.weight, columns);
  x_biases.fill(p.x_bias, columns);
  const ColumnDropout<L, false> dropout(p.dropout);
  if (Shared<L>::kStaged) __syncthreads();

  typename L::Vectors dweight = {}, dbias = {}, dx_bias = {};
  int turn = 0;
  int64_t row = L::first_row() + L::group();
  float next_mean = row < p.rows ? p.mean[row] : 0.0f;
  float next_rstd = row < p.rows ? p.rstd[row] : 0.0f;
  // All threads of a block make the same number of iterations. Rows after the last row only take
  // part in the reductions.
  for (int64_t first = L::first_row(); first < p.rows; first += L::row_step(), turn ^= 1) {
    row = first + L::group();
    const bool exists = L::exists(row, p.rows);
    const float mean = next_mean, rstd = next_rstd;
    if (row + L::row_step() < p.rows) {
      next_mean = p.mean[row + L::row_step()];
      next_rstd = p.rstd[row + L::row_step()];
    }
    RowPart<L> parts[3];
    ring.take(parts);
    typename L::Vectors h, g;
    uint32_t kept = 0;
    Pair sums = {0.0f, 0.0f};
    if (exists) {
      kept = sum_of<L>(p, x_biases, dropout, row, parts[1], parts[2], h);
#pragma unroll
      for (int v = 0; v < L::kVectors; ++v) {
        float weight[kCount];
        weights.read(p.weight, v, columns, weight);
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
          h[v][i] = (h[v][i] - mean) * rstd;
          g[v][i] = parts[0][v][i];
          dbias[v][i] += g[v][i];
          dweight[v][i] += g[v][i] * h[v][i];
          // The product is rounded here (no FMA), so the mean of g adds up the same rounded
          // products. Therefore g - mean(g) is exactly 0 in a row of one column.
          g[v][i] = __fmul_rn(g[v][i], weight[i]);
          sums.a += g[v][i];
          sums.b += g[v][i] * h[v][i];
        }
      }
    }
    sums = row_sum(sums, shared[turn][L::group()]);
    if (!exists) continue;
    const float g_mean = sums.a * inverse, gh_mean = sums.b * inverse;
#pragma unroll
    for (int v = 0; v < L::kVectors; ++v) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) g[v][i] = (g[v][i] - g_mean - h[v][i] * gh_mean) * rstd;
      store_vector<L>(p.dsum, row, v, columns, k.wide, g[v]);
      if (p.dropout.seed) {
#pragma unroll
        for (int i = 0; i < kCount; ++i)
          g[v][i] = kept >> (v * kCount + i) & 1 ? g[v][i] * dropout.scale : 0.0f;
        store_vector<L>(p.dx, row, v, columns, k.wide, g[v]);
      }
#pragma unroll
      for (int i = 0; i < kCount; ++i) dx_bias[v][i] += g[v][i];
    }
  }
  // The sums of absent biases are computed, but not written.
  float* partial = p.partial + static_cast<int64_t>(blockIdx.x) * 3 * columns;
  write_partial<L>(partial, dweight, columns, k.wide, memory);
  if (p.dbias) write_partial<L>(partial + columns, dbias, columns, k.wide, memory);
  if (p.x_bias.data) write_partial<L>(partial + 2 * columns, dx_bias, columns, k.wide, memory);
}

template <class T, class P>
bool wide_access(const P& p) {
  const bool residual = !p.residual.data || aligned(p.residual.data, p.residual.stride, sizeof(T));
  return p.columns % kWidth<T> == 0 && aligned(p.x.data, p.x.stride, sizeof(T)) && residual;
}

// Returns how many blocks of the forward the GPU runs at the same time. CUDA reserves 1 KiB of the
// shared memory of each block for itself.
template <class L>
int64_t resident_blocks() {
  constexpr int kBytes = RowRing<L, 2>::kBytes + 3 * sizeof(Shared<L>) + 1024;
  const int fit = attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor) / kBytes;
  return attribute(cudaDevAttrMultiProcessorCount) * std::clamp(fit, 1, kResident<L>);
}

template <class T>
cudaError_t launch_forward(const LayerNormForward& p, cudaStream_t stream) {
  const bool wide = wide_access<T>(p) && aligned(p.y, p.columns, sizeof(T));
  const Launch<LayerNormForward> k = {p, wide};
  const auto start = [&](auto layout) {
    using L = decltype(layout);
    const int64_t blocks = std::min(ceil_div(p.rows, L::kRows), resident_blocks<L>());
    return launch(forward_kernel<L>, dim3(static_cast<unsigned>(blocks)), L::kBlock, k, stream,
                  RowRing<L, 2>::kBytes);
  };
  if (wide && p.columns == 384) return start(Layout<T, 128, 16, 24, true>{});
  if (wide && p.columns == 512) return start(Layout<T, 128, 32, 16, true>{});
  if (wide && p.columns == 768) return start(Layout<T, 128, 32, 24, true>{});
  if (wide && p.columns == 1024) return start(Layout<T, 128, 32, 32, true>{});
  if (p.columns <= 1024) return start(Layout<T, 128, 32, 32, false>{});
  if (p.columns <= 2048) return start(Layout<T, 256, 128, 16, false>{});
  return start(Layout<T, 256, 256, 24, false>{});
}

template <class T>
cudaError_t launch_backward(const LayerNormBackward& p, cudaStream_t stream) {
  const bool wide = wide_access<T>(p) && aligned(p.dy.data, p.dy.stride, sizeof(T)) &&
                    aligned(p.dsum, p.columns, sizeof(T)) && aligned(p.dx, p.columns, sizeof(T)) &&
                    aligned(p.partial, p.columns, sizeof(float));
  const Launch<LayerNormBackward> k = {p, wide};
  const dim3 grid(static_cast<unsigned>(layer_norm_partials(p.rows)));
  const auto start = [&](auto layout) {
    using L = decltype(layout);
    return launch(backward_kernel<L>, grid, L::kBlock, k, stream, RowRing<L, 3>::kBytes);
  };
  // The layouts have at most 24 elements of a row in each lane, because registers would spill with
  // 32.
  if (wide && p.columns == 384) return start(Layout<T, 128, 16, 24, true>{});
  if (wide && p.columns == 512) return start(Layout<T, 128, 32, 16, true>{});
  if (wide && p.columns == 768) return start(Layout<T, 128, 32, 24, true>{});
  if (wide && p.columns == 1024) return start(Layout<T, 256, 64, 16, true>{});
  if (p.columns <= 1024) return start(Layout<T, 256, 64, 16, false>{});
  return start(Layout<T, 384, 384, 16, false>{});
}

}  // namespace

cudaError_t layer_norm_forward(const LayerNormForward& p, cudaStream_t stream) {
  if (p.columns < 1 || p.columns > kMaxColumns) return cudaErrorInvalidValue;
  return with_format(p.format,
                     [&](auto element) { return launch_forward<decltype(element)>(p, stream); });
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
