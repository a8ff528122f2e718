// The second step in the reduction of the parameters' gradients, which adds the partial sums of
// blocks of rows.
//
// A block owns 32 columns. Each of its 8 warps adds every eighth partial row in reads of 128 bytes,
// and the first warp adds the 8 results.

#include "reduce.cuh"

namespace fastbert::cuda {
namespace {

constexpr int kColumns = 32;
constexpr int kWarps = 8;

__global__ void __launch_bounds__(kColumns* kWarps) sum_partials_kernel(SumPartials p) {
  __shared__ float totals[kWarps][kColumns];
  const int lane = threadIdx.x % kColumns, warp = threadIdx.x / kColumns;
  const int64_t n = static_cast<int64_t>(blockIdx.x) * kColumns + lane;
  float total = 0.0f;
  if (n < p.columns) {
    for (int64_t i = warp; i < p.count; i += kWarps) total += p.partial[i * p.stride + n];
  }
  totals[warp][lane] = total;
  __syncthreads();
  if (warp != 0 || n >= p.columns) return;
#pragma unroll
  for (int i = 1; i < kWarps; ++i) total += totals[i][lane];
  if (p.format == Format::f32) {
    static_cast<float*>(p.out)[n] = total;
  } else if (p.format == Format::bf16) {
    static_cast<__nv_bfloat16*>(p.out)[n] = from_float<__nv_bfloat16>(total);
  } else {
    static_cast<__half*>(p.out)[n] = from_float<__half>(total);
  }
}

}  // namespace

cudaError_t sum_partials(const SumPartials& params, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(ceil_div(params.columns, kColumns)));
  return launch(sum_partials_kernel, grid, kColumns * kWarps, params, stream);
}

}  // namespace fastbert::cuda
