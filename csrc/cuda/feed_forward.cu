// The forward and the backward of activation(h + bias), where the activation is gelu or gelu_tanh.
//
// A thread computes a few neighbouring columns (16 bytes of a row) in all rows of its chunk of
// rows. It reads the bias once. In the backward, it adds up dh in registers and writes the sum once
// per chunk; sum_partials then adds the sums of the chunks.

#include "feed_forward.cuh"
#include "gelu.cuh"
#include "reduce.cuh"

namespace fastbert::cuda {
namespace {

constexpr int kThreads = 128;

// The argument of a kernel. `wide` is true if every matrix allows 16-byte access.
template <class P>
struct Launch {
  P p;
  bool wide;
};

// Returns the first column that the calling thread computes.
template <class T>
__device__ int64_t first_column() {
  return (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kWidth<T>;
}

template <class T, class Function>
__global__ void __launch_bounds__(kThreads) forward_kernel(Launch<ActivationForward> k) {
  const ActivationForward& p = k.p;
  const int columns = static_cast<int>(p.columns);
  if (first_column<T>() >= columns) return;
  const int first = static_cast<int>(first_column<T>());
  float bias[kWidth<T>] = {};
  if (p.bias.data) load(p.bias, first, columns, bias);
  for (int64_t row = blockIdx.y; row < p.rows; row += gridDim.y) {
    float v[kWidth<T>];
    load(row_of<T>(p.h, row), first, columns, k.wide, v);
#pragma unroll
    for (int i = 0; i < kWidth<T>; ++i) v[i] = Function::forward(v[i] + bias[i]);
    store(static_cast<T*>(p.y) + row * p.columns, first, columns, k.wide, v);
  }
}

template <class T, class Function>
__global__ void __launch_bounds__(kThreads) backward_kernel(Launch<ActivationBackward> k) {
  const ActivationBackward& p = k.p;
  const int columns = static_cast<int>(p.columns);
  if (first_column<T>() >= columns) return;
  const int first = static_cast<int>(first_column<T>());
  float bias[kWidth<T>] = {}, dbias[kWidth<T>] = {};
  if (p.bias.data) load(p.bias, first, columns, bias);
  for (int64_t row = blockIdx.y; row < p.rows; row += gridDim.y) {
    float d[kWidth<T>], h[kWidth<T>];
    load(row_of<T>(p.dy, row), first, columns, k.wide, d);
    load(row_of<T>(p.h, row), first, columns, k.wide, h);
#pragma unroll
    for (int i = 0; i < kWidth<T>; ++i) {
      d[i] *= Function::derivative(h[i] + bias[i]);
      dbias[i] += d[i];
    }
    store(static_cast<T*>(p.dh) + row * p.columns, first, columns, k.wide, d);
  }
  if (!p.dbias) return;
  float* partial = p.partial + static_cast<int64_t>(blockIdx.y) * p.columns;
  store(partial, first, columns, k.wide, dbias);
}

template <class T>
dim3 grid_of(int64_t columns, int64_t chunks) {
  return dim3(static_cast<unsigned>(ceil_div(columns, kThreads * kWidth<T>)),
              static_cast<unsigned>(chunks));
}

template <class T>
cudaError_t launch_forward(const ActivationForward& p, cudaStream_t stream) {
  const bool wide = p.columns % kWidth<T> == 0 && aligned(p.h.data, p.h.stride, sizeof(T)) &&
                    aligned(p.y, p.columns, sizeof(T));
  const dim3 grid = grid_of<T>(p.columns, p.rows < kMaxGridY ? p.rows : kMaxGridY);
  const Launch<ActivationForward> k = {p, wide};
  return p.activation == Activation::gelu_tanh
             ? launch(forward_kernel<T, GeluTanh>, grid, kThreads, k, stream)
             : launch(forward_kernel<T, Gelu>, grid, kThreads, k, stream);
}

template <class T>
cudaError_t launch_backward(const ActivationBackward& p, cudaStream_t stream) {
  const bool wide = p.columns % kWidth<T> == 0 && aligned(p.h.data, p.h.stride, sizeof(T)) &&
                    aligned(p.dy.data, p.dy.stride, sizeof(T)) &&
                    aligned(p.dh, p.columns, sizeof(T)) &&
                    aligned(p.partial, p.columns, sizeof(float));
  const dim3 grid = grid_of<T>(p.columns, activation_partials(p.rows));
  const Launch<ActivationBackward> k = {p, wide};
  return p.activation == Activation::gelu_tanh
             ? launch(backward_kernel<T, GeluTanh>, grid, kThreads, k, stream)
             : launch(backward_kernel<T, Gelu>, grid, kThreads, k, stream);
}

// The kernels store column numbers in ints, and the last block may extend beyond the last column.
// With fewer than 2^30 columns, the column numbers of the last block do not overflow.
bool supported(Activation activation, int64_t columns) {
  const bool gelu = activation == Activation::gelu || activation == Activation::gelu_tanh;
  return gelu && columns >= 1 && columns < (int64_t{1} << 30);
}

}  // namespace

cudaError_t activation_forward(const ActivationForward& p, cudaStream_t stream) {
  if (!supported(p.activation, p.columns)) return cudaErrorInvalidValue;
  return with_format(p.format,
                     [&](auto element) { return launch_forward<decltype(element)>(p, stream); });
}

cudaError_t activation_backward(const ActivationBackward& p, cudaStream_t stream) {
  if (!supported(p.activation, p.columns)) return cudaErrorInvalidValue;
  const cudaError_t error = with_format(
      p.format, [&](auto element) { return launch_backward<decltype(element)>(p, stream); });
  if (error != cudaSuccess || !p.dbias) return error;
  return sum_partials(
      {p.partial, activation_partials(p.rows), p.columns, p.columns, p.dbias, p.dbias_format},
      stream);
}

}  // namespace fastbert::cuda
